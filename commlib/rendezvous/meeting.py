"""The second part of a roll-call: members set their engine up and wait for each other's result."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.rendezvous.host_exchange import address
from commlib.rendezvous.store import BoundedStore, EngineStore
from commlib.rendezvous.verdicts import FAILED, GO, LATE, verdict_error
from commlib.rendezvous.wait_table import Generation, Table

KEYS = ("arrived", "verdict", "ready", "built")  # of one generation
_ENGINE = "engine"  # what the engine's keys in it begin with


class Meeting:
    """The members of one ring from the roll-call to the end of the engine's set-up.

    A ring exists on all members or on none: ``finish`` waits for all of them. No member closes the
    ring while another one is still connecting. The last member to leave deletes the keys.
    """

    def __init__(
        self,
        table: Table,
        generation: Generation,
        home: BoundedStore,
        *,
        ranks: tuple[int, ...],
        prefix: str,
        one_network: bool,
    ) -> None:
        """Store the outcome of a roll-call.

        Args:
            table: The states of all ranks.
            generation: The generation in which the members registered.
            home: The keys of this generation.
            ranks: The members.
            prefix: The prefix of error messages.
            one_network: True if all members share one loopback interface.
        """
        self.me, self.ranks, self.prefix = table.me, ranks, prefix
        self.one_network = one_network
        self.store = home.under(_ENGINE)
        self._table, self._generation = table, generation
        self._engine_stores: list[EngineStore] = []

    def engine_store(self, deadline: Deadline) -> EngineStore:
        """Return the store for the engine's set-up; its operations end by ``deadline``."""
        begun = partial(self._table.step, "connecting", deadline)  # holds no meeting: no cycle
        store = EngineStore(self.store, deadline, begun)
        self._engine_stores.append(store)
        return store

    def connecting(self, deadline: Deadline) -> None:
        """Record that this rank has begun to connect, and waits for the others from here on."""
        self._table.step("connecting", deadline)

    def finish(self, error: Exception | None, deadline: Deadline) -> None:
        """Report the result of this rank's set-up and wait for the others until ``deadline``.

        Raises:
            EngineError: The set-up failed on a member.
            CommTimeout: Ranks did not finish by the deadline; the error names them.
        """
        with naming(self.prefix):
            verdict = self._built(error, deadline)
            if not verdict.startswith(GO):
                self._generation.end(deadline)  # the rank that should do it may have died
        size = len(self.ranks)
        if not verdict.startswith(GO):  # others may be connecting, until they leave
            addresses = [f"{_ENGINE}/{address(member)}" for member in range(size)]
            self._generation.leave(size, [*KEYS, *addresses])
            raise verdict_error(verdict, self.prefix) from error
        self.store.delete([address(self.ranks.index(self.me))])
        self._generation.leave(size, KEYS)
        for store in self._engine_stores:
            store.end()

    def _built(self, error: Exception | None, deadline: Deadline) -> str:
        keys = self._generation.keys
        if error is None:
            self._table.step("ready", deadline)
            if keys.add("ready", 1, deadline) == len(self.ranks):
                return keys.compare_set("built", "", GO, deadline)
        elif not deadline.passed():
            failed = f"{FAILED}rank {self.me}: {type(error).__name__}: {error}"
            return keys.compare_set("built", "", failed, deadline)
        if keys.wait(["built"], deadline):
            return keys.get("built", deadline).decode()
        late = LATE + json.dumps(self._late(deadline))
        return keys.compare_set("built", "", late, deadline)

    def _late(self, deadline: Deadline) -> dict[str, Any]:
        """Return the ranks that have not begun to connect, or else those that are not ready."""
        states = self._table.states_at(self._generation.key, self.ranks, deadline)
        steps = {rank: state.step for rank, state in states.items()}
        idle = [rank for rank in self.ranks if steps.get(rank, "arrived") == "arrived"]
        busy = [rank for rank in self.ranks if steps.get(rank) == "connecting"]
        return {"by": self.me, "missing": idle or busy, "seconds": deadline.seconds}


@contextmanager
def naming(prefix: str) -> Iterator[None]:
    """Prefix errors of the store with ``prefix``."""
    try:
        yield
    except BootstrapError as error:
        raise BootstrapError(f"{prefix}: {error}") from error
