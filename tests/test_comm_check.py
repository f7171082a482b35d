"""FLAGS_comm_check: the calls of a ring's ranks are compared, and a difference is named."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.core.calls import reports as call_reports
from commlib.errors import (
    ArgumentError,
    EngineError,
    MismatchError,
)
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

CHECK = "FLAGS_comm_check"
DETECTED = "detected mismatch"
ASYNC = {"use_calc_stream": False, "sync_op": False}


@contextmanager
def ring_of(
    comm: Any, level: int, ring_id: int = 60, ranks: Any = None, timeout: float = 10
) -> Iterator[Any]:
    """Give a ring with its own level, and close it.

    Its members have long to publish and compare their calls: on a busy machine a second may be too
    short.
    """
    with commlib.flags.override(CHECK, level):
        ring = commlib.new_ring(ring_id, ranks or range(comm.size), timeout=timeout)
    assert ring is not None
    before = call_reports.LOOK_S, call_reports.PUBLISH_S
    call_reports.LOOK_S, call_reports.PUBLISH_S = 20, 5
    try:
        yield ring
        commlib.CommContextManager.instance().close(ring_id)
    finally:
        call_reports.LOOK_S, call_reports.PUBLISH_S = before


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=_device())


def _device() -> torch.device:
    """Return the device of ring 0, which every job has."""
    manager = commlib.CommContextManager.instance()
    return manager.get(0).device if manager.has(0) else torch.device("cpu")


def equals(actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    assert_equal(actual.tolist(), expected.tolist(), what)


def works(ring: Any, what: str) -> None:
    """Raise unless the ring carries collectives and messages."""
    x = ones(5)
    ring.all_reduce(x, x)
    equals(x, ones(5) * ring.size, f"all_reduce after {what}")
    y = ones(3) * ring.rank
    if ring.rank == 0:
        ring.send(y, peer=1)
    elif ring.rank == 1:
        ring.recv(y, peer=0)
        equals(y, ones(3) * 0, f"recv after {what}")


Step = Callable[[Any], Any]
# What rank 0 calls and what rank 1 calls, and what every rank's error shows of both.
DIFFERENT: dict[str, tuple[Step, Step, list[str]]] = {
    "op": (
        lambda r: r.all_reduce(ones(4), ones(4)),
        lambda r: r.all_gather(ones(8), ones(4)),
        ["rank 0: all_reduce float32 [4] op=sum", "rank 1: all_gather float32 [4]"],
    ),
    "shape": (
        lambda r: r.all_reduce(ones(4), ones(4)),
        lambda r: r.all_reduce(ones(6), ones(6)),
        ["float32 [4] op=sum, shape (4,)", "float32 [6] op=sum, shape (6,)"],
    ),
    "dtype": (
        lambda r: r.all_gather(ones(8), ones(4)),
        lambda r: r.all_gather(ones(8, dtype=torch.int32), ones(4, dtype=torch.int32)),
        ["all_gather float32 [4]", "all_gather int32 [4]"],
    ),
    "reduction": (
        lambda r: r.reduce_scatter(ones(2), ones(4), op="sum"),
        lambda r: r.reduce_scatter(ones(2), ones(4), op="max"),
        ["op=sum", "op=max"],
    ),
    "root": (
        lambda r: r.broadcast(ones(2), ones(2), root=0),
        lambda r: r.broadcast(ones(2), ones(2), root=1),
        ["broadcast float32 [2] root=0", "broadcast float32 [2] root=1"],
    ),
    "scattered": (
        lambda r: r.scatter(ones(2), ones(4), root=0),
        lambda r: r.scatter(ones(3), None, root=0),
        ["scatter float32 [2] root=0", "scatter float32 [3] root=0"],
    ),
    "splits": (
        lambda r: r.all_to_all(ones(4), ones(4), in_splits=[1, 3], out_splits=[1, 3]),
        lambda r: r.all_to_all(ones(4), ones(4), in_splits=[2, 2], out_splits=[2, 2]),
        ["receives [1, 3], sends [1, 3]", "receives [2, 2], sends [2, 2]"],
    ),
    "empty": (
        lambda r: r.all_reduce(ones(0), ones(0)),
        lambda r: r.all_reduce(ones(1), ones(1)),
        ["float32 [0]", "float32 [1]"],
    ),
    "barrier": (
        lambda r: r.barrier(),
        lambda r: r.exchange([7]),
        ["rank 0: barrier at ", "rank 1: exchange of the program at "],
    ),
    "asynchronous": (
        lambda r: r.all_reduce(ones(4), ones(4), **ASYNC).wait(),
        lambda r: r.all_reduce_begin(ones(5), ones(5)).wait(),
        ["float32 [4]", "float32 [5]"],
    ),
}


@runs_on("ranks")
def test_different_calls(comm: Any) -> None:
    """Every rank raises, with both lines; nothing was launched, so the ring goes on."""
    with ring_of(comm, 2) as ring:
        for name, (*steps, shown) in DIFFERENT.items():
            with raises(MismatchError, f"ring 60 (rank {comm.rank} of 2", DETECTED, *shown):
                steps[comm.rank](ring)
            works(ring, name)
        assert_equal(ring._errors(), [], "errors of calls that were never launched")


@runs_on("ranks")
def test_both_lines(comm: Any) -> None:
    """The error shows the line of each rank's call."""
    with ring_of(comm, 2) as ring:
        calls: list[Callable[[], Any]] = [
            lambda: commlib.ops.all_reduce(ones(1), 60),
            lambda: commlib.ops.all_reduce(ones(2), 60),
        ]
        with pytest.raises(MismatchError) as caught:
            calls[comm.rank]()
        matches = [part for part in str(caught.value).split() if "test_comm_check.py:" in part]
        assert_equal(len(matches), 2, str(caught.value))
        numbers = [int(one.rstrip(".;").rpartition(":")[2]) for one in matches]
        assert_equal(numbers[1] - numbers[0], 1, f"two lines of this function: {numbers}")
        assert_equal(isinstance(caught.value, ArgumentError), True, "a refused call")
        works(ring, "a mismatch")


@runs_on("ranks")
def test_group(comm: Any) -> None:
    """A group is compared as one call, and messages in it by pairs."""
    with ring_of(comm, 2) as ring:
        x, y = ones(4), ones(8)
        with raises(MismatchError, DETECTED, "op=sum", "op=max"), ring.group():
            ring.all_reduce(x, x)
            ring.all_reduce(y, y, op="max" if comm.rank else "sum")
        equals(x, ones(4), "what was not launched")
        with raises(MismatchError, DETECTED, "all_reduce float32 [4]"), ring.group():
            ring.all_reduce(x, x)
            if comm.rank:
                ring.barrier()
        out = ones(4)
        shown = ("send float32 (4,)", "recv float32 (3,)")
        with raises(MismatchError, DETECTED, *shown), ring.group():
            ring.send(x, peer=1 - comm.rank)
            ring.recv(out if comm.rank else out[:3], peer=1 - comm.rank)
        works(ring, "a group")


@runs_on("cpu_ranks")
def test_messages(comm: Any) -> None:
    """A send and a receive that do not fit are an error on both, and nothing is half filled."""
    other = 1 - comm.rank
    with ring_of(comm, 2, ranks=[1, 0]) as ring:
        for sent, taken in ((ones(4), ones(2)), (ones(4), ones(8)), (ones(2), ones(2).int())):
            shown = f"{str(taken.dtype)[6:]} {tuple(taken.shape)}"
            texts = (DETECTED, f"recv {shown}", "test_comm_check.py:", f"rank {comm.rank}: ")
            before = taken.clone()
            with raises(MismatchError, *texts, f"rank {other} (position {1 - ring.rank}"):
                if ring.rank == 0:
                    ring.send(sent * 7, peer=1)
                else:
                    ring.recv(taken, peer=0)
            equals(taken, before, "an output that nothing was sent to")
            works(ring, "a message")
        # Both send before they receive: no rank waits at a launch.
        mine, opts = ones(3) * (1 + ring.rank), {"peer": 1 - ring.rank, **ASYNC}
        sends = [ring.send(mine * factor, **opts) for factor in (1, 5)]
        takes = [ring.recv(torch.empty(3), **opts) for _ in (1, 5)]
        for work in sends + takes:
            work.wait()
        equals(takes[0].result, ones(3) * (2 - ring.rank), "the first message")
        equals(takes[1].result, ones(3) * 5 * (2 - ring.rank), "the second message")


@runs_on("cpu_ranks")
def test_messages_wait_for_nobody_at_their_launch(comm: Any) -> None:
    """Receives are posted before sends, in a group and by a lone call on the other rank."""
    with ring_of(comm, 2) as ring:
        mine, theirs = ones(3) * comm.rank, torch.empty(3)
        if comm.rank == 0:
            with ring.group():
                ring.recv(theirs, peer=1)
                ring.send(mine, peer=1)
        else:
            ring.recv(theirs, peer=0)
            ring.send(mine, peer=0)
        equals(theirs, ones(3) * (1 - comm.rank), "a group against two calls")
        late = [ring.recv(theirs, peer=1 - comm.rank, **ASYNC)]
        late.append(ring.send(mine, peer=1 - comm.rank, **ASYNC))
        ring.barrier()
        for work in late:
            work.wait()
        equals(theirs, ones(3) * (1 - comm.rank), "receives before sends")


@runs_on("cpu_ranks")
def test_tagged_messages_in_another_order(comm: Any) -> None:
    """A receive is compared with the send of its tag; those of one tag meet in their order."""
    with ring_of(comm, 2) as ring:
        opts: dict[str, Any] = {"peer": 1 - comm.rank, **ASYNC}
        numbers = range(1, 9)  # two per tag, and also without a tag
        sent = [ring.send(ones(3) * at, tag=at // 2, **opts) for at in numbers]
        taken = {at: ring.recv(torch.empty(3), tag=at // 2, **opts) for at in (5, 7, 8, 1, 4, 2, 3)}
        taken[6] = ring.recv(torch.empty(3), tag=3, **opts)
        for work in (*taken.values(), *sent):
            work.wait()
        actual = {at: work.result.tolist() for at, work in taken.items()}
        # Of tag 2, number 5 is received before 4 and gets what was sent first; of tag 3, so is 7.
        want = {at: [float({5: 4, 4: 5, 7: 6, 6: 7}.get(at, at))] * 3 for at in taken}
        assert_equal(actual, want, "messages")
        with raises(
            MismatchError, DETECTED, "with tag 2", "send float32 (3,)", "recv float32 (4,)"
        ):
            if comm.rank:
                ring.send(ones(3), peer=0, tag=2)
            else:
                ring.recv(torch.empty(4), peer=1, tag=2)
        ring.barrier()


def equal(comm: Any) -> None:
    """Right calls give the values that they give without a comparison."""
    with ring_of(comm, 2) as ring:
        wide = torch.arange(12.0, device=comm.device).view(3, 4).t()  # strided: staged
        out = torch.empty_like(wide)
        ring.all_reduce(out, wide, op="avg")
        assert_bits_equal(out, wide, "avg of a strided tensor")
        parts = ones(2 * comm.size)
        ring.all_gather(parts, ones(2) * comm.rank, use_calc_stream=False)
        assert_equal(
            parts.view(-1, 2)[:, 0].tolist(), [float(r) for r in range(comm.size)], "all_gather"
        )
        counts = [1 + (comm.rank + peer) % 2 for peer in range(comm.size)]
        sent, taken = ones(sum(counts)) * comm.rank, ones(sum(counts))
        ring.all_to_all(taken, sent, in_splits=counts, out_splits=counts)
        want = [float(peer) for peer, count in enumerate(counts) for _ in range(count)]
        assert_equal(taken.tolist(), want, "all_to_all with splits")
        root = comm.size - 1
        total = ones(2) if comm.rank == root else None
        ring.reduce(total, ones(2), root=root)
        got = ones(2)
        ring.scatter(got, ones(2 * comm.size) * 3 if comm.rank == root else None, root=root)
        equals(got, ones(2) * 3, "scatter")
        assert_equal(ring.exchange([comm.rank]), [[rank] for rank in range(comm.size)], "exchange")
        assert_equal(ring._hosts.exchange_bytes(b"x"), [b"x"] * comm.size, "exchange_bytes")
        assert_equal(ring._errors(), [], "errors")
        works(ring, "right calls")


def test_equal_calls(ranks: Ranks) -> None:
    ranks(equal)


def test_equal_calls_of_three(three_ranks: Ranks) -> None:
    three_ranks(equal)


@runs_on("ranks")
def test_torch_detail(comm: Any) -> None:
    """The switch of torch asks for the same comparison, on both engines."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with ring_of(comm, 1) as ring:
            with raises(MismatchError, DETECTED, "float32 [4]", "float32 [6]"):
                ring.all_reduce(*[ones(6 if comm.rank else 4)] * 2)
            works(ring, "DETAIL")
    finally:
        dist.set_debug_level(before)


@runs_on("cpu_ranks")
def test_levels_that_differ(comm: Any) -> None:
    """Levels that differ are an error on every rank, with ranks and levels."""
    with commlib.flags.override(CHECK, 1 + comm.rank):
        texts = (f"ranks [0] on {comm.engine} (cpu), {CHECK}=1", f"{CHECK}=2")
        with raises(EngineError, *texts, "ranks [1]"):
            commlib.new_ring(61, [0, 1], timeout=20)
    assert_equal(commlib.CommContextManager.instance().has(61), False, "a ring of two levels")
