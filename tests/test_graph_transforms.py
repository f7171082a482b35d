"""Transforms of torch.func, and forward-mode autograd, around captured functions."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises
from tests.support.runs_on import runs_on


def cubes(x: torch.Tensor) -> torch.Tensor:
    return x.pow(3)


def with_dual_numbers(f: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(f(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        assert isinstance(tangent, torch.Tensor)
        return tangent.clone()


AROUND: dict[str, Callable[[Callable[..., Any], torch.Tensor], torch.Tensor]] = {
    "vmap": lambda f, x: torch.func.vmap(f)(x),
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](x)[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,))[1],
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).sum())(x),
    "linearize": lambda f, x: torch.func.linearize(f, x)[1](x),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
    "dual numbers": with_dual_numbers,
}


@runs_on("unified_ranks")
def test_transforms_around_a_captured_function(comm: Any) -> None:
    """They raise before the first capture and after it, and plain calls are replayed as before."""
    x = torch.arange(6.0, device=comm.device).view(3, 2)
    for name, around in AROUND.items():
        g = graph.capture(cubes)
        with raises(GraphError, "inside a transform", "capture the transformed function"):
            around(g, x)
        rows = x[0].clone()  # of the shape that vmap calls with
        for argument in (x, x, x, rows, rows, rows):
            assert_bits_equal(g(argument), cubes(argument), name)
        for argument in (x, rows.view(1, 2)):
            with raises(GraphError, "inside a transform", "capture the transformed function"):
                around(g, argument)
        assert_bits_equal(g(x), cubes(x), f"after {name}")


@runs_on("unified_ranks")
def test_eager_calls_in_transforms(comm: Any) -> None:
    """With on_fail="eager" they are right, and plain calls of that shape are still captured."""
    x = torch.arange(6.0, device=comm.device).view(3, 2)
    for name, around in AROUND.items():
        g, want = graph.capture(cubes, on_fail="eager"), around(cubes, x).clone()
        for turn in range(2):
            assert_bits_equal(around(g, x), want, f"{name}, turn {turn}")
            for argument in (x, x[0].clone()) * 2:
                assert_bits_equal(g(argument), cubes(argument), f"after {name}")
        assert_equal((len(g.entries), len(g.eager)), (2, 0), f"graphs, eager calls after {name}")


@runs_on("unified_ranks")
def test_transforms_around_a_backward(comm: Any) -> None:
    """A graph takes one plain gradient; batched ones and dual numbers raise.

    On a GPU torch's engine looks for the memory of a gradient of ``vmap`` before it runs any node,
    and finds none.
    """
    x = torch.arange(2.0, device=comm.device).requires_grad_()
    rows = torch.eye(2, device=comm.device)

    def back(y: torch.Tensor, v: torch.Tensor, **options: bool) -> torch.Tensor:
        return torch.autograd.grad(y, x, v, retain_graph=True, **options)[0]

    def dual(y: torch.Tensor) -> torch.Tensor:
        with forward_ad.dual_level():
            return back(y, forward_ad.make_dual(rows[0], rows[1]))

    g = graph.capture(cubes)
    for _ in range(2):
        g(x).sum().backward()
    programs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "vmap": lambda y: torch.func.vmap(lambda v: back(y, v))(rows),
        "is_grads_batched": lambda y: back(y, rows, is_grads_batched=True),
        "dual numbers": dual,
    }
    ours = (GraphError, "the backward of a captured call", "one gradient after the other")
    for name, program in programs.items():
        y = g(x)
        by_torch = (NotImplementedError, "BatchedTensorImpl")
        with raises(*(by_torch if name == "vmap" and on_gpu(comm) else ours)):
            program(y)
        assert_bits_equal(back(y, rows[1]), back(cubes(x), rows[1]), "a plain gradient after it")
