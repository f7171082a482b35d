"""A guard around each peer: one that fails, hangs or is wrong is left out with its reason."""

import faulthandler
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

from commlib import CommContext
from commlib.tools.bench.launch import RANK_DEADLINE_S
from commlib.tools.launch import LaunchError

PEER_S = 40  # for one step of a peer: below the deadline of a ring's exchange between hosts
REASON_LENGTH = 240

Value = TypeVar("Value")


class Watch:
    """The guard on one rank.

    A peer that raises on some rank is left out on all of them. One that hangs, or that leaves the
    GPU unusable, ends the rank; the rank's file in ``journal`` then names the peer, and
    ``launch_without`` starts the ranks again without it.
    """

    def __init__(
        self,
        ring: CommContext,
        journal: str,
        lost: Sequence[str],
        settle: Callable[[], object],
        seconds: float = PEER_S,
    ) -> None:
        """Leave ``lost`` out; ``settle`` waits for the device and raises what it reports."""
        self.failed: dict[str, dict[str, str]] = {}  # peer -> where -> reason
        self.lost = frozenset(lost)
        self._ring, self._settle, self._seconds = ring, settle, seconds
        self._file = Path(journal, str(ring.rank))
        self._end = time.monotonic() + RANK_DEADLINE_S

    def attempt(self, peer: str, where: str, step: Callable[[], Value]) -> Value | None:
        """Return what ``step`` returns, or None if it failed on some rank. Every rank calls it."""
        reason, result = "", None
        try:
            with self.running(peer):
                result = step()
                self._settle()
        except Exception as error:  # whatever a foreign library raises
            reason = _short(error)
            self._settle()  # raises again if this process can't use its GPU any more
        said = self._ring.all_gather_object(reason)
        self._file.write_text("")
        if not any(said):
            return result
        reasons = (f"rank {rank}: {text}" for rank, text in enumerate(said) if text)
        self.failed.setdefault(peer, {})[where] = "; ".join(reasons)
        return None

    @contextmanager
    def running(self, peer: str) -> Iterator[None]:
        """Name ``peer`` in the journal, and end this rank if the block takes too long."""
        self._file.write_text(peer)
        faulthandler.dump_traceback_later(self._seconds, exit=True)
        try:
            yield
        except Exception as error:
            self._file.write_text(f"{peer}\n{_short(error)}")
            raise
        finally:
            faulthandler.dump_traceback_later(max(self._end - time.monotonic(), 1), exit=True)
        self._file.write_text("")

    def meter(self, peer: str, turn: Callable[[], float]) -> Callable[[], float]:
        """Return ``turn`` under this guard."""

        def guarded() -> float:
            with self.running(peer):
                return turn()

        return guarded


def _short(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    return text[:REASON_LENGTH]


def launch_without(start: Callable[[str, list[str]], Any]) -> tuple[Any, dict[str, str]]:
    """Start ranks, and start them again without each peer that ends them.

    Args:
        start: Takes the journal's folder and the peers to leave out; raises ``LaunchError``.

    Returns:
        What ``start`` returned at last, and the reason for each peer left out.

    Raises:
        LaunchError: The ranks ended while no peer was running.
    """
    lost: dict[str, str] = {}
    while True:
        with tempfile.TemporaryDirectory(prefix="commlib-peers-") as journal:
            try:
                return start(journal, sorted(lost)), lost
            except LaunchError as error:
                peer, reason = last_peer(Path(journal), str(error))
                if not peer or peer in lost:
                    raise
                lost[peer] = reason


def last_peer(journal: Path, said: str) -> tuple[str, str]:
    """Return the peer that was running when ranks ended, and why they did; "" for none.

    Args:
        journal: The folder with a file per rank.
        said: The text of their ``LaunchError``.
    """
    noted = {file.name: file.read_text().split("\n", 1) for file in sorted(journal.iterdir())}
    failed = {rank: lines for rank, lines in noted.items() if len(lines) == 2}
    peer = next((lines[0] for lines in [*failed.values(), *noted.values()] if lines[0]), "")
    reasons = [f"rank {rank}: {why}" for rank, (name, why) in failed.items() if name == peer]
    if reasons:
        return peer, "; ".join(reasons)
    if "Timeout (" in said:  # the head of the stacks that a rank prints at its deadline
        return peer, "took too long and was ended"
    return peer, " ".join(["ended its rank:", *said.splitlines()[-1:]])


def failures(failed: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """Yield why a peer has no row, once for consecutive places with the same reason."""
    for name, reasons in failed.items():
        for reason, same in groupby(reasons, key=lambda where: reasons[where]):
            yield f"failed: {name}, {span(list(same))}: {reason}"


def span(places: Sequence[str]) -> str:
    """Name consecutive places by the first and the last one."""
    return places[0] if len(places) == 1 else f"{places[0]}..{places[-1]}"
