"""The backend "commlib" of torch.distributed: every collective gives what torch's backends give."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.utils._python_dispatch import TorchDispatchMode

import commlib
from commlib.compat.c10d import pairs as queued_pairs
from commlib.compat.c10d.backend import takes_subclasses
from commlib.compat.c10d.bridges import calls_of
from commlib.compat.c10d.launching import Step
from commlib.errors import ArgumentError, DeviceError, DtypeError
from tests.support.checks import (
    INTEGERS,
    UNSIGNED,
    assert_bits_equal,
    assert_equal,
    raises,
    rounded,
    sample,
    wide,
)
from tests.support.formulas import mean
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, STOCK, assert_same_as_stock, initialised

Tensor = torch.Tensor
OPS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class Passing(TorchDispatchMode):
    """A mode of a program, which changes nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


def mine(device: torch.device, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return sample(dist.get_rank(), shape, dtype).to(device)


def waited(work: Any) -> None:
    """Wait for what an asynchronous call returns; a synchronous one returns None."""
    if work is not None:
        assert_equal(work.wait(), True, "wait")


def all_reduce(device: torch.device, later: bool) -> Any:
    outputs = []
    for op in OPS.values():
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.complex64):
            if dtype is torch.complex64 and op is not dist.ReduceOp.SUM:
                continue
            x = mine(device, 3, 5, dtype=dtype)
            waited(dist.all_reduce(x, op, async_op=later))
            outputs.append(x)
    return outputs


def reduce(device: torch.device, later: bool) -> Any:
    outputs = []
    for op in OPS.values():
        x = mine(device, 7)
        waited(dist.reduce(x, 1, op, async_op=later))
        outputs += [x] if dist.get_rank() == 1 else []
    return outputs


def broadcast(device: torch.device, later: bool) -> Any:
    x, wrong_layout = mine(device, 4, 3), mine(device, 4, 3).t()
    parameter = torch.nn.Parameter(mine(device, 4))
    for tensor in (x, wrong_layout.contiguous(), parameter):
        waited(dist.broadcast(tensor, 1, async_op=later))
    return x, parameter


def all_gather(device: torch.device, later: bool) -> Any:
    x = mine(device, 2, 3)
    outs = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    waited(dist.all_gather(outs, x, async_op=later))
    full = x.new_empty(4, 3)
    waited(dist.all_gather_into_tensor(full, x, async_op=later))
    return outs, full


def gather_and_scatter(device: torch.device, later: bool) -> Any:
    x, rank = mine(device, 2, 3), dist.get_rank()
    outs = [torch.empty_like(x) for _ in range(2)] if rank == 1 else None
    waited(dist.gather(x, outs, dst=1, async_op=later))
    part, inputs = torch.empty_like(x), [mine(device, 2, 3) + i for i in range(2)]
    waited(dist.scatter(part, inputs if rank == 0 else None, src=0, async_op=later))
    return outs or [], part


def reduce_scatter(device: torch.device, later: bool) -> Any:
    x = mine(device, 4, 3)
    out = x.new_empty(2, 3)
    waited(dist.reduce_scatter_tensor(out, x, async_op=later))
    return out


def all_to_all(device: torch.device, later: bool) -> Any:
    x = mine(device, 4, 3)
    out, uneven = torch.empty_like(x), x.new_empty(2 + 2 * dist.get_rank(), 3)
    waited(dist.all_to_all_single(out, x, async_op=later))
    sends = [1, 3] if dist.get_rank() == 0 else [1, 1]
    takes = [1, 1] if dist.get_rank() == 0 else [3, 1]
    waited(dist.all_to_all_single(uneven, x[: sum(sends)], takes, sends, async_op=later))
    return out, uneven


def objects(device: torch.device, later: bool) -> Any:
    rank = dist.get_rank()
    everyone: Any = [None, None]
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * (rank + 1)})
    shared = [rank, "first", None] if rank == 0 else [None, None, None]
    dist.broadcast_object_list(shared, 0)
    gathered: Any = [None, None] if rank == 1 else None
    dist.gather_object(("from", rank), gathered, dst=1)
    part: Any = [None]
    dist.scatter_object_list(part, [["a"], ["b"]] if rank == 0 else None, src=0)
    return [str(everyone), str(shared), str(gathered), str(part)]


def pairs(device: torch.device, later: bool) -> Any:
    rank, x, out = dist.get_rank(), mine(device, 5), torch.empty(5, device=device)
    peer = 1 - rank
    calls = [dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, out, peer)]
    for work in dist.batch_isend_irecv(calls if rank else calls[::-1]):
        work.wait()
    last = torch.empty(5, device=device)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(last, 1)
    else:
        dist.recv(last, 0)
        dist.send(last + 1, 0)
    return out, last


def coalesced(device: torch.device, later: bool) -> Any:
    a, b, c = mine(device, 3), mine(device, 2, 2), mine(device, 6)
    with _coalescing_manager(async_ops=later) as manager:
        dist.all_reduce(a)
        dist.all_reduce(b)
    if later:
        manager.wait()
    wholes = [a.new_empty(6), a.new_empty(12)]
    with _coalescing_manager(async_ops=later) as manager:
        dist.all_gather_into_tensor(wholes[0], a)
        dist.all_gather_into_tensor(wholes[1], c)
    if later:
        manager.wait()
    out = a.new_empty(3)
    with _coalescing_manager(async_ops=later) as manager:
        dist.reduce_scatter_tensor(out, c)
    if later:
        manager.wait()
    return a, b, wholes, out


PROGRAMS: list[Callable[[torch.device, bool], Any]] = [
    *(all_reduce, reduce, broadcast, all_gather, gather_and_scatter, reduce_scatter, all_to_all),
    *(objects, pairs, coalesced),
]


@pytest.mark.parametrize("later", [False, True])
@runs_on("ranks", deadline=100)
def test_collectives(ring: Any, later: bool) -> None:
    """Results have the bits of stock gloo and stock NCCL."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch renames its functions
        for program in PROGRAMS:

            def run(device: torch.device, program: Any = program) -> Any:
                return program(device, later)

            run.__name__ = program.__name__
            assert_same_as_stock(ring, run)


@runs_on("ranks")
def test_what_stock_gloo_lacks(ring: Any) -> None:
    """Lists of different sizes, and lists in collectives that gloo has only for one tensor."""
    with initialised(ring, OURS[ring.device.type]):
        rank, device = dist.get_rank(), ring.device
        parts = [sample(r, (r + 2, 3), torch.float32).to(device) for r in range(2)]
        for later in (False, True):
            outs = [torch.empty_like(part) for part in parts]
            waited(dist.all_gather(outs, parts[rank], async_op=later))
            for out, part in zip(outs, parts, strict=True):
                assert_bits_equal(out.cpu(), part.cpu(), "all_gather of two sizes")
            out = torch.empty_like(parts[rank])
            waited(dist.reduce_scatter(out, parts, async_op=later))
            assert_bits_equal(out.cpu(), parts[rank].cpu() * 2, "reduce_scatter of two sizes")
            even = [torch.full((3,), float(10 * rank + to), device=device) for to in range(2)]
            out = torch.empty(3, device=device)
            waited(dist.reduce_scatter(out, even, dist.ReduceOp.MAX, async_op=later))
            assert_bits_equal(out.cpu(), torch.full((3,), 10.0 + rank), "reduce_scatter of a list")
            gave = [torch.full((rank + to + 1,), float(10 * rank + to)) for to in range(2)]
            took = [torch.empty(rank + by + 1, device=device) for by in range(2)]
            waited(dist.all_to_all(took, [x.to(device) for x in gave], async_op=later))
            for by, part in enumerate(took):
                expected = torch.full((rank + by + 1,), 10.0 * by + rank)
                assert_bits_equal(part.cpu(), expected, "all_to_all of lists")


@runs_on("ranks")
def test_the_shorter_forms_of_a_group(ring: Any) -> None:
    """A group's methods also take a tensor, and a root or an operation, without options."""
    with initialised(ring, OURS[ring.device.type]) as group:
        rank, device = ring.rank, ring.device
        x = torch.full((2,), rank + 1.0, device=device)
        group.allreduce(x, dist.ReduceOp.MAX).wait()
        assert_equal(x.tolist(), [2.0, 2.0], "allreduce")
        x = torch.full((2,), float(rank), device=device)
        group.broadcast(x, 1).wait()
        assert_equal(x.tolist(), [1.0, 1.0], "broadcast")
        x = torch.full((2,), float(rank), device=device)
        group.reduce(x, 0, dist.ReduceOp.SUM).wait()
        assert_equal(x.tolist()[: 2 - 2 * rank], [1.0, 1.0][: 2 - 2 * rank], "reduce")
        outs = [torch.empty(1, device=device) for _ in range(2)]
        group.allgather(outs, torch.full((1,), float(rank), device=device)).wait()
        assert_equal([out.item() for out in outs], [0.0, 1.0], "allgather")
        group.barrier().wait()


@runs_on("all_gpu_ranks")
def test_nccl_has_no_tags(ring: Any) -> None:
    with raises(commlib.errors.ArgumentError, "tag=3", "NCCL matches"):
        ring.send(torch.ones(1, device=ring.device), peer=1 - ring.rank, tag=3)


@runs_on("cpu_ranks")
def test_tags(ring: Any) -> None:
    """On a CPU a receive takes the send with its tag, in any order."""
    with raises(commlib.errors.ArgumentError, "tag=-1", "from 0 to"):
        ring.recv(torch.ones(1), peer=1 - ring.rank, tag=-1)
    with initialised(ring, "commlib"):
        a, b = torch.zeros(2), torch.zeros(2)
        if ring.rank == 0:
            works: list[Any] = [dist.isend(a + 1, 1, tag=1), dist.isend(b + 2, 1, tag=2)]
        else:
            works = [dist.irecv(b, 0, tag=2), dist.irecv(a, 0, tag=1)]
        for work in works:
            work.wait()
        if ring.rank:
            assert_equal((a.tolist(), b.tolist()), ([1.0, 1.0], [2.0, 2.0]), "by tag")
            if not takes_subclasses():  # there, C++ passes waits and futures of a work alone
                assert_equal(works[0]._source_rank(), 0, "sender")


@runs_on("ranks")
def test_premul_sum(ring: Any) -> None:
    """A sum of scaled inputs, also where rings take no factor; the inputs stay as they are."""
    with initialised(ring, OURS[ring.device.type]):
        half, device = dist._make_nccl_premul_sum(0.5), ring.device
        inputs = [np.arange(4, dtype=np.float32) + 3 * r for r in range(2)]
        total = (inputs[0] * 0.5 + inputs[1] * 0.5).tolist()
        part = total[2 * ring.rank : 2 * ring.rank + 2]
        for later in (False, True):
            x = torch.from_numpy(inputs[ring.rank].copy()).to(device)
            out = torch.empty(2, device=device)
            waited(dist.reduce_scatter_tensor(out, x, half, async_op=later))
            assert_equal((out.tolist(), x.tolist()), (part, inputs[ring.rank].tolist()), "tensor")
            out = torch.empty(2, device=device)
            waited(dist.reduce_scatter(out, list(x.chunk(2)), half, async_op=later))
            assert_equal(out.tolist(), part, "list")
            waited(dist.reduce(x, 0, half, async_op=later))
            if ring.rank == 0:
                assert_equal(x.tolist(), total, "reduce")


def mean_of_integers(ring: Any) -> None:
    """The wrapped sum is rounded towards zero, in place, in parts, in lists and on a root."""
    average, size = dist.ReduceOp.AVG, ring.size
    with initialised(ring, OURS[ring.device.type]):
        for dtype in (*INTEGERS, *UNSIGNED):
            arrays = [wide(sample(rank, (4 * size,), dtype)) for rank in range(size)]
            want, shard = mean(arrays, 0), slice(4 * ring.rank, 4 * ring.rank + 4)
            for later in (False, True):
                x = rounded(arrays[ring.rank], dtype).to(ring.device)
                part = torch.empty_like(x[:4])
                waited(dist.reduce_scatter_tensor(part, x, average, async_op=later))
                assert_bits_equal(part, want[shard], f"reduce_scatter_tensor of {dtype}")
                part = torch.empty_like(part)
                waited(dist.reduce_scatter(part, list(x.chunk(size)), average, async_op=later))
                assert_bits_equal(part, want[shard], f"reduce_scatter of {dtype}")
                reduced = x.clone()
                waited(dist.reduce(reduced, 0, average, async_op=later))
                if ring.rank == 0:
                    assert_bits_equal(reduced, want, f"reduce of {dtype}")
                waited(dist.all_reduce(x, average, async_op=later))
                assert_bits_equal(x, want, f"all_reduce of {dtype}")


def test_mean_of_integers(ranks: Ranks) -> None:
    ranks(mean_of_integers)


def test_mean_of_integers_of_more_ranks(many_ranks: Ranks) -> None:
    many_ranks(mean_of_integers)


@runs_on("ranks")
def test_parts_of_wrong_sizes(ring: Any) -> None:
    """Nothing is launched, so no part gets data of another one."""
    with initialised(ring, OURS[ring.device.type]) as world:
        group: Any = calls_of(world)
        device, x = ring.device, torch.ones(4, device=ring.device)
        wrong = [torch.zeros(3, device=device), torch.zeros(5, device=device)]
        error = commlib.errors.ShapeError
        calls = ring.report()["calls"]
        with raises(error, "scatter on ring 0", "xs[0]", "has 3 elements; expected 4"):
            dist.scatter(torch.empty_like(x), wrong, src=ring.rank)
        with raises(error, "gather on ring 0", "outs[0]", "has 3 elements; expected 4"):
            group.gather([wrong], [x], ring.rank)
        with raises(error, "all_gather on ring 0", "has 3 tensors; expected one per rank, 2"):
            dist.all_gather([*wrong, x], x)
        with raises(error, "reduce_scatter on ring 0", f"xs[{ring.rank}]", "expected 4"):
            dist.reduce_scatter(x, wrong)
        with raises(error, "outputs of rank 1", "['5 torch.float32", "expected ['4 torch.float32"):
            group.allgather_coalesced([[x], wrong[1:]], [x])
        with raises(error, "1 lists of outputs; expected one per rank, 2"):
            group.allgather_coalesced([[x]], [x])
        group.start_coalescing()
        with raises(commlib.errors.ArgumentError, "coalescing on ring 0", "a list of tensors"):
            dist.all_gather([torch.empty_like(x) for _ in range(2)], x)
        assert_equal(ring.report()["calls"], calls, "launches")
        outs = [[torch.empty_like(x)] for _ in range(2)]
        group.allgather_coalesced(outs, [x + ring.rank]).wait()
        assert_equal([row[0].tolist() for row in outs], [[1.0] * 4, [2.0] * 4], "coalesced")


@runs_on("ranks")
def test_refusals_say_the_way_round(ring: Any) -> None:
    with initialised(ring, OURS[ring.device.type]):
        x = torch.ones(2, dtype=torch.int32, device=ring.device)
        if ring.device.type == "cuda":
            for error in (DtypeError, NotImplementedError):
                with raises(error, "band", "torch.bitwise_and"):
                    dist.all_reduce(x.clone(), dist.ReduceOp.BAND)
        else:
            with raises(DtypeError, "bitwise reductions take integers"):
                dist.all_reduce(x.float(), dist.ReduceOp.BAND)
        with raises(ArgumentError, "all_gather on ring", "twice"):
            dist.all_gather([x, x], x.clone())
        with raises(NotImplementedError, "pass src="):
            dist.recv(x)
        sparse = x.to_sparse()
        for kind in (DeviceError, NotImplementedError):
            with raises(kind, "all_reduce on ring", "to_dense()"):
                dist.all_reduce(sparse)
            with raises(kind, "all_gather on ring", "to_dense()"):
                dist.all_gather([sparse, sparse], x)
        dist.all_reduce(x)
        assert_equal(x.tolist(), [2, 2], "after a refusal")


@runs_on("ranks")
def test_verbs_that_no_ring_has(ring: Any) -> None:
    """Torch's own answer for them is None, or an error about its C++ backends."""
    with initialised(ring, OURS[ring.device.type]) as world:
        calls: Any = calls_of(world)
        store = dist.HashStore()
        with raises(NotImplementedError, "merge_remote_group", "dist.new_group(ranks)"):
            calls.merge_remote_group(store, 2)
        with raises(NotImplementedError, "_register_on_completion_hook", "get_future().then"):
            calls._register_on_completion_hook(print)
        with raises(NotImplementedError, "_wait_for_pending_works", "wait()"):
            calls._wait_for_pending_works()
        with raises(NotImplementedError, "_enable_collectives_timing", "torch.profiler"):
            calls._enable_collectives_timing()
        if hasattr(dist, "shrink_group"):
            for group in (None, world):
                with raises(NotImplementedError, "shrink_group", "dist.new_group(ranks)"):
                    dist.shrink_group([1 - ring.rank], group)
        x = torch.ones(1, device=ring.device)
        dist.all_reduce(x)
        assert_equal(x.item(), 2.0, "after the errors")
    if hasattr(dist, "shrink_group"):
        with initialised(ring, STOCK["cpu"]), raises(TypeError, "does not support shrinking"):
            dist.shrink_group([1 - ring.rank])


@runs_on("ranks")
def test_queued_pairs(ring: Any) -> None:
    """Sends and receives of GPUs are launched together: at a wait, before another call, or dropped.

    A CPU launches each at once; here it takes the queue too.
    """
    peer, x = 1 - ring.rank, torch.full((3,), ring.rank + 1.0, device=ring.device)
    outs = [torch.zeros(3, device=ring.device) for _ in range(3)]
    ring.barrier()
    calls = ring.report()["calls"]

    def both(out: Tensor) -> list[Any]:
        send = Step([partial(ring.send, x, peer=peer)], [x])
        take = Step([partial(ring.recv, out, peer=peer)], [out])
        return [queued_pairs.queue(ring, step) for step in (send, take)]

    def state() -> tuple[bool, int]:
        return queued_pairs.queued(), ring.report()["calls"]

    works = both(outs[0])
    assert_equal(state(), (True, calls), "queued")
    works[1].wait()
    assert_equal(state(), (False, calls + 2), "launched by wait")
    works[0].wait()
    works = both(outs[1])
    queued_pairs.flush()  # as every other call of a group does
    assert_equal(state(), (False, calls + 4), "launched by a call")
    for work in works:
        work.wait()
    [_, last] = both(outs[2])  # nobody holds the work of the send
    del _
    assert_equal(state(), (False, calls + 6), "launched by a drop")
    last.wait()
    ring.barrier()
    for out in outs:
        assert_equal(out.tolist(), [peer + 1.0] * 3, "received")


@runs_on("ranks")
def test_under_modes(ring: Any) -> None:
    """A dispatch mode of the program does not stop a call; fake tensors make none."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with initialised(ring, OURS[ring.device.type]):
        x = torch.ones(2, device=ring.device)
        with Passing():  # type: ignore[no-untyped-call]
            dist.all_reduce(x)
            dist.all_reduce(x, async_op=True).wait()
        assert_equal(x.tolist(), [4.0, 4.0], "under a mode")
        calls = ring.report()["calls"]
        with FakeTensorMode():
            y = torch.ones(2, device=ring.device)
            dist.all_reduce(y)
        assert_equal(ring.report()["calls"], calls, "fake tensors")
        dist.barrier()
