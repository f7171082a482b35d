"""ops.send and ops.recv: one rank hands a tensor to another."""

import gc
import time
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

import commlib
from commlib import ops
from commlib.errors import ArgumentError, DeviceError, PeerError, RingError
from tests.support.checks import (
    Framed,
    assert_bits_equal,
    assert_equal,
    raises,
    sample,
    settle,
    until,
)
from tests.support.formulas import of_the_other
from tests.support.operator import ABSENT_RING, MODES, Operator, calls, compile_whole
from tests.support.runs_on import runs_on
from tests.support.suites import (
    compiled,
    compiled_out,
    layouts,
    lazy_bits,
    raw,
    suite_of,
    values,
    waiting,
)


def exchange(x: torch.Tensor, ring_id: int = 0, *, out: Any = None, **mode: Any) -> Any:
    """Send to the other rank and receive from it, rank 0 first sending, rank 1 first receiving."""
    rank = commlib.comm(ring_id).rank
    if out is None:  # nothing fills it: a receive without fences would not wait for that
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
    if rank == 0:
        sent = ops.send(x, ring_id, peer=1, **mode)
        came = ops.recv(out, ring_id, peer=1, **mode)
    else:
        came = ops.recv(out, ring_id, peer=0, **mode)
        sent = ops.send(x, ring_id, peer=0, **mode)
    if sent is not None:
        sent.wait()
    return came


EXCHANGE = Operator(exchange, of_the_other)


test_exchange = suite_of(
    EXCHANGE, only=(values, layouts, lazy_bits, waiting, raw, compiled, compiled_out)
)


@runs_on("ranks")
def test_order(comm: Any) -> None:
    """Messages between two ranks arrive in the order in which they were sent."""
    for mode in MODES.values():
        sizes, works = range(1, 20), []
        outs = [torch.zeros(n, device=comm.device) for n in sizes]
        for n, out in zip(sizes, outs, strict=True):
            if comm.rank == 0:
                x = torch.full((n,), n * 1.5, device=comm.device)
                works.append(ops.send(x, peer=1, **mode))
            else:
                works.append(ops.recv(out, peer=0, **mode))
        for work in works:
            if isinstance(work, commlib.Work):
                work.wait()
        for n, out in zip(sizes, outs, strict=True):
            assert_bits_equal(out, torch.full((n,), n * 1.5 * comm.rank), f"message {n}")


@runs_on("ranks")
def test_a_group_meets_lone_calls(comm: Any) -> None:
    """One rank groups its calls, the other makes them one by one: on a new ring, and later."""
    ring = commlib.new_ring(70, [0, 1])
    assert ring is not None
    for turn, collective in enumerate((None, ring.barrier, None)):
        if collective is not None:
            collective()
        x, out = torch.full((5,), turn + comm.rank + 1.0, device=comm.device), torch.zeros(5)
        out = out.to(comm.device)
        with ring.group() if comm.rank == turn % 2 else nullcontext():
            if comm.rank == 0:
                ring.send(x, peer=1)
                ring.recv(out, peer=1)
            else:
                ring.recv(out, peer=0)
                ring.send(x, peer=0)
        assert_bits_equal(out, torch.full((5,), turn + 2.0 - comm.rank), f"turn {turn}")
    with ring.group() if comm.rank else nullcontext():  # a group of one
        ring.recv(out, peer=0) if comm.rank else ring.send(x, peer=1)
    assert_bits_equal(out, torch.full((5,), 4.0 - comm.rank), "a group of one")
    commlib.close_ring(70)


@runs_on("ranks")
def test_other_shape(comm: Any) -> None:
    """Bytes count, not shapes: a matrix may arrive as a strided vector."""
    frame = Framed((6,), torch.int16, comm.device, "stepped")
    if comm.rank == 0:
        ops.send(torch.arange(6, dtype=torch.int16, device=comm.device).view(2, 3), peer=1)
    else:
        ops.recv(frame.view, peer=0)
        assert_bits_equal(frame.view, torch.arange(6, dtype=torch.int16))
        frame.intact()


@runs_on("cpu_ranks")
def test_done(comm: Any) -> None:
    """A receive under way is not done before its send; the send itself needs no second wait."""
    out = torch.zeros(3, device=comm.device)
    if comm.rank == 1:
        work: Any = ops.recv(out, peer=0, **MODES["async"])
        assert_equal(work.done(), False, "done() before the send")
    comm.barrier()
    settle(comm)
    if comm.rank == 0:
        assert_equal(ops.send(torch.ones(3, device=comm.device), peer=1), None, "result of send")
    else:
        assert_bits_equal(work.wait(), torch.ones(3))
        until(work.done, "done() after wait()")


@runs_on("cpu_ranks")
def test_a_dropped_work_goes_on(comm: Any) -> None:
    """Each message arrives in its turn, and nothing is kept after that."""
    peer, mode = 1 - comm.rank, MODES["async"]
    first, out = torch.zeros(4096), torch.zeros(4096)
    comm.recv(first, peer=peer, **mode)
    for turn in range(50):
        comm.send(torch.full((4096,), float(turn + comm.rank)), peer=peer, **mode)
        with comm.group(**mode):
            comm.send(torch.full((4096,), turn - 0.5), peer=peer, use_calc_stream=False)
        if turn:
            comm.recv(out, peer=peer)
            assert_bits_equal(out, torch.full((4096,), float(turn + peer)), f"message {turn}")
        comm.recv(out, peer=peer)
        assert_bits_equal(out, torch.full((4096,), turn - 0.5), f"message {turn} of a group")
    assert_bits_equal(first, torch.full((4096,), float(peer)), "a dropped receive")
    until(lambda: all(one.ended for one in comm._engine._dropped.values()), "released")


@runs_on("cpu_ranks")
def test_a_dropped_work_ends_with_its_ring(comm: Any) -> None:
    """The peer never takes the messages; nothing waits for that, or keeps the ring."""
    for end in (commlib.close_ring, partial(commlib.close_ring, abort=True)):
        ring: Any = commlib.new_ring(71, [0, 1])
        dropped, alive = ring._engine._dropped, weakref.ref(ring)
        for _ in range(3):
            ring.send(torch.ones(1 << 20), peer=1 - comm.rank, **MODES["async"])
        ring.barrier()
        assert_equal([one.ended for one in dropped.values()], [False], "ended")
        begin = time.monotonic()
        end(71)
        assert_equal(time.monotonic() - begin < 5, True, "closed at once")
        until(lambda kept=dropped: all(one.ended for one in kept.values()), "ended")
        del ring, dropped
        gc.collect()
        until(lambda ref=alive: ref() is None, "freed")
        comm.barrier()


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    x = torch.zeros(4, device=comm.device)
    before = calls(comm)
    for call in (ops.send, ops.recv):
        for peer in (-1, comm.size, True, None, "1"):
            with raises(PeerError, f"peer={peer!r}"):
                call(x, peer=peer)
        with raises(PeerError, f"peer={comm.rank}", "itself"):
            call(x, peer=comm.rank)
        other = 1 - comm.rank
        with raises(RingError, ABSENT_RING):
            call(x, ABSENT_RING, peer=other)
        with raises(ArgumentError, "use_calc_stream=False"):
            call(x, peer=other, sync_op=False)
        with raises(DeviceError, "meta"):
            call(x.to("meta"), peer=other)
        with raises(DeviceError, "sparse"):
            call(x.to_sparse(), peer=other)
        with raises(ArgumentError, "list"):
            call([1.0], peer=other)  # type: ignore[call-overload]
    with raises(ArgumentError, "overlaps itself"):
        ops.recv(x[:1].expand(4), peer=other)
    with raises(ArgumentError, "requires grad"):
        ops.recv(x.clone().requires_grad_(), peer=other)
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_compiled_alone(comm: Any) -> None:
    """A graph that only sends and one that only receives keep their calls."""
    x = sample(0, (5,), torch.float32).to(comm.device)
    if comm.rank == 0:
        compile_whole(lambda x: ops.send(x, peer=1))(x)
    else:
        out = torch.zeros(5, device=comm.device)
        compile_whole(lambda out: ops.recv(out, peer=0))(out)
        assert_bits_equal(out, x)
