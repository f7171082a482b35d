"""The kernels at the ends of fused_attention and fused_feedforward, against NumPy; on GPUs."""

import itertools
from typing import Any

import numpy as np
import torch

from commlib import graph
from commlib.errors import ArgumentError
from commlib.ops import fused_feedforward
from commlib.ops.tensor_parallel.blocks.steps import Dropout, LayerNorm
from commlib.ops.tensor_parallel.column_linear import NO_RING
from commlib.ops.tensor_parallel.residual_norm import has_kernels, norm_and_input, residual_norm
from tests.support.checks import Array, assert_bits_equal, assert_equal, raises
from tests.support.class_shards import near
from tests.support.runs_on import runs_on
from tests.support.transformer import Norm, draw

NEAR = {torch.float32: (1e-5, 1e-4), torch.float16: (5e-3, 5e-3), torch.bfloat16: (2e-2, 4e-2)}
USUAL = (300, 24)  # more rows than programs of the backward
CASES = (  # each is compiled
    *((USUAL, dtype) for dtype in NEAR),
    ((1, 7), torch.float32),
    ((3, 1000), torch.bfloat16),
    ((2, 5120), torch.bfloat16),
    ((2, 20_000), torch.float32),
)
NO_NORM = LayerNorm(True, None, None, 0.0)
KEEPS_ALL = Dropout(0.0)


class Case:
    """Tensors of one step: rounded to a dtype, on the device and in NumPy."""

    def __init__(self, comm: Any, rows: int, width: int, dtype: torch.dtype, wide: bool) -> None:
        """``wide``: the parameters of the norm are float32."""
        vectors = dict.fromkeys(("bias", "ln_weight", "ln_bias"), (width,))
        tensors = dict.fromkeys(("x", "residual", "grad", "added"), (rows, width))
        self.what, self.near = f"{rows} x {width}, {dtype}", NEAR[dtype]
        self.torch: dict[str, torch.Tensor] = {}
        self.numpy: dict[str, Array] = {}
        for name, values in draw(rows + width, {**vectors, **tensors}).items():
            to_dtype = torch.float32 if wide and name.startswith("ln_") else dtype
            rounded = torch.from_numpy(values).to(to_dtype)
            self.numpy[name] = rounded.double().numpy()
            self.torch[name] = rounded.to(comm.device).requires_grad_()

    def norm(self, before: bool) -> LayerNorm:
        return LayerNorm(before, self.torch["ln_weight"], self.torch["ln_bias"], 1e-5)

    def check(self, what: str, names: tuple[str, ...], found: Any, want: dict[str, Array]) -> None:
        """Raise unless gradients are those of the formula, in the dtypes of their tensors."""
        for name, grad in zip(names, found, strict=True):
            tensor = self.torch[name]
            assert_equal(grad.dtype, tensor.dtype, f"{what}: {name}")
            rtol, atol = self.near
            near(grad, want[name], f"{what}: {name}", rtol, atol * 4)


def seen_mask(comm: Any, rows: int, width: int, rate: float, seed: int) -> Array:
    """Return the mask that a seed gives: True where an element is kept."""
    torch.manual_seed(seed)
    ones = torch.ones(rows, width, device=comm.device)
    mask: Array = residual_norm(ones, None, Dropout(rate), None, NO_NORM).cpu().numpy() != 0
    return mask


@runs_on("gpu_ranks", deadline=240)
def test_last_step(comm: Any) -> None:
    """Values and gradients for every dtype, odd shapes, with and without norm and dropout."""
    names = "x", "bias", "residual"
    every = itertools.product(CASES, (False, True), (0.0, 0.25))
    for ((rows, width), dtype), normed, rate in every:
        if (rows, width) != USUAL and not (normed and rate):
            continue
        case = Case(comm, rows, width, dtype, wide=normed and width == 1000)
        label = f"{case.what}, normed={normed}, rate={rate}"
        x, bias, residual, grad = (case.numpy[n] for n in ("x", "bias", "residual", "grad"))
        keep = seen_mask(comm, rows, width, rate, 3) / (1 - rate) if rate else np.ones_like(x)
        torch.manual_seed(3)
        tensors = case.torch["x"], case.torch["bias"], Dropout(rate), case.torch["residual"]
        assert_equal(has_kernels(case.torch["x"]), True, label)
        y = residual_norm(*tensors, case.norm(not normed))
        total = residual + keep * (x + bias)
        want: dict[str, Array] = {}
        if normed:  # of the rounded sum
            norm = Norm(case.numpy)
            total = torch.from_numpy(total).to(dtype).double().numpy()
            near(y, norm.forward(total[None])[0], label, *NEAR[dtype])
            want["residual"] = norm.backward(grad[None], want)[0]
        else:
            near(y, total, label, *NEAR[dtype])
            want["residual"] = grad
        want |= {"x": want["residual"] * keep, "bias": (want["residual"] * keep).sum(0)}
        assert_equal(y.dtype, dtype, label)
        leaves = (*names, "ln_weight", "ln_bias") if normed else names
        actual = torch.autograd.grad(
            y, [case.torch[n] for n in leaves], case.torch["grad"].detach()
        )
        case.check(label, leaves, actual, want)


@runs_on("gpu_ranks", deadline=240)
def test_norm_before_the_block(comm: Any) -> None:
    """The gradient by x is that of the norm and that of the residual together."""
    names = "x", "ln_weight", "ln_bias"
    for (rows, width), dtype in CASES:
        case = Case(comm, rows, width, dtype, wide=width == 1000)
        x, grad, added = (case.numpy[n] for n in ("x", "grad", "added"))
        norm, want = Norm(case.numpy), dict[str, Array]()
        y, same = norm_and_input(case.torch["x"], case.norm(True))
        near(y, norm.forward(x[None])[0], case.what, *NEAR[dtype])
        alone = norm.backward(grad[None], want)[0]
        for outputs, by_x in (((y, same), alone + added), ((y,), alone)):
            want["x"] = by_x
            grads = [case.torch[n].detach() for n in ("grad", "added")][: len(outputs)]
            leaves = [case.torch[n] for n in names]
            actual = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
            case.check(case.what, names, actual, want)


@runs_on("gpu_ranks")
def test_masks(comm: Any) -> None:
    """One mask per seed, the same on every rank and in the backward, with the right share."""
    rows, width, rate = 512, 1000, 0.1
    mask, other = (seen_mask(comm, rows, width, rate, seed) for seed in (1, 2))
    assert_equal(
        np.array_equal(mask, seen_mask(comm, rows, width, rate, 1)), True, "the same seed again"
    )
    ranks = comm.exchange([int.from_bytes(np.packbits(mask[i])[:7].tobytes()) for i in range(8)])
    assert_equal(len({tuple(row) for row in ranks}), 1, "masks over the ranks")
    for label, dropped, size in (
        ("all", 1 - mask.mean(), mask.size),
        ("rows", 1 - mask.mean(1), width),
        ("columns", 1 - mask.mean(0), rows),
    ):
        far = float(np.abs(dropped - rate).max())
        assert_equal(far < 6 * np.sqrt(rate * (1 - rate) / size), True, f"{label}: {far} off")
    by_chance = rate**2 + (1 - rate) ** 2
    pairs = {"two seeds": (mask, other), "two columns": (mask[:, 1:], mask[:, :-1])}
    pairs["two rows"] = (mask[1:], mask[:-1])
    for label, (one, two) in pairs.items():
        assert_equal(abs((one == two).mean() - by_chance) < 0.005, True, label)
    bias = torch.zeros(width, device=comm.device, requires_grad=True)
    torch.manual_seed(1)
    y = residual_norm(torch.ones(rows, width).to(bias), bias, Dropout(rate), None, NO_NORM)
    (by_bias,) = torch.autograd.grad(y.sum(), bias)
    near(by_bias, mask.sum(0) / (1 - rate), "gradient by the bias alone", 1e-5, 1e-5)


@runs_on("gpu_ranks")
def test_replays_draw_masks(comm: Any) -> None:
    """A replay draws the mask that the eager call draws, and another one each time."""
    x = torch.ones(64, 96, dtype=torch.bfloat16, device=comm.device, requires_grad=True)
    case = Case(comm, 64, 96, torch.bfloat16, wide=False)
    residual, grad, *norm = (
        case.torch[name].detach() for name in ("residual", "grad", "ln_weight", "ln_bias")
    )

    def body(x: torch.Tensor) -> torch.Tensor:
        return residual_norm(x, None, Dropout(0.5), residual, LayerNorm(False, *norm, 1e-5))

    def both(call: Any) -> list[torch.Tensor]:
        y = call(x)
        return [y.detach().clone(), *torch.autograd.grad(y, x, grad)]

    torch.manual_seed(5)
    want = [both(body) for _ in range(4)]
    fast = graph.capture(body)
    torch.manual_seed(5)
    for number, expected in enumerate(want):
        for one, two in zip(both(fast), expected, strict=True):
            assert_bits_equal(one, two, f"call {number}")
    assert_equal(torch.equal(want[2][0], want[3][0]), False, "masks of two calls")


@runs_on("gpu_ranks")
def test_what_the_kernels_do_not_support(comm: Any) -> None:
    """Other dtypes and wider rows are left to torch; a gradient of the gradient is an error."""
    x = torch.ones(2, 40, device=comm.device, requires_grad=True)
    assert_equal(has_kernels(x, None, x.bfloat16()), True, "two dtypes")
    for label, tensors in {
        "float64": (x, x.double()),
        "empty rows": (x[:, :0],),
        "no rows": (x[:0],),
        "wide rows": (x.new_ones(1, 2**15 + 1),),
        "on a CPU": (x.cpu(),),
    }.items():
        assert_equal(has_kernels(*tensors), False, label)

    def transformed(factor: torch.Tensor) -> torch.Tensor:
        assert_equal(has_kernels(x), False, "inside a transform")
        return factor * fused_feedforward(x[None], weight, weight, ring_id=NO_RING).sum()

    weight = torch.eye(40, device=comm.device).requires_grad_()
    torch.func.grad(transformed)(torch.ones((), device=comm.device))
    strided = x.detach().expand(3, 2, 40).transpose(0, 1).requires_grad_()
    y = residual_norm(strided, None, KEEPS_ALL, None, NO_NORM)
    assert_bits_equal(y, torch.ones_like(y), "strided")
    (by_x,) = torch.autograd.grad(y.sum(), strided)
    assert_bits_equal(by_x, torch.ones_like(by_x), "gradient of a sum, which is expanded")
    y = residual_norm(x, None, Dropout(0.5), x, LayerNorm(False, None, None, 1e-5))
    (by_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with raises(ArgumentError, "the gradient of residual_norm has no gradient"):
        by_x.sum().backward()
