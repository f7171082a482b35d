"""The opening of a store that the program or torch made, and the question if its server lives."""

import weakref
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
        self._idle: IdleSocket | None = None

    def __call__(self, deadline: Deadline) -> Any:
        """Return a clone of the store, or the store itself if it can't be cloned."""
        if self._idle is None:
            self._idle = _watching(self.store, deadline)
        return clone(self.store)

    def answers(self) -> bool:
        """Return False if the store is a TCP store whose server has ended; sends nothing.

        That of ``init_process_group`` ends when rank 0 destroys its groups, maybe before others.
        """
        return self._idle is None or not self._idle.connected or bool(self._idle.peer())


# One per server: a thousand ranks with many rings would need more sockets than a server has.
_idle_sockets: "weakref.WeakValueDictionary[tuple[str, int], IdleSocket]" = (
    weakref.WeakValueDictionary()
)


def _watching(store: Any, deadline: Deadline) -> IdleSocket | None:
    """Return an idle socket to the server of a TCP store; None for other stores.

    It is not connected if the server was not reached: the store counts as alive then.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):
        return None
    server = store.host, store.port
    idle = _idle_sockets.get(server)
    if idle is not None and (idle.peer() or not idle.connected):
        return idle
    idle = _idle_sockets[server] = IdleSocket()  # the first one, or a later server at this port
    with suppress(OSError):
        soon = Deadline(max(0.001, min(_WATCH_S, deadline.left())))
        idle.connect(*addresses(*server)[0], soon)
    return idle


def clone(store: Any) -> Any:
    """Return a clone of a store, or the store itself if it can't be cloned."""
    try:
        return store.clone()
    except (AttributeError, RuntimeError, NotImplementedError):
        return store  # a store that is written in Python
