"""compat.paddle.distributed: values of the collectives, in every stream mode, and their errors."""

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import commlib.compat.paddle.distributed as dist
from commlib import flags
from commlib.compat.paddle.distributed import stream
from commlib.errors import ArgumentError, DtypeError, PeerError, ShapeError
from commlib.rendezvous import host_exchange
from commlib.rendezvous.shared_memory import MOST
from tests.support.checks import (
    Array,
    assert_bits_equal,
    assert_equal,
    raises,
    sample,
    settle,
    wide,
)
from tests.support.operator import calls
from tests.support.paddle_groups import own_groups
from tests.support.runs_on import runs_on

Tensor = torch.Tensor
MODES: dict[str, dict[str, bool]] = {
    "sync": {},
    "async": {"sync_op": False},
    "calc": {"use_calc_stream": True},
}
SHAPE = (4, 3)


def given(ring: Any, dtype: torch.dtype = torch.float32) -> tuple[Tensor, list[Array]]:
    """Return this rank's tensor, and the arrays of all ranks."""
    every = [wide(sample(rank, SHAPE, dtype)) for rank in range(ring.size)]
    return sample(ring.rank, SHAPE, dtype).to(ring.device), every


def ended(task: Any, mode: str) -> None:
    """Wait for the task of a call in ``mode``."""
    assert_equal(task.is_sync(), mode != "async", "is_sync")
    assert_equal(task.wait(), True, "wait")
    task.synchronize()
    assert_equal(task.is_completed(), True, "is_completed after wait")


REDUCTIONS: dict[str, Callable[[list[Array]], Array]] = {
    "SUM": lambda xs: np.sum(xs, 0),
    "MAX": lambda xs: np.max(xs, 0),
    "MIN": lambda xs: np.min(xs, 0),
    "PROD": lambda xs: np.prod(xs, 0),
    "AVG": lambda xs: np.mean(xs, 0),
}


@pytest.mark.parametrize("mode", MODES)
@runs_on("ranks")
def test_reductions(ring: Any, mode: str) -> None:
    for name, formula in REDUCTIONS.items():
        op = dist.ReduceOp[name]
        x, every = given(ring)
        want = torch.from_numpy(formula(every))
        ended(stream.all_reduce(x, op, **MODES[mode]), mode)
        assert_bits_equal(x, want, f"all_reduce {name}", atol=1e-6)
        x, _ = given(ring)
        ended(stream.reduce(x, 1, op, **MODES[mode]), mode)
        local = torch.from_numpy(every[ring.rank])
        assert_bits_equal(x, want if ring.rank == 1 else local, f"reduce {name}", atol=1e-6)
        for form in ("list", "tensor"):
            x, _ = given(ring)
            part, parts = torch.empty(2, 3, device=ring.device), list(x.chunk(2))
            entry = x if form == "tensor" else parts
            ended(stream.reduce_scatter(part, entry, op, **MODES[mode]), mode)
            shard = want.chunk(2)[ring.rank]
            assert_bits_equal(part, shard.clone(), f"reduce_scatter of a {form} {name}", atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@runs_on("ranks")
def test_copies(ring: Any, mode: str) -> None:
    x, arrays = given(ring)
    every = [torch.from_numpy(array) for array in arrays]
    ended(stream.broadcast(x, 1, **MODES[mode]), mode)
    assert_bits_equal(x, every[1], "broadcast")
    x, _ = given(ring)
    full = torch.empty(8, 3, device=ring.device)
    ended(stream.all_gather(full, x, **MODES[mode]), mode)
    assert_bits_equal(full, torch.cat(every), "all_gather in a tensor")
    for outputs in ([], [torch.empty_like(x) for _ in range(2)]):
        before = list(outputs)
        ended(stream.all_gather(outputs, x, **MODES[mode]), mode)
        for rank in range(2):
            assert_bits_equal(outputs[rank], every[rank], "all_gather in a list")
        assert_equal(all(a is b for a, b in zip(before, outputs, strict=False)), True, "in place")
        at_root: Any = [torch.empty_like(x) for _ in before] if ring.rank == 0 else None
        ended(stream.gather(x, at_root, 0, **MODES[mode]), mode)
        for rank in range(2 if ring.rank == 0 else 0):
            assert_bits_equal(at_root[rank], every[rank], "gather in a list")
    out = torch.empty(4, 3, device=ring.device)
    for entry in ([x, x + 1], torch.cat([x, x + 1])):
        ended(stream.scatter(out, entry if ring.rank == 1 else None, 1, **MODES[mode]), mode)
        assert_bits_equal(out, every[1] + ring.rank, "scatter")


@pytest.mark.parametrize("mode", MODES)
@runs_on("ranks")
def test_exchanges(ring: Any, mode: str) -> None:
    x, arrays = given(ring)
    every, me = [torch.from_numpy(array) for array in arrays], ring.rank
    out = torch.empty_like(x)
    ended(stream.alltoall(out, x, **MODES[mode]), mode)
    want = torch.cat([one.chunk(2)[me] for one in every])
    assert_bits_equal(out, want, "alltoall of tensors")
    for outputs in ([], [torch.empty(2, 3, device=ring.device) for _ in range(2)]):
        ended(stream.alltoall(outputs, list(x.chunk(2)), **MODES[mode]), mode)
        assert_bits_equal(torch.cat(outputs), want, "alltoall of lists")
    # Rank r sends 1 row to rank 0 and 3 rows to rank 1.
    rows = [1, 3]
    uneven = [torch.empty(rows[me], 3, device=ring.device) for _ in range(2)]
    ended(stream.alltoall(uneven, list(x.split(rows)), **MODES[mode]), mode)
    want = torch.cat([one.split(rows)[me] for one in every])
    assert_bits_equal(torch.cat(uneven), want, "alltoall of an uneven list")
    out = torch.empty(2 * rows[me], 3, device=ring.device)
    ended(stream.alltoall_single(out, x, [rows[me]] * 2, rows, **MODES[mode]), mode)
    assert_bits_equal(out, want, "alltoall_single")
    out = torch.empty_like(x)
    ended(stream.alltoall_single(out, x, **MODES[mode]), mode)
    assert_bits_equal(out, torch.cat([one.chunk(2)[me] for one in every]), "equal parts")


@runs_on("ranks")
def test_new_tensors_take_part_in_gradients(ring: Any) -> None:
    """Each tensor of a list that was empty can be changed in place."""
    x, parameter = given(ring)[0], torch.ones(SHAPE, device=ring.device, requires_grad=True)
    filled: list[list[Tensor]] = [[], [], []]
    dist.all_gather(filled[0], x)
    stream.alltoall(filled[1], [x, x])
    dist.gather(x, filled[2], 0)
    for outputs in filled:
        for out in outputs:
            before = out.clone()
            out.mul_(parameter).sum().backward()
            assert_bits_equal(parameter.grad, before, "gradient")
            parameter.grad = None


@runs_on("ranks")
def test_the_input_is_first_without_stream(ring: Any) -> None:
    """The two modules take their arguments in opposite orders."""
    x, arrays = given(ring)
    want = torch.cat([torch.from_numpy(array).chunk(2)[ring.rank] for array in arrays])
    outputs: list[Tensor] = []
    dist.alltoall(list(x.chunk(2)), outputs)
    assert_bits_equal(torch.cat(outputs), want, "alltoall")
    out = torch.empty_like(x)
    dist.alltoall_single(x, out)
    assert_bits_equal(out, want, "alltoall_single")
    rows, out = [1, 3], torch.empty(2 * (1 + 2 * ring.rank), 3, device=ring.device)
    dist.alltoall_single(x, out, rows, [1 + 2 * ring.rank] * 2)
    want = torch.cat([torch.from_numpy(array).split(rows)[ring.rank] for array in arrays])
    assert_bits_equal(out, want, "in_split_sizes first")


@runs_on("ranks")
def test_paddle_3_takes_the_output_first(ring: Any) -> None:
    x, arrays = given(ring)
    want = torch.cat([torch.from_numpy(array).chunk(2)[ring.rank] for array in arrays])
    parts, rows = list(x.chunk(2)), [1, 3]
    takes = [1 + 2 * ring.rank] * 2
    with flags.override(flags.PADDLE_VERSION, 3):
        outputs: list[Tensor] = []
        dist.alltoall(outputs, parts)
        assert_bits_equal(torch.cat(outputs), want, "alltoall")
        outputs = []
        dist.alltoall(outputs, in_tensor_list=parts)
        assert_bits_equal(torch.cat(outputs), want, "one keyword")
        out = torch.empty_like(x)
        dist.alltoall_single(out, x)
        assert_bits_equal(out, want, "alltoall_single")
        out = torch.empty(sum(takes), 3, device=ring.device)
        dist.alltoall_single(out, x, rows, takes)
        with raises(TypeError, "out_tensor"):
            dist.alltoall_single(out, out_tensor=x)
        with raises(ArgumentError, "in_tensor_list"):
            dist.alltoall(parts, [])
    want = torch.cat([torch.from_numpy(array).split(rows)[ring.rank] for array in arrays])
    assert_bits_equal(out, want, "in_split_sizes first")
    with flags.override(flags.PADDLE_VERSION, 2):
        dist.alltoall_single(x, out, rows, takes)
    assert_bits_equal(out, want, "the order of Paddle 2")


@pytest.mark.parametrize("release", [0, 2, 3])
@runs_on("ranks")
def test_keywords_of_an_exchange(ring: Any, release: int) -> None:
    """They mean the same in every release."""
    x, arrays = given(ring)
    want = torch.cat([torch.from_numpy(array).chunk(2)[ring.rank] for array in arrays])
    outputs: list[Tensor] = []
    out = torch.empty_like(x)
    with flags.override(flags.PADDLE_VERSION, release):
        dist.alltoall(out_tensor_list=outputs, in_tensor_list=list(x.chunk(2)))
        dist.alltoall_single(in_tensor=x, out_tensor=out)
        assert_bits_equal(torch.cat(outputs), want, "alltoall")
        assert_bits_equal(out, want, "alltoall_single")
        out = torch.empty_like(x)
        stream.alltoall_single(out, x)
        assert_bits_equal(out, want, "stream")


@runs_on("ranks")
def test_plain_names(ring: Any) -> None:
    """What ``stream`` does, without its last argument."""
    x, arrays = given(ring)
    every = [torch.from_numpy(array) for array in arrays]
    outputs: list[Tensor] = []
    dist.all_gather(outputs, x)
    assert_bits_equal(torch.cat(outputs), torch.cat(every), "all_gather")
    one = torch.tensor(float(ring.rank), device=ring.device)
    outputs = []
    dist.all_gather(outputs, one)
    assert_equal([float(out) for out in outputs], [0.0, 1.0], "0-D tensors")
    outputs = []
    dist.gather(x, outputs if ring.rank == 1 else None, 1)
    assert_equal(len(outputs), 2 if ring.rank == 1 else 0, "gather")
    part = torch.empty(2, 3, device=ring.device)
    dist.scatter(part, list(x.chunk(2)) if ring.rank == 0 else None)
    assert_bits_equal(part, every[0].chunk(2)[ring.rank].clone(), "scatter")
    dist.reduce_scatter(part, list(x.chunk(2)), dist.ReduceOp.MAX)
    assert_bits_equal(part, torch.maximum(*every).chunk(2)[ring.rank].clone(), "reduce_scatter")
    dist.reduce(x, 0, dist.ReduceOp.MIN)
    assert_bits_equal(x, torch.minimum(*every) if ring.rank == 0 else every[1], "reduce")
    dist.broadcast(x, 1)
    assert_bits_equal(x, every[1], "broadcast")
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert_bits_equal(x, every[1], "all_reduce")
    weight = torch.nn.Parameter(x.clone())
    dist.all_reduce(weight)
    assert_bits_equal(weight.detach(), every[1] * 2, "a parameter, outside autograd")


@runs_on("ranks")
def test_sends(ring: Any) -> None:
    x, arrays = given(ring)
    other, got = 1 - ring.rank, torch.empty_like(x)
    if ring.rank == 0:
        dist.send(x, other)
        dist.recv(got, other)
    else:
        dist.recv(got, other)
        dist.send(x, other)
    assert_bits_equal(got, arrays[other], "send, recv")
    got, sent = torch.empty_like(x), dist.isend(x, other)
    received: Any = dist.irecv(got, other)
    received.wait()
    assert_bits_equal(got, arrays[other], "isend, irecv")
    assert sent is not None
    sent.wait()


@runs_on("ranks")
def test_batches(ring: Any) -> None:
    """Both ranks send before they receive, over two groups, twice to one peer."""
    with own_groups():
        x, arrays = given(ring)
        other, group = 1 - ring.rank, dist.new_group()
        got = [torch.empty_like(x) for _ in range(3)]
        tasks = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, other),
                dist.P2POp(dist.isend, x + 1, other),
                dist.P2POp(dist.isend, x + 2, other, group),
                dist.P2POp(dist.irecv, got[0], other),
                dist.P2POp(dist.irecv, got[2], other, group),
                dist.P2POp(dist.irecv, got[1], other),
            ]
        )
        assert tasks is not None
        assert_equal(len(tasks), 6, "a task per call")
        for task in tasks:
            task.wait()
        for more, out in enumerate(got):
            assert_bits_equal(out, torch.from_numpy(arrays[other]) + more, f"message {more}")
        before = calls(ring)
        for wrong in ([], [x], None):
            with raises(ArgumentError, "expected a list of one P2POp or more"):
                dist.batch_isend_irecv(wrong)
        with raises(ArgumentError, "expected isend or irecv"):
            dist.P2POp(dist.send, x, other)
        with raises(PeerError, "peer=7"):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.isend, x, 7)])
        with raises(PeerError, f"peer={ring.rank} is this rank itself"):
            dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, x, other), dist.P2POp(dist.isend, x, ring.rank, group)]
            )
        assert_equal(calls(ring), before, "calls launched by refused ones")


@runs_on("ranks")
def test_waits(ring: Any) -> None:
    x = torch.ones(2, device=ring.device)
    task = dist.all_reduce(x, sync_op=False)
    dist.wait(x, use_calc_stream=False)
    dist.wait(x)
    assert task is not None
    task.wait()
    dist.barrier()
    settle(ring)
    assert_equal(x.tolist(), [2.0, 2.0], "after the waits")


@runs_on("ranks")
def test_errors(ring: Any) -> None:
    x, before, me = torch.ones(4, 3, device=ring.device), calls(ring), f"rank {ring.rank} of 2"
    mixed: Any = [x, 1]
    nothing: Any = None
    wrong: list[tuple[Callable[[], Any], type[Exception], tuple[str, ...]]] = [
        (
            lambda: stream.all_reduce(x, sync_op=False, use_calc_stream=True),
            RuntimeError,
            ("use_calc_stream can only be true in sync op behavior", me),
        ),
        (lambda: dist.all_reduce(x, "sum"), ArgumentError, ("op='sum'", "ReduceOp.SUM")),
        (lambda: dist.all_reduce([x]), ArgumentError, ("list", me)),
        (lambda: dist.all_gather([x], x), ArgumentError, ("1 entries", "expected 2", me)),
        (lambda: dist.all_gather((), x), ArgumentError, ("tensor_list has 0 entries",)),
        (lambda: dist.all_gather(mixed, x), ArgumentError, ("tensor_list[1] is int",)),
        (lambda: dist.all_gather([x, x[:1]], x), ShapeError, ("[1] has shape (1, 3)", "(4, 3)")),
        (lambda: dist.all_gather([x, x.int()], x), DtypeError, ("int32", "[1].to(torch.float32)")),
        (lambda: dist.reduce_scatter(x, [x]), ArgumentError, ("tensor_list has 1 entries",)),
        (lambda: dist.reduce_scatter(x, [x, x[0]]), ShapeError, ("(3,)", me)),
        (lambda: dist.scatter(x, None, ring.rank), ArgumentError, ("0 entries", "expected 2")),
        (lambda: dist.gather(x, None, ring.rank), ArgumentError, ("gather_list is NoneType",)),
        (lambda: dist.alltoall([x], []), ArgumentError, ("in_tensor_list has 1 entries",)),
        (lambda: dist.alltoall([x, x], [x]), ArgumentError, ("out_tensor_list has 1 entries",)),
        (lambda: dist.alltoall([x, x], ()), ArgumentError, ("out_tensor_list has 0 entries",)),
        (lambda: dist.alltoall([x, x], nothing), ArgumentError, ("out_tensor_list is NoneType",)),
        (lambda: dist.alltoall(x, []), ArgumentError, ("two tensors or two lists",)),
        (lambda: dist.alltoall_single(x, x, [1, 1]), ShapeError, ("in_splits=[1, 1]", me)),
        (lambda: dist.broadcast(x, 2), PeerError, ("src=2", "[0, 1]", me)),
        (lambda: dist.reduce(x, -1), PeerError, ("dst=-1",)),
        (lambda: dist.broadcast(x, True), PeerError, ("src=True",)),
        (lambda: dist.send(x, ring.rank), PeerError, ("is this rank itself",)),
    ]
    for call, error, words in wrong:
        with raises(error, *words):
            call()
    assert_equal(calls(ring), before, "calls launched by refused ones")


# -- objects ---------------------------------------------------------------------------------------


class Point:
    """A class that a program has to allow."""

    def __init__(self, x: int) -> None:
        self.x = x


@runs_on("ranks")
def test_objects(ring: Any) -> None:
    local = {"rank": ring.rank, "ids": (1, [2.5, None]), "x": torch.ones(2, device=ring.device)}
    rows: list[Any] = ["before"]
    dist.all_gather_object(rows, local)
    assert_equal(rows[0], "before", "objects are appended")
    assert_equal([row["rank"] for row in rows[1:]], [0, 1], "in rank order")
    assert_equal({row["x"].device for row in rows[1:]}, {ring.device}, "on the ring's device")
    assert_equal(rows[1]["ids"], (1, [2.5, None]), "plain values")
    sent = ["a", {3}, b"\x00b"]
    values = list(sent) if ring.rank == 1 else [None] * 3
    dist.broadcast_object_list(values, 1)
    assert_equal(values, sent, "broadcast_object_list")
    out: list[Any] = [1, 2, 3]
    dist.scatter_object_list(out, ["first", "second"] if ring.rank == 0 else None, 0)
    assert_equal(out, [["first", "second"][ring.rank]], "scatter_object_list")


def test_rows_of_a_large_object_grow_in_place() -> None:
    """A copy of all rows per round would be quadratic, and hold the rows twice."""
    values = list(range(100 * MOST))

    def rounds(part: list[int]) -> list[list[int]]:
        return [list(part), list(part)]

    tracemalloc.start()
    try:
        rows = host_exchange.all_gather(rounds, values)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows == [values, values]
    assert peak < 1.5 * sum(map(sys.getsizeof, rows))


@runs_on("ranks")
def test_objects_that_are_code(ring: Any) -> None:
    """An error on the sender, which names the class, before anything is sent."""
    for value in (Point(1), [Point(1)]):
        with raises(ArgumentError, "Point", "add_safe_globals", f"rank {ring.rank}"):
            dist.all_gather_object([], value)
    with raises(ArgumentError, "an object of type function can't be carried"):
        dist.all_gather_object([], lambda: None)
    with torch.serialization.safe_globals([Point]):
        rows: list[Any] = []
        dist.all_gather_object(rows, Point(ring.rank))
        assert_equal([row.x for row in rows], [0, 1], "an allowed class")
    if ring.rank == 0:
        with raises(ArgumentError, "in_object_list=[1]", "2 objects"):
            dist.scatter_object_list([], [1], 0)
    with raises(PeerError, "src=5"):
        dist.broadcast_object_list([1], 5)


@runs_on("ranks")
def test_object_lists_of_two_lengths(ring: Any) -> None:
    values: list[Any] = [1, 2] if ring.rank == 0 else [None]
    if ring.rank == 0:
        dist.broadcast_object_list(values, 0)
    else:
        with raises(ArgumentError, "1 entries here and 2 on global rank 0"):
            dist.broadcast_object_list(values, 0)
