"""The arrival roll-call: members meet in the store before anything that could block is started.

Every member signs in under a key that names ring, members and generation, and then waits on the
server for the verdict. The last one to sign in writes it. The first one to sign in looks for the
others while it waits (`_Waiting`), and refuses the ring at its deadline or when members wait for
each other in a circle. ``compare_set`` lets exactly one verdict win, so that all members leave with
the same answer. A verdict ends its generation: the next call on any member, also on one that came
too late, begins the next generation, so that a retry always meets.

After the engine's own set-up the members meet once more: a ring exists on all of them or on none,
and no member closes it while another is still connecting. The last member deletes the keys.
"""

import base64
import hashlib
import json
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.rendezvous.host_exchange import delete_address, network_number
from commlib.rendezvous.store import BoundedStore, EngineStore
from commlib.rendezvous.verdicts import FAILED, GO, LATE, ORDER, refusal
from commlib.rendezvous.wait_table import Place, State, Table, long, short

_KEYS = ("arrived", "verdict", "ready", "built")  # of one generation
_HISTORY = 8
_LAST_S = 1.0  # for what was posted to the connection of a roll call that ends


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
    payload: Callable[[], bytes]
    where: str


class RollCall:
    """This rank's part in meeting other ranks over ``store``."""

    def __init__(
        self,
        store: "Store | BoundedStore",
        me: int,
        slot: int = 0,
        home: "BoundedStore | None" = None,
    ) -> None:
        """Begin with no meeting.

        Args:
            store: Where the members meet; this roll-call waits on its connection.
            me: This rank.
            slot: Tells the meetings apart that a rank is in at the same time.
            home: The same keys for the time after a meeting; default: ``store``.
        """
        self.store, self.me, self.slot = BoundedStore.of(store), me, slot
        self._home = self.store if home is None else home
        self._history: deque[tuple[int, Any]] = deque(maxlen=_HISTORY)
        self._table = Table(self.store, me, slot)
        self._inside: dict[str, int] = {}  # places that an interrupted call has signed in to

    @property
    def unfinished(self) -> bool:
        """Whether an interrupted call has signed in to a place, where the next one goes on."""
        return bool(self._inside)

    def end(self) -> None:
        """Close the connection after what was posted to it; waits a second at most."""
        self.store.connection.close(_LAST_S)

    def meet(
        self,
        ring_id: int,
        ranks: tuple[int, ...],
        deadline: Deadline,
        engine: str,
        payload: Callable[[], bytes],
    ) -> "Meeting":
        """Wait until every member of the ring has signed in; ``payload`` runs on the last one.

        Raises:
            CommTimeout: names the missing ranks.
            RingOrderError: shows the orders in which the members created their rings.
            RingError: shows the lists of members where they differ.
            EngineError: the engines differ, or ``payload`` failed.
            BootstrapError: the store does not answer by ``deadline``.
        """
        where = f"creating ring {ring_id} of ranks {list(ranks)} on rank {self.me}"
        self._history.append((ring_id, short(ranks)))
        try:
            with naming(where):
                self.store.connection.revive()
                call = _Call(ring_id, ranks, deadline, engine, payload, where)
                return self._attend(call)
        except BaseException:
            self._history.pop()
            self._table.withdraw()
            raise

    def _attend(self, call: _Call) -> "Meeting":
        """Sign in to the ring's first generation without a verdict and wait for one."""
        while True:
            ring = ring_key(call.ring_id, call.ranks)
            generation = self.store.add(f"{ring}/generation", 0, call.deadline)
            place = Place(self.store, ring, generation)
            self._table.publish(self._state(place, call), call.deadline)
            number, arrived = self._sign_in(place, call)
            # Ended may also mean that this rank was the last one that the others waited for.
            if not place.ended(call.deadline) or place.room.check(["verdict"], call.deadline):
                verdict = self._verdict(place, call, number, arrived)
                if not self._too_late(verdict):
                    break
                place.end(call.deadline)
            place.leave("arrived", _KEYS)
            self._inside.pop(place.key, None)
        self._inside.pop(place.key, None)
        if not verdict.startswith(GO):
            self._see_off(place, verdict, call.deadline)
            raise refusal(verdict, call.where)
        home = self._home.under(place.key)
        return Meeting(self._table, call, place, home, json.loads(verdict[len(GO) :]))

    def _state(self, place: Place, call: _Call) -> State:
        return State(
            place.key,
            "here",
            call.engine,
            f"process {os.getpid()} on {socket.gethostname()}",
            network_number(),
            list(self._history),
        )

    def _sign_in(self, place: Place, call: _Call) -> tuple[int, int]:
        """Return this rank's place in the order of arrival, and how many have arrived."""
        number = self._inside.get(place.key, 0)
        arrived = place.room.add("arrived", int(number == 0), call.deadline)
        self._inside[place.key] = number or arrived
        if arrived > len(call.ranks):
            raise BootstrapError(
                f"{arrived} processes have signed in to a ring of {len(call.ranks)}: two programs "
                f"use one store, or two processes have one rank; change MASTER_PORT of one "
                f"program, or give each its own FLAGS_comm_run_token"
            )
        return number or arrived, arrived

    def _too_late(self, verdict: str) -> bool:
        """Return True if the others gave up while this rank was signing in."""
        return verdict.startswith(LATE) and self.me in json.loads(verdict[len(LATE) :])["missing"]

    def _verdict(self, place: Place, call: _Call, number: int, arrived: int) -> str:
        """Return the verdict of this generation; write it where that is this rank's part."""
        if arrived == len(call.ranks):
            return place.decide("verdict", self._go(place, call), call.deadline)
        if number == 1:
            verdict = self._look_out(place, call)
            if verdict:
                return verdict
        elif place.room.wait(["verdict"], call.deadline):
            return place.room.get("verdict", call.deadline).decode()
        late = LATE + json.dumps(self._late(place, call))
        return place.decide("verdict", late, call.deadline)

    def _look_out(self, place: Place, call: _Call) -> str:
        """Wait for the verdict, and look for circles meanwhile; return "" at the deadline."""
        pause, look_every = 0.001, 0.5
        next_look = time.monotonic() + look_every
        while not place.room.check(["verdict"], call.deadline):
            if call.deadline.passed():
                return ""
            if time.monotonic() >= next_look:
                circle = self._table.circle(place.key, call.deadline)
                if circle is not None:
                    return place.decide("verdict", ORDER + json.dumps(circle), call.deadline)
                look_every = min(1.5 * look_every, self._table.look_s)
                next_look = time.monotonic() + look_every
            time.sleep(min(pause, call.deadline.left()))
            pause = min(pause * 1.5, self._table.pause_s)
        return place.room.get("verdict", call.deadline).decode()

    def _go(self, place: Place, call: _Call) -> str:
        """Return the verdict when all members are here."""
        states = self._table.at(place.key, call.ranks, call.deadline)
        absent = [rank for rank in call.ranks if rank not in states]
        if absent:
            return (
                f"{FAILED}as many processes as members have signed in, but ranks {absent} have "
                f"not: a rank was started again while it waited, or a process of another program "
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
        try:
            payload = base64.b64encode(call.payload()).decode()
        except Exception as error:  # the others must not wait in vain
            return f"{FAILED}rank {self.me}: {type(error).__name__}: {error}"
        one_network = len({states[rank].network for rank in call.ranks}) == 1
        return GO + json.dumps({"payload": payload, "one_network": one_network})

    def _late(self, place: Place, call: _Call) -> dict[str, Any]:
        """Return who is missing, and which other members those ranks have given this ring."""
        known = self._table.known(call.ranks, call.deadline)
        here = {rank for rank, states in known.items() if any(s.key == place.key for s in states)}
        missing = [rank for rank in call.ranks if rank not in here]
        histories = {
            rank: [pair for state in known.get(rank, ()) for pair in state.history]
            for rank in missing
        }
        given = {
            rank: dict(history)[call.ring_id]
            for rank, history in histories.items()
            if call.ring_id in dict(history)
        }
        members = list(call.ranks)
        others = {rank: long(text) for rank, text in given.items() if long(text) != members}
        late = {"by": self.me, "missing": missing, "seconds": call.deadline.seconds}
        return {**late, "ring": call.ring_id, "members": members, "others": others}

    def _see_off(self, place: Place, verdict: str, deadline: Deadline) -> None:
        """End the generation, and those of a broken circle, before this rank continues.

        A rank that has read the verdict could otherwise sign in to another ring of the circle that
        has none yet, and be taken for the member that this ring waits for.
        """
        if verdict.startswith(ORDER):
            for key in self._table.unended(json.loads(verdict[len(ORDER) :])["keys"], deadline):
                Place.at(self.store, key).decide("verdict", verdict, deadline)
        place.end(deadline)
        place.leave("arrived", _KEYS)


class Meeting:
    """Members that have found each other and are setting their engine up."""

    def __init__(
        self,
        table: Table,
        call: _Call,
        place: Place,
        home: BoundedStore,
        agreed: dict[str, Any],
    ) -> None:
        self.me, self.ranks, self.where = table.me, call.ranks, call.where
        self.payload = base64.b64decode(agreed["payload"])
        self.one_network: bool = agreed["one_network"]
        self.store = home.under("engine")
        self._table, self._place = table, place
        self._engine_stores: list[EngineStore] = []

    def engine_store(self, deadline: Deadline) -> EngineStore:
        """Return the store for the engine's set-up; its operations end by ``deadline``."""
        store = EngineStore(self.store, deadline, lambda: self.connecting(deadline))
        self._engine_stores.append(store)
        return store

    def connecting(self, deadline: Deadline) -> None:
        """Note that this rank has begun to connect, and waits for the others from here on."""
        self._table.step("connecting", deadline)

    def finish(self, error: Exception | None, deadline: Deadline) -> None:
        """Say how this rank's set-up went and wait for the others until ``deadline``.

        Raises:
            EngineError: the set-up failed on a member.
            CommTimeout: names the ranks that did not finish.
        """
        with naming(self.where):
            verdict = self._built(error, deadline)
            if not verdict.startswith(GO):
                self._place.end(deadline)  # the rank whose part this is may have died
        delete_address(self.store, self.ranks.index(self.me))
        self._place.leave(len(self.ranks), _KEYS)
        if not verdict.startswith(GO):
            raise refusal(verdict, self.where) from error
        for store in self._engine_stores:
            store.end()

    def _built(self, error: Exception | None, deadline: Deadline) -> str:
        place = self._place
        if error is None:
            self._table.step("ready", deadline)
            if place.room.add("ready", 1, deadline) == len(self.ranks):
                return place.room.compare_set("built", "", GO, deadline)
        elif not deadline.passed():
            failed = f"{FAILED}rank {self.me}: {type(error).__name__}: {error}"
            return place.room.compare_set("built", "", failed, deadline)
        if place.room.wait(["built"], deadline):
            return place.room.get("built", deadline).decode()
        late = LATE + json.dumps(self._late(deadline))
        return place.room.compare_set("built", "", late, deadline)

    def _late(self, deadline: Deadline) -> dict[str, Any]:
        """Return who has not begun to connect; if all have, who has not finished."""
        states = self._table.at(self._place.key, self.ranks, deadline)
        steps = {rank: state.step for rank, state in states.items()}
        idle = [rank for rank in self.ranks if steps.get(rank, "here") == "here"]
        busy = [rank for rank in self.ranks if steps.get(rank) == "connecting"]
        return {"by": self.me, "missing": idle or busy, "seconds": deadline.seconds}


@contextmanager
def naming(where: str) -> Iterator[None]:
    """Put ``where`` before the text of an error of the store."""
    try:
        yield
    except BootstrapError as error:
        raise BootstrapError(f"{where}: {error}") from error
