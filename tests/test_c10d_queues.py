"""What a group keeps for later: sends and receives of GPUs, coalesced calls, and their works."""

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.distributed_c10d import _coalescing_manager

import commlib
from commlib import waits
from commlib.compat.c10d import pairs
from commlib.compat.c10d.bridges import calls_of
from commlib.compat.c10d.launching import Step
from commlib.deadlines import Deadline
from commlib.errors import ArgumentError, CommTimeout, DeviceError, PeerError, RingError
from tests.support.checks import assert_equal, raises, until
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised


def exchange(ring: Any, before: Callable[[], None] = lambda: None) -> tuple[torch.Tensor, Any]:
    """Queue a send and a receive, as a GPU does; returns what is received, and the works."""
    peer, x = 1 - ring.rank, torch.full((2,), ring.rank + 1.0, device=ring.device)
    out = torch.zeros(2, device=ring.device)

    def send(**mode: Any) -> Any:
        before()
        return ring.send(x, peer=peer, **mode)

    steps = [Step([send], [x]), Step([partial(ring.recv, out, peer=peer)], [out])]
    return out, [pairs.queue(ring, step) for step in steps]


@runs_on("ranks")
def test_a_failed_launch_is_the_error_of_every_work(ring: Any) -> None:
    x = torch.ones(1, device=ring.device)
    steps = [Step([partial(ring.send, x, peer=peer)], [x]) for peer in (7, 1 - ring.rank)]
    works = [pairs.queue(ring, step) for step in steps]
    for work in [*works, *works]:
        with raises(PeerError, "7"):
            work.wait()
        assert_equal((work.is_completed(), work.is_success()), (True, False), "state")
        assert_equal(type(work.exception()), PeerError, "exception")
    assert_equal(pairs.queued(), False, "queued")
    ring.barrier()


@runs_on("ranks")
def test_a_wait_waits_for_the_launch_of_another_thread(ring: Any) -> None:
    launching, go = threading.Event(), threading.Event()

    def before() -> None:
        launching.set()
        go.wait(20)

    out, works = exchange(ring, before)
    first = threading.Thread(target=works[0].wait)
    first.start()
    launching.wait(20)
    threading.Timer(0.05, go.set).start()
    works[1].wait()
    assert_equal(out.tolist(), [2.0 - ring.rank] * 2, "received")
    first.join(20)


@runs_on("ranks")
def test_places_of_queued_calls(ring: Any) -> None:
    """Another stream or capture is another batch; a capture never records what came before it."""
    now = pairs.Place(None, 0)
    with patch.object(pairs, "place_of", lambda ring: now):
        before, works = exchange(ring)
        now = pairs.Place(None, 1)  # a capture begins
        for call in (pairs.flush, works[0].wait, works[1].is_completed, partial(exchange, ring)):
            with raises(ArgumentError, "before a CUDA graph capture", "before the capture begins"):
                call()
        assert_equal((pairs.queued(), before.tolist()), (True, [0.0, 0.0]), "stays queued")
        now = pairs.Place(None, 0)
        works[1].wait()
        assert_equal(before.tolist(), [2.0 - ring.rank] * 2, "launched after the capture")
        now = pairs.Place(None, 1)
        _, works = exchange(ring)
        now = pairs.Place(None, 0)
        for work in works:
            with raises(ArgumentError, "a CUDA graph capture that is over"):
                work.wait()
        assert_equal(pairs.queued(), False, "queued")
    ring.barrier()


@runs_on("ranks")
def test_queued_calls_of_one_tensor_are_not_one_operation(ring: Any) -> None:
    """NCCL runs calls of one pair in their order, so a received tensor may be sent back."""
    peer, x = 1 - ring.rank, torch.full((1 << 16,), float(ring.rank), device=ring.device)
    out = x.clone() if ring.rank else x
    send = Step([partial(ring.send, x, peer=peer)], [x])
    recv = Step([partial(ring.recv, out, peer=peer)], [out])
    steps = [(send, -1), (recv, peer)] if ring.rank else [(recv, peer), (send, -1)]
    works: list[Any] = [pairs.queue(ring, *step, peer) for step in steps]
    assert_equal(works[0]._queue is works[1]._queue, ring.rank == 1, "one operation")
    for work in works:
        work.wait()
    assert_equal(out.unique().tolist(), [1.0], "what came back")
    calls = ring.report()["calls"]
    works = [pairs.queue(ring, recv, 5, 5), pairs.queue(ring, send, -1, 6)] if not ring.rank else []
    for work in works:  # with two peers torch runs them at the same time
        with raises(ArgumentError, "x shares memory with out of call 1 (recv)"):
            work.wait()
    assert_equal(ring.report()["calls"], calls, "launched")


@runs_on("ranks")
def test_queued_calls_and_the_life_of_a_group(ring: Any) -> None:
    with initialised(ring, OURS[ring.device.type]):
        group: Any = calls_of(dist.group.WORLD)
        out, works = exchange(ring)
        group.monitored_barrier(timedelta(seconds=20))
        assert_equal(pairs.queued(), False, "launched by monitored_barrier")
        works[1].wait()
        assert_equal(out.tolist(), [2.0 - ring.rank] * 2, "received")
        _, works = exchange(ring)
        group.abort()
        assert_equal(pairs.queued(), False, "dropped by abort")
        for work in works:
            with raises(RingError, "aborted before the launch"):
                work.wait()
    ring.barrier()  # of the program: it stays


@runs_on("ranks")
def test_a_polled_work_has_its_outputs(ring: Any) -> None:
    with initialised(ring, OURS[ring.device.type]):
        outs = [torch.zeros(2, device=ring.device) for _ in range(2)]
        x = torch.full((2,), ring.rank + 1.0, device=ring.device)
        work: Any = dist.all_gather(outs, x, async_op=True)
        assert_equal(Deadline(20).poll(work.is_completed), True, "ended")
        if ring.device.type == "cuda":
            work.wait()  # on a GPU a stream waits
        assert_equal([out.tolist() for out in outs], [[1.0] * 2, [2.0] * 2], "outputs")


@runs_on("ranks")
def test_a_broken_batch_swallows_no_later_call(ring: Any) -> None:
    with initialised(ring, OURS[ring.device.type]) as world:
        peer, x = 1 - ring.rank, torch.ones(2, device=ring.device)
        ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x, peer)]
        with raises(ArgumentError, "out shares memory with x of call 1 (send)"):
            dist.batch_isend_irecv(ops)
        with raises(ArgumentError, "of call 1"), _coalescing_manager(device=ring.device):
            dist.all_reduce(x)
            dist.all_reduce(x)
        ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, x.clone(), peer)]
        ops[1].tensor = torch.ones(2, device="meta")
        calls = ring.report()["calls"]
        with raises(DeviceError, "meta"):
            dist.batch_isend_irecv(ops)
        assert_equal((ring.report()["calls"], pairs.queued()), (calls, False), "launched")
        dist.all_reduce(x)
        assert_equal(x.tolist(), [2.0, 2.0], "all_reduce after it")
        out = torch.zeros(2, device=ring.device)
        ops = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, out, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert_equal(out.tolist(), [2.0, 2.0], "a batch after it")
        group: Any = calls_of(world)
        with raises(ArgumentError, "no coalescing is open"):
            group.end_coalescing()


@runs_on("cpu_ranks")
def test_a_batch_has_one_work_per_call(ring: Any) -> None:
    """Each is waited for by itself: the peer takes the first message last."""
    with initialised(ring, "commlib"):
        big, peer = torch.ones(1 << 22), 1 - ring.rank
        late, out = torch.zeros_like(big), torch.zeros(2)
        small = torch.full((2,), ring.rank + 1.0)
        sends = [dist.P2POp(dist.isend, big, peer), dist.P2POp(dist.isend, small, peer, tag=1)]
        works = dist.batch_isend_irecv([*sends, dist.P2POp(dist.irecv, out, peer, tag=1)])
        assert_equal(len(works), 3, "works")
        works[2].wait()
        assert_equal(out.tolist(), [peer + 1.0] * 2, "received")
        assert_equal(works[2].get_future().value()[0] is out, True, "the tensor of its call")
        assert_equal(works[0].is_completed(), False, "what the peer has not taken")
        dist.barrier()
        dist.recv(late, peer)
        for work in works:
            work.wait()
        assert_equal(torch.equal(late, big), True, "the last message")


@runs_on("cpu_ranks")
def test_dropped_works_go_on(ring: Any) -> None:
    with initialised(ring, "commlib"):
        peer, out = 1 - ring.rank, torch.zeros(4096)
        for turn in range(20):
            dist.isend(torch.full((4096,), float(turn)), peer)
            dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((4096,), -1.0), peer)])
            for expected in (turn, -1):
                dist.recv(out, peer)
                assert_equal(out.unique().tolist(), [expected], "received")


@runs_on("cpu_ranks")
def test_dropped_works_without_a_thread(ring: Any) -> None:
    """Where no thread could start, the next dropped work gets one that waits for all."""
    peer, received = 1 - ring.rank, torch.zeros(1)
    with patch.object(waits, "_helper", return_value=None):
        ring.send(torch.ones(1), peer=peer, use_calc_stream=False, sync_op=False)
    ring.send(torch.full((1,), 2.0), peer=peer, use_calc_stream=False, sync_op=False)
    for expected in (1, 2):
        ring.recv(received, peer=peer)
        assert_equal(received.item(), expected, "received")
    dropped = ring._engine._dropped["send", peer]
    until(lambda: dropped.ended, "all works have ended")


@runs_on("ranks")
def test_an_exception_in_a_coalesced_block_drops_its_calls(ring: Any) -> None:
    """Torch records calls for the block, or the group does; neither keeps any of later ones."""
    with initialised(ring, OURS[ring.device.type]) as world:
        for device, first in (
            (None, dist.all_reduce),
            (ring.device, partial(dist.broadcast, src=0)),
        ):
            x = torch.full((2,), ring.rank + 1.0, device=ring.device)
            calls = ring.report()["calls"]
            with raises(ValueError, "of the program"), _coalescing_manager(device=device):
                first(x)
                raise ValueError("of the program")
            assert_equal(ring.report()["calls"], calls, "launched")
            dist.all_reduce(x)
            assert_equal(x.tolist(), [3.0, 3.0], "a call after it")
            with _coalescing_manager(device=device, async_ops=True) as manager:
                first(x)
            manager.wait()
            assert_equal(x.tolist(), [3.0 if device else 6.0] * 2, "a block after it")
        factor = dist._make_nccl_premul_sum(torch.ones(1))
        with raises(NotImplementedError, "factor"), _coalescing_manager(device=ring.device):
            dist.all_reduce(x, factor)
        with raises(ArgumentError, "no coalescing is open"):
            calls_of(world).end_coalescing()  # type: ignore[union-attr]
        one, other, later = (torch.ones(1, device=ring.device) for _ in range(3))
        with _coalescing_manager():
            dist.all_reduce(one)
            with raises(ValueError, "non-empty op list"), _coalescing_manager():
                pass
            dist.all_reduce(other)  # the outer block is still open
        dist.all_reduce(later)
        assert_equal([one.item(), other.item(), later.item()], [2.0] * 3, "nested")


@runs_on("ranks")
def test_limits_of_a_group(ring: Any) -> None:
    """Coalesced calls and barriers have the group's limit; options of the caller stay."""
    with initialised(ring, OURS[ring.device.type], timeout=dist.constants.default_pg_timeout):
        group: Any = calls_of(dist.group.WORLD)
        with patch.object(type(ring), "monitored_barrier") as made:
            group.monitored_barrier()
        assert_equal(made.call_args.kwargs, {"timeout": None}, "the ring's timeout")
        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        group.barrier(opts)
        assert_equal(opts.asyncOp, False, "asyncOp of the caller")


@runs_on("cpu_ranks")
def test_the_limit_of_a_coalesced_call(ring: Any) -> None:
    """A limit of the group holds on a CPU, for calls that are joined too."""
    commlib.shutdown()
    with initialised(ring, "commlib", timeout=timedelta(seconds=20)):
        ring, store = commlib.comm(0), dist.distributed_c10d._get_default_store()
        x = torch.ones(1)
        dist.all_reduce(x)  # connected
        calls_of(dist.group.WORLD).set_timeout(timedelta(seconds=0.3))  # type: ignore[union-attr]
        if ring.rank == 0:
            with raises(CommTimeout, "within 0.3 s"), _coalescing_manager(device=ring.device):
                dist.broadcast(x, 1)
            store.set("over", "1")
        else:
            store.wait(["over"], timedelta(seconds=20))
