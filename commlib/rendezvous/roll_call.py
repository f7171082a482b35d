"""The roll-call: all members of a ring register in the store before any blocking call is started.

Every member registers under a key that names ring, members and generation, and then waits on the
server for the verdict. The last member to register writes it. The first one searches for cycles
of waiting rings meanwhile. It rejects the ring if it finds one, and at its deadline.
``compare_set`` lets exactly one verdict win, so that all members get the same answer. A verdict
ends its generation. The next call on any member, also on a late one, begins the next generation,
so that a retry succeeds.
"""

import hashlib
import json
import os
import socket
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.rendezvous.connection import CLOSE_S
from commlib.rendezvous.host_exchange import network_number
from commlib.rendezvous.meeting import KEYS, Meeting, naming
from commlib.rendezvous.store import BoundedStore
from commlib.rendezvous.verdicts import FAILED, GO, LATE, ORDER, verdict_error
from commlib.rendezvous.wait_table import Generation, State, Table, long, short

__all__ = ["Meeting", "RollCall", "ring_key"]

_HISTORY = 8


def ring_key(ring_id: int, ranks: tuple[int, ...]) -> str:
    """Return the name of a ring's keys, the same on every member."""
    members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return f"ring/{ring_id}/{members}"


@dataclass(frozen=True)
class _Call:
    """One call of ``meet``."""

    ring_id: int
    ranks: tuple[int, ...]
    deadline: Deadline
    engine: str
    prefix: str
    again: str


class RollCall:
    """The roll-calls of one rank over ``store``."""

    def __init__(
        self,
        store: "Store | BoundedStore",
        me: int,
        slot: int = 0,
        home: "BoundedStore | None" = None,
    ) -> None:
        """Create the roll-call of a rank that waits for no ring.

        Args:
            store: The store shared by the members; this roll-call waits on its connection.
            me: This rank.
            slot: Numbers the roll-calls that a rank uses at the same time.
            home: The same keys for operations after a meeting; default: ``store``.
        """
        self.store, self.me, self.slot = BoundedStore.of(store), me, slot
        self._home = self.store if home is None else home
        self._home.connection.hold()
        self._history: deque[tuple[int, Any]] = deque(maxlen=_HISTORY)
        self._table = Table(self.store, me, slot)
        self._registered: dict[str, int] = {}  # generations of interrupted calls

    @property
    def unfinished(self) -> bool:
        """True if an interrupted call has registered; the next call continues there."""
        return bool(self._registered)

    def end(self) -> None:
        """Close the connection after its queued operations, and release the home's.

        Each wait takes a second at most.
        """
        self.store.connection.close(CLOSE_S)
        self._home.connection.release(CLOSE_S)

    def meet(
        self,
        ring_id: int,
        ranks: tuple[int, ...],
        deadline: Deadline,
        engine: str,
        again: str,
    ) -> "Meeting":
        """Wait until every member of the ring has registered.

        Args:
            ring_id: The ring.
            ranks: Its members.
            deadline: Of the wait.
            engine: What every member must have alike.
            again: The call that makes the ring, and on which ranks, for error texts.

        Raises:
            CommTimeout: Members are missing at the deadline; the error names them.
            RingOrderError: The members create their rings in different orders.
            RingError: The members pass different lists of ranks.
            EngineError: The engines differ.
            BootstrapError: The store does not answer by ``deadline``.
        """
        prefix = f"creating ring {ring_id} of ranks {list(ranks)} on rank {self.me}"
        self._history.append((ring_id, short(ranks)))
        try:
            with naming(prefix):
                self.store.connection.revive()
                call = _Call(ring_id, ranks, deadline, engine, prefix, again)
                return self._await_members(call)
        except BaseException:
            self._history.pop()
            self._table.withdraw()
            raise

    def _await_members(self, call: _Call) -> "Meeting":
        """Register in the ring's first generation without a verdict and wait for one."""
        ring = ring_key(call.ring_id, call.ranks)
        while True:
            number = self.store.add(f"{ring}/generation", 0, call.deadline)
            generation = Generation(self.store, ring, number)
            self._table.publish(self._state(generation, call), call.deadline)
            order, arrived = self._register(generation, call)
            # A generation also ends when this rank completes it: then there is a verdict.
            active = not generation.ended(call.deadline)
            if active or generation.keys.check(["verdict"], call.deadline):
                verdict = self._verdict(generation, call, order, arrived)
                if not self._too_late(verdict):
                    break
                generation.end(call.deadline)
            generation.leave("arrived", KEYS)
            self._registered.pop(generation.key, None)
        self._registered.pop(generation.key, None)
        if not verdict.startswith(GO):
            self._end_generations(generation, verdict, call.deadline)
            raise verdict_error(verdict, call.prefix, call.again)
        agreed = json.loads(verdict[len(GO) :])
        return Meeting(
            self._table,
            generation,
            self._home.under(generation.key),
            ranks=call.ranks,
            prefix=call.prefix,
            one_network=agreed["one_network"],
        )

    def _state(self, generation: Generation, call: _Call) -> State:
        return State(
            generation.key,
            "arrived",
            call.engine,
            f"process {os.getpid()} on {socket.gethostname()}",
            network_number(),
            list(self._history),
        )

    def _register(self, generation: Generation, call: _Call) -> tuple[int, int]:
        """Return this rank's number in the order of arrival, and how many ranks have arrived."""
        order = self._registered.get(generation.key, 0)
        arrived = generation.keys.add("arrived", int(order == 0), call.deadline)
        self._registered[generation.key] = order or arrived
        if arrived > len(call.ranks):
            raise BootstrapError(
                f"{arrived} processes have registered in a ring of {len(call.ranks)}: two programs "
                f"use one store, or two processes have one rank; change MASTER_PORT of one "
                f"program, or give each its own FLAGS_comm_run_token"
            )
        return order or arrived, arrived

    def _too_late(self, verdict: str) -> bool:
        """Return True if the others timed out while this rank was registering."""
        return verdict.startswith(LATE) and self.me in json.loads(verdict[len(LATE) :])["missing"]

    def _verdict(self, generation: Generation, call: _Call, order: int, arrived: int) -> str:
        """Return the verdict of this generation; the last member and a late one write it."""
        if arrived == len(call.ranks):
            return generation.decide("verdict", self._complete(generation, call), call.deadline)
        if order == 1:
            verdict = self._wait_and_search(generation, call)
            if verdict:
                return verdict
        elif generation.keys.wait(["verdict"], call.deadline):
            return generation.keys.get("verdict", call.deadline).decode()
        late = LATE + json.dumps(self._late(generation, call))
        return generation.decide("verdict", late, call.deadline)

    def _wait_and_search(self, generation: Generation, call: _Call) -> str:
        """Wait for the verdict and search for cycles meanwhile; return "" at the deadline."""
        pause, search_every = 0.001, 0.5
        next_search = time.monotonic() + search_every
        while not generation.keys.check(["verdict"], call.deadline):
            if call.deadline.passed():
                return ""
            if time.monotonic() >= next_search:
                cycle = self._table.find_cycle(generation.key, call.deadline)
                if cycle is not None:
                    return generation.decide("verdict", ORDER + json.dumps(cycle), call.deadline)
                search_every = min(1.5 * search_every, self._table.search_s)
                next_search = time.monotonic() + search_every
            time.sleep(min(pause, call.deadline.left()))
            pause = min(pause * 1.5, self._table.pause_s)
        return generation.keys.get("verdict", call.deadline).decode()

    def _complete(self, generation: Generation, call: _Call) -> str:
        """Return the verdict of a generation in which all members have registered."""
        states = self._table.states_at(generation.key, call.ranks, call.deadline)
        absent = [rank for rank in call.ranks if rank not in states]
        if absent:
            return (
                f"{FAILED}as many processes as members have registered, but ranks {absent} have "
                f"not: a rank was restarted while it waited, or a process of another program "
                f"uses the same store"
            )
        engines: dict[str, list[int]] = {}
        for rank in call.ranks:
            engines.setdefault(states[rank].engine, []).append(rank)
        if len(engines) > 1:
            differ = "; ".join(f"ranks {ranks} on {engine}" for engine, ranks in engines.items())
            return (
                f"{FAILED}the members have different engines or levels of comparison: {differ}. "
                f"Set FLAGS_dynamic_static_unified_comm, FLAGS_comm_check and "
                f"TORCH_DISTRIBUTED_DEBUG alike on every rank, and use one kind of device"
            )
        one_network = len({states[rank].network for rank in call.ranks}) == 1
        return GO + json.dumps({"one_network": one_network})

    def _late(self, generation: Generation, call: _Call) -> dict[str, Any]:
        """Return the missing ranks, and any other members that they passed for this ring."""
        states = self._table.states(call.ranks, call.deadline)
        arrived = {
            rank for rank, row in states.items() if any(each.key == generation.key for each in row)
        }
        missing = [rank for rank in call.ranks if rank not in arrived]
        members, others = list(call.ranks), {}
        for rank in missing:
            history = dict(pair for state in states.get(rank, ()) for pair in state.history)
            if call.ring_id in history and long(history[call.ring_id]) != members:
                others[rank] = long(history[call.ring_id])
        late = {"by": self.me, "missing": missing, "seconds": call.deadline.seconds}
        return {**late, "ring": call.ring_id, "others": others}

    def _end_generations(self, generation: Generation, verdict: str, deadline: Deadline) -> None:
        """End this generation and all generations of a broken cycle before this rank continues.

        A rank that has read the verdict could otherwise register in another ring of the cycle that
        has no verdict yet. It would count there as the member that this ring waits for.
        """
        if verdict.startswith(ORDER):
            for key in self._table.unended(json.loads(verdict[len(ORDER) :])["keys"], deadline):
                Generation.parse(self.store, key).decide("verdict", verdict, deadline)
        generation.end(deadline)
        generation.leave("arrived", KEYS)
