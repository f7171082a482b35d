"""The drift between ranks: how far apart they begin the same replays, and how long these take."""

import json
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from commlib.core.manager import CommContextManager
from commlib.core.ring import Ring
from commlib.deadlines import Deadline
from commlib.errors import CommTimeout, GraphError
from commlib.graph.captured_function import CapturedFunction
from commlib.graph.recording.replay_times import Replay, ReplayTimes
from commlib.rendezvous.host_exchange import host_number

_ROUNDS = 9  # exchanges from which the offset between two hosts' clocks is estimated

Times = list[tuple[int, int]]  # beginning and end of replays, in ns


def drift_over(
    ring_id: int, functions: Iterable[CapturedFunction[..., Any]]
) -> list[dict[str, Any]]:
    """Compare the times of replays with the members of a ring; each of them calls it.

    Blocks the host until the replays have ended and all members have called it. Each of these waits
    takes at most the ring's timeout.

    Args:
        ring_id: The number of the ring.
        functions: The captured functions of this rank.

    Returns:
        One row per function and direction with collectives; the same on all members.

    Raises:
        GraphError: ``ring_id`` is not a number of a ring.
        RingError: There is no such ring.
        CommTimeout: Members are late, or replays of this rank have not ended.
    """
    if isinstance(ring_id, bool) or not isinstance(ring_id, int):
        raise GraphError(
            f"report(drift={ring_id!r}): expected the number of a ring; pass drift=0 to compare "
            f"all ranks of commlib.init()"
        )
    ring = CommContextManager.instance().get(ring_id)
    mine = {"host": host_number(), "times": own_times(ring, functions)}
    reports = [json.loads(data) for data in ring._hosts.exchange_bytes(json.dumps(mine).encode())]
    offsets = _clock_offsets(ring, [each["host"] for each in reports])
    names = sorted({name for each in reports for name in each["times"]})
    return [
        compare(
            name,
            {
                rank: [(began - offset, ended - offset) for began, ended in each["times"][name]]
                for rank, each, offset in zip(ring.ranks, reports, offsets, strict=True)
                if name in each["times"]
            },
        )
        for name in names
    ]


def own_times(ring: Ring, functions: Iterable[CapturedFunction[..., Any]]) -> dict[str, Times]:
    """Return this rank's last replays with collectives by name of the function, in their order.

    All kinds and slots of a function are one list: other ranks may have used another slot. So are
    functions of one name. Each keeps its last replays, so that no list reaches further back than
    the one with the fewest.
    """
    by_name: dict[str, list[ReplayTimes]] = {}
    for function in functions:
        recorded = function.entries.times
        for part, times in recorded.parts() if recorded else ():
            name = function.name if part == "forward" else f"{function.name} ({part})"
            by_name.setdefault(name, []).append(times)
    deadline, lists = Deadline(ring.timeout), {}
    for name, every in by_name.items():
        replays = [replay for times in every for replay in _ended(ring, name, times, deadline)]
        last = sorted(replays)[-min(times.most for times in every) :]
        if last:
            lists[name] = [(replay.began, replay.ended) for replay in last]
    return lists


def _ended(ring: Ring, name: str, times: ReplayTimes, deadline: Deadline) -> list[Replay]:
    replays = times.replays(deadline)
    if replays is None:
        raise CommTimeout(
            f"{ring._describe('report(drift=...)')}: replays of {name} have not ended within "
            f"{deadline.seconds:g} s; expected the same calls on all members; run "
            f"ring.check() on each of them"
        )
    return replays


def _clock_offsets(ring: Ring, hosts: Sequence[int]) -> list[int]:
    """Return by how many ns each member's clock is ahead of the first member's.

    Processes of one host have one clock, which its first member reads. Between hosts, members leave
    an exchange at about the same moment: the median of several is exact to about the time of one.
    """
    if len(set(hosts)) == 1:
        return [0] * len(hosts)
    marks = []
    for _ in range(_ROUNDS):
        ring._hosts.exchange([])
        marks.append(time.perf_counter_ns())
    rows = ring._hosts.exchange(marks)
    clocks = [rows[hosts.index(host)] for host in hosts]
    return [
        round(statistics.median(a - b for a, b in zip(row, rows[0], strict=True))) for row in clocks
    ]


def compare(name: str, times: dict[int, Times]) -> dict[str, Any]:
    """Return the row of a function from the replays of each rank, by rank.

    The last replays correspond: collectives of a ring are in one order on all its members.
    """
    count = min(map(len, times.values()))
    last = {rank: each[-count:] for rank, each in times.items()}
    lengths = {rank: [ended - began for began, ended in each] for rank, each in last.items()}
    medians = {rank: statistics.median(each) for rank, each in lengths.items()}
    spreads = [max(each) - min(each) for each in zip(*lengths.values(), strict=True)]
    begins = [{rank: each[i][0] for rank, each in last.items()} for i in range(count)]
    late = [max(each.values()) - min(each.values()) for each in begins]
    latest = Counter(max(each, key=lambda rank: each[rank]) for each in begins)
    return {
        "function": name,
        "replays": count,
        "replay_us": {rank: length / 1e3 for rank, length in medians.items()},
        "spread_us": statistics.median(spreads) / 1e3,
        "worst_spread_us": max(spreads) / 1e3,
        "slowest_rank": max(medians, key=lambda rank: medians[rank]),
        "late_us": statistics.median(late) / 1e3,
        "worst_late_us": max(late) / 1e3,
        "latest_rank": latest.most_common(1)[0][0],
    }
