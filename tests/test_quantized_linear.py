"""Linear layers with quantized weights: against NumPy, in every form, and their kernel on GPUs."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from commlib import graph
from commlib.ops.inference import QuantizedWeight, few_rows, quantize
from commlib.ops.inference.quantized_linear import MOST_ROWS, quantized_linear
from commlib.tools.bench import quantized
from tests.support.checks import Array, assert_bits_equal, assert_equal
from tests.support.operator import compile_whole
from tests.support.runs_on import runs_on

NEAR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
KINDS = (torch.int8, torch.float8_e4m3fn)
SHAPES = ((1, 16, 512), (3, 40, 1040), (17, 33, 100), (MOST_ROWS, 80, 77), (MOST_ROWS + 1, 16, 64))


class Case:
    """One layer: its tensors, and what NumPy computes from their values."""

    def __init__(self, shape: tuple[int, int, int], kind: torch.dtype, dtype: torch.dtype) -> None:
        rows, outputs, inputs = shape
        draw = torch.Generator().manual_seed(rows + outputs)
        self.x = torch.randn(rows, inputs, generator=draw).to(dtype)
        self.weight = quantize(torch.randn(outputs, inputs, generator=draw), kind)
        self.bias = torch.randn(outputs, generator=draw).to(dtype)
        self.near, self.what = NEAR[dtype], f"{shape}, {kind}, {dtype}"

    def to(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``x``, values and scales on a device."""
        return self.x.to(device), self.weight.values.to(device), self.weight.scales.to(device)

    def expected(self, bias: torch.Tensor | None) -> Array:
        weight = self.weight.values.double().numpy() * self.weight.scales.double().numpy()[:, None]
        product: Array = self.x.double().numpy() @ weight.T
        return product if bias is None else product + bias.double().numpy()

    def check(self, found: torch.Tensor, bias: torch.Tensor | None) -> None:
        want = self.expected(bias)
        assert_equal((found.dtype, tuple(found.shape)), (self.x.dtype, want.shape), self.what)
        worst = np.abs(found.double().cpu().numpy() - want).max() / np.abs(want).max()
        assert_equal(worst < self.near, True, f"{self.what}: {worst} of the largest")


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", NEAR, ids=str)
def test_values(kind: torch.dtype, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        case = Case(shape, kind, dtype)
        for bias in (None, case.bias):
            case.check(quantized_linear(*case.to(torch.device("cpu")), bias), bias)


@runs_on("gpu_ranks", deadline=120)
def test_values_on_gpus(comm: Any) -> None:
    """Rows and columns that fill no tile; the kernel takes few rows of short floats."""
    for shape, kind, dtype in itertools.product(SHAPES, KINDS, NEAR):
        case = Case(shape, kind, dtype)
        args, gpu_bias = case.to(comm.device), case.bias.to(comm.device)
        kernel = dtype in few_rows.DTYPES and shape[0] <= MOST_ROWS
        assert_equal(few_rows.may_take_kernel(MOST_ROWS, *args, gpu_bias), kernel, case.what)
        for bias in (None, gpu_bias):
            case.check(quantized_linear(*args, bias), None if bias is None else case.bias)


@runs_on("gpu_ranks", deadline=120)
def test_every_form_on_gpus(comm: Any) -> None:
    """Rows in other layouts, replays and compiled code give the same bits."""
    for kind in KINDS:
        every_form(comm, Case((6, 48, 192), kind, torch.bfloat16))


def every_form(comm: Any, case: Case) -> None:
    x, *weight = case.to(comm.device)
    bias = case.bias.to(comm.device)
    want = quantized_linear(x, *weight, bias)
    apart = torch.zeros(6, 2 * x.shape[1], device=comm.device, dtype=x.dtype)[:, ::2].copy_(x)
    assert_bits_equal(quantized_linear(apart, *weight, bias), want, "with gaps")
    actual = quantized_linear(x.view(2, 3, -1), *weight, bias)
    assert_bits_equal(actual.flatten(0, 1), want, "three dimensions")

    def with_bias(x: torch.Tensor) -> torch.Tensor:
        return quantized_linear(x, *weight, bias)

    call, compiled = graph.capture(with_bias, outputs="copy"), compile_whole(with_bias)
    for turn in range(4):
        scaled = x * (turn + 1)
        eager = quantized_linear(scaled, *weight, bias)
        assert_bits_equal(call(scaled), eager, f"captured, turn {turn}")
        assert_bits_equal(compiled(scaled), eager, f"compiled, turn {turn}")
    assert_equal(call.entries.replays, 3, "replays")
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(quantized_linear(leaf, *weight, bias).sum(), leaf)
    assert_equal(bool(grad.abs().sum() > 0), True, "a gradient, by the torch operators")


def test_a_weight_of_an_inference_layer() -> None:
    """What ``quantize`` gives is what the layer takes."""
    weight = quantize(torch.eye(4), torch.int8)
    assert isinstance(weight, QuantizedWeight)
    x = torch.arange(8.0).view(2, 4)
    assert torch.equal(quantized_linear(x, weight.values, weight.scales, None), x)


def test_findings_of_the_benchmark() -> None:
    good = {name: [6e-5] * 2 for name in quantized.DTYPES}
    rest = {quantized.CONVERTED: [3e-4] * 2, quantized.PLAIN: [1e-4] * 2}
    samples = {str(batch): {**good, **rest} for batch in quantized.BATCHES}
    report = quantized.report(samples, {"nproc": 1, "rounds": 2})
    assert report.findings[0] == "met: batch 1, int8 / bfloat16: 0.60, target at most 0.75"
    assert len(report.findings) == 6
    assert len(report.rows) == 12
    slow = {**samples, "8": {**samples["8"], "fp8": [1e-4] * 2}}
    again = quantized.report(slow, {"nproc": 1, "rounds": 2})
    assert [text.partition(":")[0] for text in again.findings].count("missed") == 1


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_products_beyond_float16(kind: torch.dtype) -> None:
    """The sum of the bytes alone is above 65504, and so is the largest of many scales."""
    for size in (1e-7, 1e-3, 0.1, 7.0):
        weight = quantize(torch.full((8, 4096), size), kind)
        for rows in (1, MOST_ROWS + 1):
            x = torch.full((rows, 4096), 1.5, dtype=torch.float16)
            actual = quantized_linear(x, weight.values, weight.scales, None)
            want = torch.full((rows, 8), 1.5 * 4096 * size)
            torch.testing.assert_close(actual.float(), want, rtol=2e-3, atol=1e-6)
    none = quantize(torch.zeros(8, 16), kind)
    actual = quantized_linear(torch.ones(2, 16), none.values, none.scales, None)
    assert_bits_equal(actual, torch.zeros(2, 8), "a weight of zeros")
