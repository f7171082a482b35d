"""The opening of a store that the program or torch made, and the question if its server lives."""

import threading
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from commlib.deadlines import Deadline
from commlib.rendezvous.tcp_store import IdleSocket, addresses

_WATCH_S = 2.0  # for the idle socket: torch may have reached the server at another address


class CloneOpening:
    """Open a separate connection to a store that the program made."""

    stage = "this rank was opening it"

    def __init__(self, store: Any) -> None:
        self.store = store
        self._idle, self._lock = IdleSocket(), threading.Lock()
        self._tried = False  # to connect the idle socket

    def __call__(self, deadline: Deadline) -> Any:
        """Return a clone of the store, or the store itself if it can't be cloned."""
        self._watch(deadline)
        return clone(self.store)

    def answers(self) -> bool:
        """Return False if the store is a TCP store whose server has ended; sends nothing.

        That of ``init_process_group`` ends when rank 0 destroys its groups, maybe before others.
        """
        return not self._idle.connected or bool(self._idle.peer())

    def _watch(self, deadline: Deadline) -> None:
        """Connect the idle socket once, where the store is a TCP store."""
        base = self.store
        while isinstance(base, dist.PrefixStore):
            base = base.underlying_store
        if not isinstance(base, dist.TCPStore):
            return
        with self._lock, suppress(OSError):  # without a socket the store counts as alive
            tried, self._tried = self._tried, True
            if not tried:
                soon = Deadline(max(0.001, min(_WATCH_S, deadline.left())))
                self._idle.connect(*addresses(base.host, base.port)[0], soon)


def clone(store: Any) -> Any:
    """Return a clone of a store, or the store itself if it can't be cloned."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store  # a store that is written in Python
