"""The wait table: each rank's waiting ring, and cycles of rings that wait for each other."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

from commlib.deadlines import Deadline
from commlib.rendezvous.store import BoundedStore

# A search for cycles costs three requests per waiting ring; between searches, one check per pause.
_CHECKS_PER_S, _SEARCHES_PER_S = 800, 100


@dataclass(frozen=True)
class State:
    """The state of one rank: the key of its last generation and its step there."""

    key: str | None
    step: str
    engine: str
    process: str
    network: int
    history: list[tuple[int, Any]]  # its last rings with their members, oldest first


@dataclass(frozen=True)
class Generation:
    """One generation of one ring in the store."""

    store: BoundedStore
    ring: str
    number: int

    @staticmethod
    def parse(store: BoundedStore, key: str) -> "Generation":
        """Return the generation that ``key`` names."""
        ring, _, number = key.rpartition("/")
        return Generation(store, ring, int(number))

    @property
    def counter(self) -> str:
        """The key that holds the ring's current generation."""
        return f"{self.ring}/generation"

    @property
    def keys(self) -> BoundedStore:
        """The keys of this generation."""
        return self.store.under(self.key)

    @property
    def key(self) -> str:
        """The name of this generation, the same on every member."""
        return f"{self.ring}/{self.number}"

    def decide(self, name: str, verdict: str, deadline: Deadline) -> str:
        """Propose ``verdict`` under ``name``, end the generation, and return the winning one."""
        winner = self.keys.compare_set(name, "", verdict, deadline)
        self.end(deadline)
        return winner

    def end(self, deadline: Deadline) -> None:
        """End this generation: the next call begins the next one."""
        self.store.compare_set(self.counter, str(self.number), str(self.number + 1), deadline)

    def ended(self, deadline: Deadline) -> bool:
        """Return True if the next generation has begun."""
        return self.store.add(self.counter, 0, deadline) != self.number

    def leave(self, needed: int | str, keys: Sequence[str]) -> None:
        """Count this rank as left; the last one deletes the generation's keys.

        ``needed`` is how many ranks have to leave, or the name of the counter with that number.
        """
        counter = self.store.path(self.counter)
        # A rank that is slow to arrive must find the generation ended, not empty.
        end = partial(_compare_set, counter, str(self.number), str(self.number + 1))
        self.keys.delete_after("left", needed, keys, first=end)


def _compare_set(key: str, expected: str, desired: str, store: Any) -> None:
    store.compare_set(key, expected, desired)


class Table:
    """The states of all ranks: a rank writes its own and reads all others in one request.

    A rank that creates several rings at the same time has a state per ring, numbered by ``slot``.
    """

    def __init__(self, store: BoundedStore, me: int, slot: int = 0) -> None:
        self._store, self.me, self._name = store, me, f"{me}.{slot}"
        self._state: State | None = None
        self._waiting = 1  # rings that waited at the last search

    @property
    def pause_s(self) -> float:
        """Seconds between two checks of one ring, so that all waiting rings share the load."""
        return max(0.05, self._waiting / _CHECKS_PER_S)

    @property
    def search_s(self) -> float:
        """Seconds between two searches of one ring for cycles."""
        return max(2.0, self._waiting / _SEARCHES_PER_S)

    def publish(self, state: State, deadline: Deadline) -> None:
        """Write this rank's state."""
        self._store.set(f"state/{self._name}", _text(state), deadline)
        if self._state is None:  # from now on others may read it
            self._store.append("started", f"{self._name} ", deadline)
        self._state = state

    def step(self, step: str, deadline: Deadline) -> None:
        """Write the step that this rank has reached."""
        assert self._state is not None
        self.publish(replace(self._state, step=step), deadline)

    def withdraw(self) -> None:
        """Queue the state of a rank that waits for no ring."""
        if self._state is not None:
            self._state = replace(self._state, key=None)
            self._store.post_set(f"state/{self._name}", _text(self._state))

    def states(self, ranks: Iterable[int] | None, deadline: Deadline) -> dict[int, list[State]]:
        """Return the states of those of ``ranks`` (None: of all) that have published one."""
        started = set(self._store.get("started", deadline).decode().split())
        selected = None if ranks is None else set(ranks)
        owners = {name: int(name.partition(".")[0]) for name in sorted(started)}
        names = [name for name, rank in owners.items() if selected is None or rank in selected]
        rows = self._store.multi_get([f"state/{name}" for name in names], deadline)
        states: dict[int, list[State]] = {}
        for name, row in zip(names, rows, strict=True):
            states.setdefault(owners[name], []).append(State(*json.loads(row)))
        return states

    def states_at(self, key: str, ranks: Iterable[int], deadline: Deadline) -> dict[int, State]:
        """Return the states of those of ``ranks`` that are in the generation ``key``."""
        return {
            rank: state
            for rank, states in self.states(ranks, deadline).items()
            for state in states
            if state.key == key
        }

    def unended(self, keys: Iterable[str], deadline: Deadline) -> list[str]:
        """Return those of ``keys`` whose generation still waits for its verdict."""
        generations = [Generation.parse(self._store, key) for key in keys]
        current = self._store.multi_get([each.counter for each in generations], deadline)
        pairs = zip(generations, current, strict=True)
        return [each.key for each, number in pairs if int(number) == each.number]

    def find_cycle(self, key: str, deadline: Deadline) -> dict[str, Any] | None:
        """Return a cycle of rings that wait for each other through ``key``; None without one.

        A ring waits for another ring if one of its missing members waits there. All states are
        read in one request. A ring that has not ended after that was waiting at that moment, so a
        cycle of such rings can't resolve itself. A rank that waits in several rings, in threads, is
        in no cycle: another of its threads may join any ring.
        """
        states: dict[int, State] = {}
        rings: dict[str, list[int]] = {}
        for rank, all_states in self.states(None, deadline).items():
            waits = [state for state in all_states if state.key and state.step == "arrived"]
            if len(waits) == 1:
                states[rank] = waits[0]
                rings.setdefault(str(waits[0].key), []).append(rank)
        unended = self.unended(rings, deadline)
        self._waiting = max(1, len(unended))
        ring_of = {rank: ring for ring in unended for rank in rings[ring]}
        members = {ring: long(states[rings[ring][0]].history[-1][1]) for ring in unended}
        path = _shortest_cycle(key, members, ring_of)
        if path is None:
            return None
        return {
            "keys": sorted({ring_of[rank] for rank in path}),
            "orders": {rank: states[rank].history for rank in path},
        }


def _shortest_cycle(
    key: str, members: dict[str, list[int]], ring_of: dict[int, str]
) -> list[int] | None:
    """Return the ranks along the shortest path from ring ``key`` to itself; None without one."""
    waiter: dict[str, tuple[str, int]] = {}  # ring -> the ring that waits for it, and the rank
    level = [key]
    while level and key not in waiter:
        following = []
        for ring in level:
            for rank in members.get(ring, ()):
                other = ring_of.get(rank)
                if other is not None and other != ring and other not in waiter:
                    waiter[other] = ring, rank
                    following.append(other)
        level = following
    if key not in waiter:
        return None
    path: list[int] = []
    ring = key
    while not path or ring != key:
        ring, rank = waiter[ring]
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
    """Return the ranks from the output of ``short``."""
    if isinstance(text, str):
        first, count, step = map(int, text.split())
        return [first + at * step for at in range(count)]
    return list(text)
