"""ops.data_norm: wrong calls on one rank, calls that differ between ranks, and what they leave."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from commlib.errors import ArgumentError, DeviceError, DtypeError, RingError, ShapeError
from tests.support.checks import assert_equal, raises
from tests.support.operator import ABSENT_RING, calls
from tests.support.runs_on import runs_on
from tests.test_data_norm import Tensors, data_norm, leaves, rows, summaries


@runs_on("ranks")
def test_unequal_calls(comm: Any) -> None:
    """Synchronised calls that differ between the ranks are an error on each, before any launch."""
    odd = comm.rank == 1
    before = calls(comm)

    def call(width: int = 4, dtype: torch.dtype = torch.float32, **how: Any) -> Tensors:
        leaf, *stats = leaves(comm, rows(0, (3, width), dtype), *summaries(width, dtype)[:3])
        data_norm(leaf, *stats, sync_stats=True, **how)
        return stats

    with raises(ShapeError, "columns of x: 4 on ranks [0], 5 on ranks [1]", "ring 0"):
        call(5 if odd else 4)
    with raises(DtypeError, "torch.float32 on ranks [0], torch.float64 on ranks [1]"):
        call(dtype=torch.float64 if odd else torch.float32)
    with raises(ArgumentError, "epsilon: 0.0 on ranks [0], 0.001 on ranks [1]"):
        call(epsilon=1e-3 if odd else 0)
    with raises(ArgumentError, "summary_decay_rate: 0.5 on ranks [0], 1.5 on ranks [1]"):
        call(summary_decay_rate=0.5 + odd)
    with raises(ArgumentError, "x is torch.float16" if odd else "invalid arguments on ranks [1]"):
        call(dtype=torch.float16 if odd else torch.float32)
    leaf, *stats = leaves(comm, rows(0, (3, 4), torch.float32), *summaries(4, torch.float32)[:3])
    one = stats if not odd else [stats[0]] * 3
    with raises(ArgumentError, "one memory" if odd else "invalid arguments on ranks [1]"):
        data_norm(leaf, *one, sync_stats=True)
    assert_equal(calls(comm), before, "calls launched by refused ones")


@contextlib.contextmanager
def refused_summaries(comm: Any) -> Iterator[tuple[torch.Tensor, ...]]:
    """Give the three summaries, a scale and a bias to wrong calls, which change and launch nothing.

    A wrong call is one of our errors with the numbers in it, in every mode.
    """
    made = tuple(t.to(comm.device) for t in summaries(6, torch.float32))
    before, saved = calls(comm), [t.tolist() for t in made[:3]]
    yield made
    assert_equal([t.tolist() for t in made[:3]], saved, "summaries")
    assert_equal(calls(comm), before, "calls launched by refused ones")


def with_and_without_gradient(comm: Any) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(4, 6, device=comm.device)
    return x, x.clone().requires_grad_()


@runs_on("ranks")
def test_refused_numbers(comm: Any) -> None:
    with refused_summaries(comm) as (*stats, _, _):
        for data in with_and_without_gradient(comm):
            with raises(RingError, ABSENT_RING):
                data_norm(data, *stats, ABSENT_RING)
            for epsilon in (-1e-9, 1.1e-3, float("nan"), float("inf"), "1", None):
                with raises(ArgumentError, f"epsilon={epsilon!r}", "0 to 0.001"):
                    data_norm(data, *stats, epsilon=epsilon)
            for decay in (float("nan"), float("inf"), None):
                with raises(ArgumentError, f"summary_decay_rate={decay!r}", "finite"):
                    data_norm(data, *stats, summary_decay_rate=decay)
            for slot_dim in (0, -2, 1.5, True):
                with raises(ArgumentError, f"slot_dim={slot_dim!r}"):
                    data_norm(data, *stats, behaviour="cpu", slot_dim=slot_dim)
            for slot_dim in (4, 7):
                with raises(ShapeError, f"slot_dim={slot_dim}", "divisor", "6 columns"):
                    data_norm(data, *stats, behaviour="cpu", slot_dim=slot_dim)


@runs_on("ranks")
def test_refused_behaviours(comm: Any) -> None:
    with refused_summaries(comm) as (*stats, w, b):
        for data in with_and_without_gradient(comm):
            for word in ("GPU", "", None):
                with raises(ArgumentError, f"behaviour={word!r}", "'gpu' or 'cpu'"):
                    data_norm(data, *stats, behaviour=word)
            for kwargs in ({"slot_dim": 2}, {"scale_w": w, "bias": b}):
                with raises(ArgumentError, next(iter(kwargs)), "pass behaviour='cpu'"):
                    data_norm(data, *stats, **kwargs)
            with raises(ArgumentError, "sync_stats=True", "behaviour='cpu'"):
                data_norm(data, *stats, sync_stats=True, behaviour="cpu")
            for one in ({"scale_w": w}, {"bias": b}):
                with raises(ArgumentError, "is missing", "or neither"):
                    data_norm(data, *stats, behaviour="cpu", **one)


@runs_on("ranks")
def test_refused_tensors(comm: Any) -> None:
    with refused_summaries(comm) as (*stats, w, _):
        size, total, square = stats
        for data in with_and_without_gradient(comm):
            for shape in ((24,), (2, 2, 6), ()):
                x = torch.zeros(shape, device=comm.device).requires_grad_(data.requires_grad)
                with raises(ShapeError, shape, "[N, C]"):
                    data_norm(x, *stats)
            for wrong in (size[:5], size.view(1, 6), size[:1], size.repeat(2)):
                with raises(ShapeError, "batch_sum", tuple(wrong.shape), (4, 6)):
                    data_norm(data, size, wrong, square)
                with raises(ShapeError, "bias", tuple(wrong.shape)):
                    data_norm(data, *stats, scale_w=w, bias=wrong, behaviour="cpu")
            with raises(DtypeError, "batch_square_sum is torch.float64", "torch.float32"):
                data_norm(data, size, total, square.double())
            with raises(DeviceError, "batch_size is on meta"):
                data_norm(data, size.to("meta"), total, square)
            for nothing in (None, 1.0):
                with raises(ArgumentError, f"batch_size is {type(nothing).__name__}"):
                    data_norm(data, nothing, total, square)
        for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.complex64):
            with raises(DtypeError, dtype, "float32 or float64"):
                data_norm(data.detach().to(dtype), *stats)
        with raises(ArgumentError, "x is list"):
            data_norm([1.0], *stats)


@runs_on("ranks")
def test_refused_memory(comm: Any) -> None:
    """Summaries that a gradient would update have separate memory; what is only read may share."""
    x, leaf = with_and_without_gradient(comm)
    with refused_summaries(comm) as (size, total, square, _, _):
        with raises(ArgumentError, "one memory", ".clone()"):
            data_norm(leaf, size, total, size)
        with raises(ArgumentError, "batch_sum", "overlaps itself", "batch_sum.clone()"):
            data_norm(leaf, size, total[:1].expand(6), square)
    assert_equal(bool(data_norm(x, size, total, size).isfinite().all()), True, "only read")


@pytest.mark.parametrize("how", [{"epsilon": 0.01}, {"slot_dim": 2}, {"behaviour": "tpu"}])
def test_refused_without_a_ring(how: dict[str, Any]) -> None:
    x, *stats = torch.zeros(2, 2), *(torch.ones(2) for _ in range(3))
    with pytest.raises(ArgumentError, match="data_norm"):
        data_norm(x, *stats, **how)
