"""The table of which rank waits in which ring, and the circles in it."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from commlib.deadlines import Deadline
from commlib.rendezvous.store import BoundedStore

# A look costs three requests for each ring that waits; between looks a check per pause.
_CHECKS_PER_S, _LOOKS_PER_S = 800, 100


@dataclass(frozen=True)
class State:
    """Where one rank is: the key of its last meeting and how far it is there."""

    key: str | None
    step: str
    engine: str
    process: str
    network: int
    history: list[tuple[int, Any]]  # the last rings with their members, oldest first


@dataclass(frozen=True)
class Place:
    """One generation of one ring in the store."""

    store: BoundedStore
    ring: str
    generation: int

    @staticmethod
    def at(store: BoundedStore, key: str) -> "Place":
        """Return the place that ``key`` names."""
        ring, _, generation = key.rpartition("/")
        return Place(store, ring, int(generation))

    @property
    def counter(self) -> str:
        """The key that holds the ring's present generation."""
        return f"{self.ring}/generation"

    @property
    def room(self) -> BoundedStore:
        """The keys of this generation."""
        return self.store.under(self.key)

    @property
    def key(self) -> str:
        """The name of this place on every member."""
        return f"{self.ring}/{self.generation}"

    def decide(self, name: str, verdict: str, deadline: Deadline) -> str:
        """Offer ``verdict`` under ``name``, end the generation, and return the one that won."""
        winner = self.room.compare_set(name, "", verdict, deadline)
        self.end(deadline)
        return winner

    def end(self, deadline: Deadline) -> None:
        """Let the next call begin the next generation."""
        this, following = str(self.generation), str(self.generation + 1)
        self.store.compare_set(self.counter, this, following, deadline)

    def ended(self, deadline: Deadline) -> bool:
        """Return True if the next generation has begun."""
        return self.store.add(self.counter, 0, deadline) != self.generation

    def leave(self, needed: int | str, keys: Sequence[str]) -> None:
        """Count this rank out; the last one deletes the generation's keys.

        ``needed`` is how many have to leave, or the name of the counter that knows.
        """
        this, following = str(self.generation), str(self.generation + 1)
        counter = self.store.path(self.counter)
        # A rank that is slow to sign in must find the generation ended, not empty.
        ended = partial(_compare_set, counter, this, following)
        self.room.delete_after("left", needed, keys, first=ended)


def _compare_set(key: str, expected: str, desired: str, store: Any) -> None:
    store.compare_set(key, expected, desired)


class Table:
    """The states of all ranks; this one writes its own and reads the others in one request.

    A rank has a state for each meeting that it is in at the same time: ``slot`` identifies it.
    """

    def __init__(self, store: BoundedStore, me: int, slot: int = 0) -> None:
        self._store, self.me, self._name = store, me, f"{me}.{slot}"
        self._mine: State | None = None
        self._waiting = 1  # rings that wait, as of the last look

    @property
    def pause_s(self) -> float:
        """Seconds between two checks of one ring, so that all waiting rings share the load."""
        return max(0.05, self._waiting / _CHECKS_PER_S)

    @property
    def look_s(self) -> float:
        """Seconds between two looks of one ring."""
        return max(2.0, self._waiting / _LOOKS_PER_S)

    def publish(self, state: State, deadline: Deadline) -> None:
        """Write this rank's state."""
        self._store.set(f"state/{self._name}", _text(state), deadline)
        if self._mine is None:  # from now on others may read it
            self._store.append("started", f"{self._name} ", deadline)
        self._mine = state

    def step(self, step: str, deadline: Deadline) -> None:
        """Write how far this rank is."""
        assert self._mine is not None
        self.publish(replace(self._mine, step=step), deadline)

    def withdraw(self) -> None:
        """Say, some time later, that this rank waits nowhere any more."""
        if self._mine is not None:
            self._mine = replace(self._mine, key=None)
            self._store.post_set(f"state/{self._name}", _text(self._mine))

    def known(self, ranks: Iterable[int] | None, deadline: Deadline) -> dict[int, list[State]]:
        """Return the states of those of ``ranks`` (None: of all) that have published one."""
        names = set(self._store.get("started", deadline).decode().split())
        wanted = None if ranks is None else set(ranks)
        owners = {name: int(name.partition(".")[0]) for name in sorted(names)}
        chosen = [name for name, rank in owners.items() if wanted is None or rank in wanted]
        rows = self._store.multi_get([f"state/{name}" for name in chosen], deadline)
        found: dict[int, list[State]] = {}
        for name, row in zip(chosen, rows, strict=True):
            found.setdefault(owners[name], []).append(State(*json.loads(row)))
        return found

    def at(self, key: str, ranks: Iterable[int], deadline: Deadline) -> dict[int, State]:
        """Return the states in the place ``key`` of those of ``ranks`` that are there."""
        return {
            rank: state
            for rank, states in self.known(ranks, deadline).items()
            for state in states
            if state.key == key
        }

    def unended(self, keys: Iterable[str], deadline: Deadline) -> list[str]:
        """Return those of ``keys`` whose generation still waits for its verdict."""
        keys = list(keys)
        places = [Place.at(self._store, key) for key in keys]
        now = self._store.multi_get([place.counter for place in places], deadline)
        return [
            key
            for key, place, generation in zip(keys, places, now, strict=True)
            if int(generation) == place.generation
        ]

    def circle(self, key: str, deadline: Deadline) -> dict[str, Any] | None:
        """Return the circle of rings that wait for each other through ``key``, if there is one.

        A ring waits for another one if a member that it lacks waits there. The states arrive in one
        request. So a ring that has not ended later on was waiting at that moment, and a circle of
        such rings can't dissolve by itself. A rank that waits in several rings at the same time, in
        threads, is not part of a circle: another thread may bring it to any ring.
        """
        states: dict[int, State] = {}
        rings: dict[str, list[int]] = {}
        for rank, all_states in self.known(None, deadline).items():
            waits = [state for state in all_states if state.key and state.step == "here"]
            if len(waits) == 1:
                states[rank] = waits[0]
                rings.setdefault(str(waits[0].key), []).append(rank)
        unended = self.unended(rings, deadline)
        self._waiting = max(1, len(unended))
        place_of = {rank: ring for ring in unended for rank in rings[ring]}
        members = {ring: long(states[rings[ring][0]].history[-1][1]) for ring in unended}
        path = _round(key, members, place_of)
        if path is None:
            return None
        return {
            "keys": sorted({place_of[rank] for rank in path}),
            "orders": {rank: states[rank].history for rank in path},
        }


def _round(key: str, members: dict[str, list[int]], place_of: dict[int, str]) -> list[int] | None:
    """Return the ranks along the shortest way from ring ``key`` to itself, each by its ring."""
    came: dict[str, tuple[str, int]] = {}  # ring -> the ring that waits for it, and for which rank
    level = [key]
    while level and key not in came:
        following = []
        for ring in level:
            for rank in members.get(ring, ()):
                other = place_of.get(rank)
                if other is not None and other != ring and other not in came:
                    came[other] = ring, rank
                    following.append(other)
        level = following
    if key not in came:
        return None
    path: list[int] = []
    at = key
    while not path or at != key:
        at, rank = came[at]
        path.append(rank)
    return path


def _text(state: State) -> str:
    return json.dumps(
        [state.key, state.step, state.engine, state.process, state.network, state.history]
    )


def short(ranks: Sequence[int]) -> Any:
    """Return ``ranks`` as [first, count, step] in a string if they are evenly spaced."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if all(b - a == step for a, b in pairwise(ranks)):
            return f"{ranks[0]} {len(ranks)} {step}"
    return list(ranks)


def long(text: Any) -> list[int]:
    """Return the ranks that ``short`` has written."""
    if isinstance(text, str):
        first, count, step = map(int, text.split())
        return [first + at * step for at in range(count)]
    return list(text)
