"""The members' call logs in the store: published by each, compared when it matters.

Every member has two keys in the ring's part of the store, which it overwrites: a short one with
the number of its calls, and one with its fingerprints and last calls. Nothing waits for a member.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from commlib.core.calls.log import CallLog, Snapshot
from commlib.core.reporter import reporter
from commlib.deadlines import Deadline, bounded
from commlib.errors import CommError
from commlib.log import log
from commlib.rendezvous.store import BoundedStore

LOOK_S = 1.0  # A close or a short deadline spends at most this on the comparison.
_LONGEST_LOOK_S = 5.0  # This is the most after a deadline of a minute or more.
PUBLISH_S = 0.5  # This is longer than a slice of a wait on a CPU.
_POLL_S = 0.02
_STORE_S = 30.0  # long: a shorter limit would mark a connection that others use as faulty
_SHOWN = 4  # ranks whose calls a text shows
_REQUESTS = 4  # of one round of one ring


class _Keys:
    """A ring's part of the store: every operation of this file, none of which awaits a key."""

    def __init__(self, store: BoundedStore) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        """Set ``key``."""
        self._store.set(key, value, Deadline(_STORE_S))

    def there(self, keys: Sequence[str]) -> bool:
        """Return True if all ``keys`` exist, in one request."""
        return self._store.check(list(keys), Deadline(_STORE_S))

    def read(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that exist, in one request."""
        return self._store.multi_get(list(keys), Deadline(_STORE_S))

    def leave(self, size: int, keys: Sequence[str]) -> None:
        """Count this member as gone; the last one of ``size`` deletes ``keys``."""
        self._store.delete_after("left", size, keys)


class CallReports:
    """One ring's call log, and those of the other members as the store has them."""

    def __init__(
        self, ring_id: int, rank: int, ranks: Sequence[int], seconds: float, calls: CallLog
    ) -> None:
        self.calls, self.seconds = calls, seconds
        self.found: list[str] = []  # Differences between members, as they were noticed.
        self.name = ""  # The name of the order of calls, if it is not the ring's own.
        self.others: list[CallReports] = []  # The reports of the ring's other orders of calls.
        self._ring_id, self._rank, self._ranks = ring_id, rank, ranks
        self._store: Callable[[], BoundedStore] | None = None
        self._published = -1
        self._state = "open"
        self._lock = threading.Lock()  # held by the thread that uses the store

    def open(self, store: Callable[[], BoundedStore]) -> None:
        """Begin to publish; ``store`` gives the ring's part of the store."""
        self._store = store
        reporter.add(self)

    # -- what a member writes ---------------------------------------------------------------------

    def _publish(self, store: _Keys, mine: Snapshot) -> None:
        record = {**mine._asdict(), "state": self._state}
        store.set(f"log/{self._rank}", json.dumps(record))
        store.set(f"at/{self._rank}", f"{mine.number} {self._state}")
        self._published = mine.number

    def round(self) -> None:
        """Publish, and compare with both neighbours; does nothing where no call was made."""
        with self._lock:
            mine, store = self.calls.snapshot(), self._store
            if store is None or self._state != "open" or mine.number == self._published:
                return
            live_store = store()
            if live_store.connection.answers():
                keys = _Keys(live_store)
                self._publish(keys, mine)
                self._compare(keys, mine)

    def requests(self) -> int:
        """Return what one round costs the store, over all members."""
        return _REQUESTS * len(self._ranks)

    # -- what a member reads ----------------------------------------------------------------------

    def _compare(self, store: _Keys, mine: Snapshot) -> None:
        """Note where a neighbour's calls differ: the later of two neighbours finds it.

        Rings of captured calls are left out: replays are not counted, so that the logs of correct
        programs may differ.
        """
        size = len(self._ranks)
        near = {(self._rank - 1) % size, (self._rank + 1) % size}
        for rank, record in self._records(store, near).items():
            text = None if record["captured"] or mine.captured else self._difference(mine, record)
            if text is not None and not self.found:
                group = f", group {self.name!r}" if self.name else ""
                prefix = (
                    f"ring {self._ring_id}{group}: this rank and {self._name(rank)} make different"
                )
                self.found.append(f"{prefix} calls: {text}")
                log.warning("%s", self.found[-1])

    def _records(self, store: _Keys, ranks: Sequence[int] | set[int]) -> dict[int, Any]:
        present = [rank for rank in sorted(ranks) if store.there([f"log/{rank}"])]
        rows = store.read([f"log/{rank}" for rank in present])
        return {rank: json.loads(row) for rank, row in zip(present, rows, strict=True)}

    def _difference(self, mine: Snapshot, other: dict[str, Any]) -> str | None:
        """Return where two logs part, None if they agree as far as both reach."""
        theirs = dict(map(tuple, other["recent"]))
        for number, text in mine.recent:
            if theirs.get(number, text) != text:
                return f"call {number} is {text} here and {theirs[number]} there"
        windows, equal = dict(map(tuple, other["windows"])), 0
        for number, value in mine.windows:
            if windows.get(number, value) != value:
                return f"they differ in calls {equal + 1} to {number}"
            equal = number if number in windows else equal
        if mine.number == other["number"] and mine.value != other["value"]:
            return f"they differ in calls {equal + 1} to {mine.number}"
        return None

    def _name(self, position: int) -> str:
        return f"rank {self._ranks[position]} (position {position} in the ring)"

    # -- at a deadline, and at the end ------------------------------------------------------------

    def verdict(self, collective: str, first: Sequence[int] = ()) -> str:
        """Return what the members' logs say of a failed call; empty if nothing does.

        Takes at most a tenth of the ring's timeout, between 1 and 5 s, whatever the store does.

        Args:
            collective: What the program has called.
            first: Members whose calls are shown in any case, and soon published.
        """
        self._state = f"failed in {collective}"
        seconds = max(LOOK_S, min(_LONGEST_LOOK_S, self.seconds / 10))
        label = f"comparing the calls of ring {self._ring_id}"
        report = self._bounded(partial(self._look, first), label, seconds) or ""
        others = [(one.name, one.verdict(collective, first)) for one in self.others]
        return "; ".join([report, *(f"in group {name!r}: {text}" for name, text in others if text)])

    def _bounded(self, step: Callable[[_Keys], Any], what: str, seconds: float) -> Any:
        store = self._store
        if store is None:
            return None

        def locked() -> Any:
            with self._lock:
                keys = store()
                return step(_Keys(keys)) if keys.connection.answers() else None

        try:
            return bounded(locked, Deadline(seconds), what)
        except (CommError, RuntimeError) as error:  # the store is gone: nothing can be compared
            log.once("%s: %s", what, error)
            return None

    def _look(self, first: Sequence[int], store: _Keys) -> str:
        mine = self.calls.snapshot()
        self._publish(store, mine)
        self._await(store, first)
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        places = self._places(store, others)
        apart = [rank for rank in others if places.get(rank, (0, ""))[0] != mine.number]
        shown = [*first, *(at for at in apart or others if at not in first)][:_SHOWN]
        records = self._records(store, shown)
        lines = [f"this rank is at call {mine.number}{_last(mine.recent)}"]
        for rank in shown:
            lines.append(self._where(rank, records.get(rank), mine))
        more = len(set(apart) - set(shown))
        if more:
            lines.append(f"{more} more ranks had made other numbers of calls")
        return "; ".join(lines)

    def _await(self, store: _Keys, ranks: Sequence[int]) -> None:
        """Wait a short time until members have published the calls that they fail in."""
        deadline, waiting = Deadline(PUBLISH_S), list(ranks)
        while waiting and not deadline.passed():
            places = self._places(store, waiting)
            waiting = [rank for rank in waiting if places.get(rank, (0, "open"))[1] == "open"]
            if waiting:
                time.sleep(_POLL_S)

    def _places(self, store: _Keys, others: list[int]) -> dict[int, tuple[int, str]]:
        """Return the other members' numbers of calls: two requests if all have published."""
        keys = [f"at/{rank}" for rank in others]
        if not store.there(keys):
            others = [rank for rank in others if store.there([f"at/{rank}"])]
            keys = [f"at/{rank}" for rank in others]
        progress = {}
        for rank, row in zip(others, store.read(keys), strict=True):
            number, _, state = row.decode().partition(" ")
            progress[rank] = int(number), state
        return progress

    def _where(self, rank: int, record: Any, mine: Snapshot) -> str:
        """Say where another member was, and where its calls part from this rank's."""
        if record is None:
            return f"{self._name(rank)} has published no calls yet"
        number, last = record["number"], _last(record["recent"])
        if record["state"] != "open":  # published by the failure or the close
            text = f"{self._name(rank)} is at call {number}{last} and has {record['state']}"
        else:
            made = f"had made {number} call{'' if number == 1 else 's'}{last}"
            text = f"{self._name(rank)} {made} when it last published"
        if mine.captured or record["captured"]:
            return f"{text} (replays of graphs are not counted)"
        apart = self._difference(mine, record)
        return text if apart is None else f"{text}: {apart}"

    def close(self) -> None:
        """Publish the last calls, and compare them with those of the neighbours."""
        for one in self.others:
            one.close()
        reporter.remove(self)
        self._state = "closed the ring"
        self._bounded(self._finish, f"comparing the calls of ring {self._ring_id}", LOOK_S)
        self._store = None

    def _finish(self, store: _Keys) -> None:
        mine = self.calls.snapshot()
        self._publish(store, mine)
        self._compare(store, mine)
        size = len(self._ranks)
        store.leave(size, [f"{kind}/{rank}" for kind in ("at", "log") for rank in range(size)])

    def resume(self) -> None:
        """Publish again after a failure that has been repaired."""
        for one in (self, *self.others):
            one._state, one._published = "open", -1

    def abandon(self) -> None:
        """Stop at once, without a look at the store."""
        for one in (self, *self.others):
            reporter.remove(one)
            one._store = None


def _last(recent: Sequence[Any]) -> str:
    return f" ({recent[-1][1]})" if recent else ""
