"""all_gather_v and reduce_scatter_v: parts whose sizes differ between ranks."""

from typing import Any

import numpy as np
import torch

from commlib.errors import ArgumentError, DtypeError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, rounded, sample, wide
from tests.support.runs_on import runs_on

SIZES = [(3, 2), (0, 2), (5,), (1, 2, 2)]  # of ranks, as many as there are


def parts_of(ring: Any, seed: int) -> list[torch.Tensor]:
    return [sample(r, SIZES[r], torch.float32, seed).to(ring.device) for r in range(ring.size)]


@runs_on("ranks")
def test_all_gather_v(ring: Any) -> None:
    parts = parts_of(ring, 0)
    for later in (False, True):
        outs = [torch.full_like(part, 7.0) for part in parts]
        if later:
            work = ring.all_gather_v(outs, parts[ring.rank], use_calc_stream=False, sync_op=False)
            work.wait()
        else:
            assert_equal(ring.all_gather_v(outs, parts[ring.rank])[0] is outs[0], True, "result")
        for out, part in zip(outs, parts, strict=True):
            assert_bits_equal(out.cpu(), part.cpu(), "all_gather_v")


@runs_on("ranks")
def test_reduce_scatter_v(ring: Any) -> None:
    inputs = [
        [sample(r, shape, torch.float32).to(ring.device) for shape in SIZES[: ring.size]]
        for r in range(ring.size)
    ]
    formulas: dict[str, Any] = {"sum": lambda a, b: a + b, "max": np.maximum}
    for op, formula in formulas.items():
        out = torch.empty(SIZES[ring.rank], device=ring.device)
        assert_equal(ring.reduce_scatter_v(out, inputs[ring.rank], op=op) is out, True, "result")
        expected = formula(wide(inputs[0][ring.rank]), wide(inputs[1][ring.rank]))
        assert_bits_equal(out.cpu(), rounded(expected, torch.float32), op)
        out = torch.empty_like(out)
        options = {"op": op, "use_calc_stream": False, "sync_op": False}
        work = ring.reduce_scatter_v(out, inputs[ring.rank], **options)
        assert_equal((work.wait() is out, work.result is out), (True, True), "result of a Work")
        assert_bits_equal(out.cpu(), rounded(expected, torch.float32), f"{op}, later")


@runs_on("ranks")
def test_wrong_parts(ring: Any) -> None:
    x = torch.ones(3, device=ring.device)
    with raises(ShapeError, "outs has 1 tensors", f"one per rank, {ring.size}"):
        ring.all_gather_v([x], x)
    with raises(ShapeError, f"outs[{ring.rank}]", "has 2 elements; expected 3"):
        ring.all_gather_v([x[:2].clone() for _ in range(ring.size)], x)
    with raises(DtypeError, "expected one dtype"):
        ring.reduce_scatter_v(x, [x.int() for _ in range(ring.size)])
    with raises(ArgumentError, "a group is open already"), ring.group():
        ring.all_gather_v([torch.ones(3, device=ring.device) for _ in range(ring.size)], x)
    ring.barrier()
