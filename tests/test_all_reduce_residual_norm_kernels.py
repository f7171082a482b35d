"""The kernels of all_reduce_residual_norm: rows they take, their graphs and lost peers."""

import contextlib
import ctypes
import gc
import itertools
from typing import Any

import pytest
import torch

import commlib
from commlib import ops
from commlib.errors import (
    PeerTimeout,
    RingError,
)
from commlib.p2p import fused_norm as fused
from commlib.p2p import kernel_table, push_channel
from tests.support.checks import (
    assert_bits_equal,
    assert_equal,
    on_gpu,
    raises,
    settle,
)
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.test_all_reduce_residual_norm import FLOAT8, KINDS, NEAR, Case, equal_everywhere, norm_of

LATE_S = 5.0  # deadline of a ring whose peer does not come; creating it has to fit too


def kernel_for(comm: Any, x: torch.Tensor) -> bool:
    """Whether the fused kernel takes ``x``."""
    norm = fused.Norm(x, x, None, None, None, False, 0.0)
    return bool(x.numel()) and comm._engine.fused_norm(x, norm) is not None


# -- the kernels -----------------------------------------------------------------------------------


@runs_on("gpu_ranks")
def test_which_rows_are_taken(comm: Any) -> None:
    """Which rows the kernels take: whole vectors, up to what a block holds."""
    for dtype, items, want in (
        (torch.bfloat16, 8, True),
        (torch.bfloat16, 12, False),
        (torch.float32, 12, True),
        (torch.bfloat16, 16_384, True),
        (torch.bfloat16, 16_392, False),
        (torch.float32, 8192, True),
        (torch.float32, 8196, False),
    ):
        x = torch.ones(2, items, dtype=dtype, device=comm.device)
        assert_equal(kernel_for(comm, x), want, f"{items} x {dtype}")


def borders(comm: Any, items: int, counts: list[int]) -> None:
    """Any number of rows, on both sides of every border: the composition's rows, and its y."""
    for count, dtype in itertools.product(counts, (torch.bfloat16, torch.float32)):
        for kind in (KINDS[3], KINDS[4]):
            case = Case(comm, (count, items), dtype, kind)
            assert_equal(kernel_for(comm, case.x), True, case.what)
            (y, total), (want, want_total) = case.call(), case.composed()
            assert_bits_equal(total, want_total, f"{case.what}: before the norm")
            rtol, atol = (2 * each for each in NEAR[y.dtype])
            apart = (y.float() - want.float()).abs() > atol + rtol * want.float().abs()
            assert_equal(int(apart.sum()), 0, f"{case.what}: values of y apart")
            equal_everywhere(comm, case.what, y, total)


@pytest.mark.parametrize(
    ("items", "counts"),
    [
        (8192, [2, 4, 5, 16, 17, 32, 33, 131, 132, 133, 256, 257, 1025, 2600]),
        (8184, [3, 300]),
        (64, [133, 1000, 2049, 40_000]),
        (8, [5, 5000]),
    ],
)
def test_borders(gpu_ranks: Ranks, items: int, counts: list[int]) -> None:
    gpu_ranks(borders, items, counts, deadline=400)


def test_borders_of_more_ranks(many_gpu_ranks: Ranks) -> None:
    many_gpu_ranks(borders, 4096, [1, 7, 8, 9, 32, 33, 64, 65, 300, 2600], deadline=400)
    many_gpu_ranks(borders, 8, [1, 4097, 40_000], deadline=400)


def mixed(comm: Any) -> None:
    """Between other calls of the ring, while one rank is late: the halves go on taking turns."""
    case = Case(comm, (40, 512), torch.bfloat16, KINDS[3])
    small = Case(comm, (1, 64), torch.float32, KINDS[0])
    wants = [(each, *each.call()) for each in (case, small)]
    for turn in range(200 if on_gpu(comm) else 10):
        if on_gpu(comm) and turn % 5 == comm.rank:
            torch.cuda._sleep(50_000)
        each, y, total = wants[turn % 3 % 2]
        actual = each.call(use_calc_stream=turn % 7 != 3)
        ops.all_reduce(each.x)
        for one, other in zip(actual, (y, total), strict=True):
            assert_bits_equal(one, other, f"turn {turn}")
    settle(comm)


def test_between_other_calls(unified_ranks: Ranks) -> None:
    unified_ranks(mixed, deadline=120)


def test_between_other_calls_of_more_ranks(many_ranks: Ranks) -> None:
    many_ranks(mixed, deadline=120)


@runs_on("all_gpu_ranks")
def test_captured(comm: Any) -> None:
    """A capture, the first call of its kind, is replayed with new inputs: eager's bits."""
    gc.collect()  # a graph of another test that goes in a capture would end it
    for (dtype, shape), kind in itertools.product(
        ((torch.bfloat16, (3, 2048)), (torch.float32, (70, 1024)), (torch.float16, (2, 1001))),
        KINDS[3:],
    ):
        case = Case(comm, shape, dtype, kind, seed=9)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            y, total = case.call()
            more = norm_of(case.x, total, case.weight, use_calc_stream=False)
        for seed in range(3):
            other = Case(comm, shape, dtype, kind, seed)
            for name in ("x", "residual", "weight"):
                getattr(case, name).copy_(getattr(other, name))
            for name in {"bias", "linear_bias", "scale"} & case.how.keys():
                case.how[name].copy_(other.how[name])
            if "scale" in case.how:
                case.how["scale"].mul_(seed + 1)
            graph.replay()
            want = case.call()
            for actual, wanted in zip(
                (y, total, *more),
                (*want, *norm_of(case.x, want[1], case.weight)),
                strict=True,
            ):
                assert_bits_equal(actual, wanted, f"{case.what} replay {seed}")


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[5]], ids=["rms", "layer-float8"])
@pytest.mark.parametrize("rows", [1, 300, 2000])
@runs_on("gpu_ranks")
def test_a_peer_that_does_not_come(comm: Any, rows: int, kind: dict[str, Any]) -> None:
    """A peer that does not come is named on every rank, results are NaN; reset() repairs."""
    ring = commlib.new_ring(87, range(comm.size), timeout=LATE_S)
    assert ring is not None
    case = Case(comm, (rows, 2048), torch.bfloat16, kind)
    want = case.call(ring_id=87)
    torch.cuda.synchronize()
    ring.exchange([])
    if comm.rank:
        y, total = case.call(ring_id=87)
        torch.cuda.synchronize()
        assert_equal(bool(y.float().isnan().all() and total.isnan().all()), True, "results are NaN")
        if y.dtype is FLOAT8:
            assert_equal(set(y.view(torch.uint8).view(-1).tolist()), {0x7F}, "bytes")
    comm.exchange([])
    if comm.rank == 0:
        with contextlib.suppress(PeerTimeout):
            case.call(ring_id=87)
        torch.cuda.synchronize()
    with raises(RingError if ring._health.fault else PeerTimeout, "reset()"):
        ring.check()
    named = any("waiting for rank 0 in all_reduce_residual_norm" in e for e in ring._errors())
    assert_equal(named, True, f"errors {ring._errors()}")
    ring.reset()
    for actual, wanted in zip(case.call(ring_id=87), want, strict=True):
        assert_bits_equal(actual, wanted, "after reset")
    torch.cuda.synchronize()
    ring.check()


# -- what the host decides -------------------------------------------------------------------------


@pytest.mark.parametrize("size", kernel_table.SIZES)
def test_a_row_fits_into_the_channel(size: int) -> None:
    for row in kernel_table.table()[fused.COLLECTIVE][size]:
        for width in (1, size - 1, size, size + 1, fused.WIDEST):
            slots = fused.slots(row.kernel, width, size)
            assert slots >= (size if row.kernel == "norm_one_shot" else 2) * width
            assert slots * 16 <= 2 * push_channel.WINDOW


def test_arguments_are_laid_out_as_the_kernel_sees_them() -> None:
    call, norm = ctypes.sizeof(push_channel.Call), fused.NormCall
    assert call == 128
    assert norm.residual.offset == call
    assert norm.eps.offset == call + 6 * 8
    assert ctypes.sizeof(norm) == call + 6 * 8 + 4 * 4
