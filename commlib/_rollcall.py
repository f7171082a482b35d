"""The arrival roll-call: members meet in the store before anything that could block is started.

Every member signs in under a key that names ring, members and generation. The first member sees
when all have come and writes the verdict; whoever runs out of time, or sees that the members wait
for each other in a circle, writes another. ``compare_set`` lets exactly one verdict win, so that
all who wait leave with the same answer. A verdict ends its generation: the next call on any member,
also on one that came too late for it, begins the next one, so that a retry always meets.

Behind the engine's own set-up the members meet once more: a ring exists on all of them or on none,
and nobody closes it while another is still connecting.
"""

import base64
import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from torch.distributed import PrefixStore, Store

from commlib._deadline import Deadline
from commlib.errors import CommError, CommTimeout, EngineError, RingError, RingOrderError

_GO = "go:"
_LATE = "late:"
_ORDER = "order:"
_FAILED = "failed:"


def ring_key(ring_id: int, ranks: tuple[int, ...], generation: int) -> str:
    """The name of one attempt to create one ring, the same on every member."""
    members = hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]
    return f"ring/{ring_id}/{members}/{generation}"


class RollCall:
    """This rank's part in meeting other ranks over ``store``."""

    def __init__(self, store: Store, me: int) -> None:
        self.store, self.me = store, me
        self._history: list[tuple[int, list[int]]] = []
        self._sequence = 0
        self._generations: dict[tuple[int, tuple[int, ...]], int] = {}

    def meet(
        self,
        ring_id: int,
        ranks: tuple[int, ...],
        deadline: Deadline,
        engine: str,
        payload: Callable[[], bytes],
    ) -> "Meeting":
        """Wait until every member of the ring has signed in; ``payload`` runs on the first member.

        Raises ``CommTimeout`` naming the missing ranks, ``RingOrderError`` showing both orders,
        ``RingError`` both lists of members, or ``EngineError`` when engines differ.
        """
        self._history.append((ring_id, list(ranks)))
        try:
            verdict, room = self._attend(ring_id, ranks, deadline, engine, payload)
        finally:
            self._publish(waiting=None)
        where = f"creating ring {ring_id} of ranks {list(ranks)} on rank {self.me}"
        if not verdict.startswith(_GO):
            self._history.pop()
            raise _refusal(verdict, where)
        return Meeting(self.me, ranks, where, base64.b64decode(verdict[len(_GO) :]), room)

    def _attend(
        self,
        ring_id: int,
        ranks: tuple[int, ...],
        deadline: Deadline,
        engine: str,
        payload: Callable[[], bytes],
    ) -> tuple[str, Store]:
        """Sign in to the ring's first generation without a verdict and wait for one."""
        while True:
            generation = self._generations.get((ring_id, ranks), 0)
            key = ring_key(ring_id, ranks, generation)
            room = PrefixStore(key, self.store)
            if room.check(["verdict"]):
                self._generations[ring_id, ranks] = generation + 1
                continue
            self._publish(waiting=key)
            new = not room.check([f"here/{self.me}"])  # an interrupted call has signed in already
            room.set(f"here/{self.me}", engine)
            arrived = room.add("arrived", int(new))
            if room.check(["verdict"]) and not room.get("verdict").decode().startswith(_GO):
                continue  # the others gave up while this rank was signing in
            verdict = self._await_verdict(room, key, ranks, arrived, deadline, payload)
            self._generations[ring_id, ranks] = generation + 1
            return verdict, room

    def _await_verdict(
        self,
        room: Store,
        key: str,
        ranks: tuple[int, ...],
        arrived: int,
        deadline: Deadline,
        payload: Callable[[], bytes],
    ) -> str:
        # Looking around costs a question a member: the larger the ring, the more seldom.
        look_every = max(0.5, 0.02 * len(ranks))
        next_look, seen, pause = time.monotonic() + look_every, None, 0.001
        while not room.check(["verdict"]):
            if self.me == ranks[0]:
                if arrived == len(ranks):
                    return _decide(room, "verdict", self._go(room, ranks, payload))
                arrived = room.add("arrived", 0)
            if deadline.passed():
                late = _late(room, "here", self.me, ranks, deadline)
                return _decide(room, "verdict", _LATE + json.dumps({**late, **self._about(late)}))
            if time.monotonic() >= next_look:
                circle = self._circle(key, ranks)
                if circle is not None and circle == seen:
                    self._break(circle)
                    break
                seen, next_look = circle, time.monotonic() + look_every
            time.sleep(min(pause, deadline.left()))
            pause = min(pause * 1.5, 0.05)
        verdict: str = room.get("verdict").decode()
        if verdict.startswith(_ORDER):
            self._spread(verdict)
        return verdict

    def _go(self, room: Store, ranks: tuple[int, ...], payload: Callable[[], bytes]) -> str:
        engines = _engines(room, ranks)
        if len(engines) > 1:
            differ = "; ".join(f"ranks {who} on {engine}" for engine, who in engines.items())
            return (
                f"{_FAILED}the members come with different engines or levels of comparison: "
                f"{differ}. Set FLAGS_dynamic_static_unified_comm, FLAGS_comm_check and "
                f"TORCH_DISTRIBUTED_DEBUG alike on every rank, and use one kind of device"
            )
        try:
            return _GO + base64.b64encode(payload()).decode()
        except Exception as error:  # the others must not wait for what can't come
            return f"{_FAILED}rank {self.me}: {type(error).__name__}: {error}"

    # -- members that wait for each other ---------------------------------------------------------

    def _about(self, late: dict[str, Any]) -> dict[str, Any]:
        """Say which ring this is, and which other members the late ranks have given it."""
        ring_id, members = self._history[-1]
        made = {rank: dict(self._state_of(rank)["history"]) for rank in late["missing"]}
        given = {rank: rings[ring_id] for rank, rings in made.items() if ring_id in rings}
        others = {rank: other for rank, other in given.items() if other != members}
        return {"ring": ring_id, "members": members, "others": others}

    def _publish(self, waiting: str | None) -> None:
        self._sequence += 1
        state = {"seq": self._sequence, "waiting": waiting, "history": self._history[-8:]}
        self.store.set(f"state/{self.me}", json.dumps(state))

    def _state_of(self, rank: int) -> dict[str, Any]:
        if not self.store.check([f"state/{rank}"]):
            return {"seq": 0, "waiting": None, "history": []}
        state: dict[str, Any] = json.loads(self.store.get(f"state/{rank}"))
        return state

    def _circle(self, key: str, ranks: tuple[int, ...]) -> dict[int, dict[str, Any]] | None:
        """Follow missing member -> the ring it waits in -> its missing members, back to this ring.

        Returns rank -> state along the circle, None if there is none. A circle that stands still
        between two looks (the states carry sequence numbers) can't dissolve by itself.
        """
        path: dict[int, dict[str, Any]] = {}

        def follow(key: str, ranks: list[int]) -> bool:
            room = PrefixStore(key, self.store)
            for rank in ranks:
                if rank in path or room.check([f"here/{rank}"]):
                    continue
                state = self._state_of(rank)
                if state["waiting"] is None:
                    continue
                path[rank] = state
                members = state["history"][-1][1]
                if self.me in members or follow(state["waiting"], members):
                    return True
                del path[rank]
            return False

        return path if follow(key, list(ranks)) else None

    def _break(self, circle: dict[int, dict[str, Any]]) -> None:
        """Give every ring of the circle the same refusal."""
        states = [(self.me, self._state_of(self.me)), *circle.items()]
        told = {
            "orders": {rank: state["history"] for rank, state in states},
            "keys": sorted({state["waiting"] for _, state in states if state["waiting"]}),
        }
        self._spread(_ORDER + json.dumps(told))

    def _spread(self, verdict: str) -> None:
        """See to it that every ring of a broken circle has its verdict.

        Whoever reads the verdict does so before it leaves: else it could go on to another ring of
        the circle that is not told yet, and be taken for the member that this ring waits for.
        """
        for key in json.loads(verdict[len(_ORDER) :])["keys"]:
            _decide(PrefixStore(key, self.store), "verdict", verdict)


class Meeting:
    """Members that have found each other and are setting their engine up."""

    def __init__(
        self, me: int, ranks: tuple[int, ...], where: str, payload: bytes, room: Store
    ) -> None:
        self.me, self.ranks, self.where, self.payload = me, ranks, where, payload
        self.store = PrefixStore("engine", room)
        self._room = room

    def finish(self, error: Exception | None, deadline: Deadline) -> None:
        """Say how this rank's set-up went and wait for the others.

        Raises ``EngineError`` when it failed on any member, ``CommTimeout`` naming those that did
        not come through.
        """
        room = self._room
        if error is not None:
            _decide(room, "built", f"{_FAILED}rank {self.me}: {type(error).__name__}: {error}")
        else:
            room.set(f"ready/{self.me}", "1")
            if room.add("ready", 1) == len(self.ranks):
                _decide(room, "built", _GO)
        if not deadline.poll(lambda: room.check(["built"]), longest_sleep=0.05):
            late = _late(room, "ready", self.me, self.ranks, deadline)
            _decide(room, "built", _LATE + json.dumps(late))
        verdict = room.get("built").decode()
        if not verdict.startswith(_GO):
            raise _refusal(verdict, self.where) from error


def _engines(room: Store, ranks: tuple[int, ...]) -> dict[str, list[int]]:
    """Return which members signed in with which engine."""
    engines: dict[str, list[int]] = {}
    for rank, engine in zip(ranks, room.multi_get([f"here/{r}" for r in ranks]), strict=True):
        engines.setdefault(engine.decode(), []).append(rank)
    return engines


def _decide(room: Store, name: str, verdict: str) -> str:
    """Offer ``verdict`` under ``name`` and return the one that won."""
    winner: bytes = room.compare_set(name, "", verdict)
    return winner.decode()


def _late(
    room: Store, sign: str, me: int, ranks: tuple[int, ...], deadline: Deadline
) -> dict[str, Any]:
    missing = [rank for rank in ranks if not room.check([f"{sign}/{rank}"])]
    return {"by": me, "missing": missing, "seconds": deadline.seconds}


def _refusal(verdict: str, where: str) -> CommError:
    if verdict.startswith(_FAILED):
        return EngineError(f"{where}: {verdict[len(_FAILED) :]}")
    if verdict.startswith(_ORDER):
        return _crossed(json.loads(verdict[len(_ORDER) :])["orders"], where)
    told = json.loads(verdict[len(_LATE) :])
    return CommTimeout(
        f"{where}: ranks {told['missing']} did not come within {told['seconds']:g} s (rank "
        f"{told['by']} waited); {_to_type(told)}, or raise timeout= or FLAGS_comm_timeout_s"
    )


def _crossed(orders: dict[str, list[list[Any]]], where: str) -> RingError:
    """The error of a circle: other orders, or other members under one ring id."""
    ranked = sorted(orders.items(), key=lambda item: int(item[0]))
    waiting = [(rank, *made[-1]) for rank, made in ranked]
    ids, lists = ({str(one[at]) for one in waiting} for at in (1, 2))
    if len(ids) == 1 and len(lists) > 1:
        given = "; ".join(f"rank {rank} gave {members}" for rank, _, members in waiting)
        return RingError(
            f"{where}: its members are not the same everywhere: {given}; type the same list of "
            f"ranks, in one order, on every rank"
        )
    lines = "; ".join(
        f"rank {rank} created {', then '.join(f'ring {i} {m}' for i, m in made)}"
        for rank, made in ranked
    )
    return RingOrderError(
        f"{where}: the members wait for each other: {lines}. Every rank must create the rings "
        f"that it shares with others in one order; type the new_ring calls in order of ring id"
    )


def _to_type(told: dict[str, Any]) -> str:
    """What brings the ranks that did not come to a ring."""
    if "ring" not in told:  # they came, and are still connecting
        return "look at their logs"
    ring_id, members = told["ring"], told["members"]
    if told["others"]:
        given = "; ".join(f"rank {rank} gave {other}" for rank, other in told["others"].items())
        return f"{given} for ring {ring_id}: type the same list on every rank"
    call = f"new_ring({ring_id}, {members})" if ring_id else "init()"
    return f"start them and have them call commlib.{call}"
