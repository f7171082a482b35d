"""Transforms of torch.func over collectives: eager values and gradients, or a refusal by name."""

from typing import Any

import torch
from torch.autograd import forward_ad

from commlib import ops
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.modes import UNARY, Body, composite, given
from tests.support.operator import calls
from tests.support.runs_on import runs_on

DIFFERENTIABLE = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "concat",
    "identity",
    "reduce_scatter",
    "split",
)


@runs_on("ranks")
def test_gradients_of_transforms(comm: Any) -> None:
    """torch.func has the gradients of backward(), of the second order too."""
    x = given(comm)

    def loss(call: Body) -> Body:
        return lambda t: (call(t * t) ** 2).sum()

    bodies = {name: UNARY[name] for name in DIFFERENTIABLE}
    bodies["softmax"] = composite(comm)["softmax"]
    for name, call in bodies.items():
        leaf = x.clone().requires_grad_()
        (want,) = torch.autograd.grad(loss(call)(leaf), leaf)
        assert_bits_equal(torch.func.grad(loss(call))(x), want, f"grad of {name}")
        value, back = torch.func.vjp(loss(call), x)
        assert_bits_equal(back(torch.ones_like(value))[0], want, f"vjp of {name}")
    for name in DIFFERENTIABLE:
        if name == "broadcast":  # its gradient, a reduce, has none
            continue
        leaf = x.clone().requires_grad_()
        (once,) = torch.autograd.grad(loss(UNARY[name])(leaf), leaf, create_graph=True)
        (want,) = torch.autograd.grad(once.sum(), leaf)
        first = torch.func.grad(loss(UNARY[name]))
        assert_bits_equal(
            torch.func.grad(lambda t: first(t).sum())(x),  # noqa: B023
            want,
            f"second order of {name}",
        )


@runs_on("ranks")
def test_vmap(comm: Any) -> None:
    """Vmap: one call for the whole batch, with the values of a call per element."""
    stack = torch.stack([given(comm) + i for i in range(3)])
    for name in (*DIFFERENTIABLE, "gather", "reduce", "scatter"):
        call = UNARY[name]
        want = torch.stack([call(x) for x in stack])
        for dim in (0, 1, 2):
            moved, before = stack.movedim(0, dim), calls(comm)
            assert_bits_equal(torch.vmap(call, in_dims=dim)(moved), want, f"{name}, batch at {dim}")
            assert_equal(calls(comm) - before <= 1, True, f"{name}: calls for a batch")
    for name in DIFFERENTIABLE:
        call = UNARY[name]
        leaf = stack.clone().requires_grad_()
        torch.stack([(call(x) ** 2).sum() for x in leaf]).sum().backward()
        single = torch.func.grad(lambda t: (call(t) ** 2).sum())  # noqa: B023
        assert_bits_equal(torch.vmap(single)(stack), leaf.grad, f"vmap of grad of {name}")
        grad_fn = torch.func.grad(lambda t: (torch.vmap(call)(t) ** 2).sum())  # noqa: B023
        assert_bits_equal(grad_fn(stack), leaf.grad, f"grad of vmap of {name}")


@runs_on("ranks")
def test_forward_over_reverse(comm: Any) -> None:
    """A tangent that reaches a collective through an inner transform is refused too."""
    x = given(comm)
    ones, losses = torch.ones_like(x), composite(comm)
    bodies = {name: UNARY[name] for name in DIFFERENTIABLE} | {"softmax": losses["softmax"]}
    for call in bodies.values():

        def loss(t: torch.Tensor, call: Body = call) -> torch.Tensor:
            total: torch.Tensor = (call(t * t) ** 2).sum()
            return total

        first = torch.func.grad(loss)
        for transform in (
            lambda: torch.func.hessian(loss)(x),
            lambda: torch.func.jacfwd(first)(x),  # noqa: B023
            lambda: torch.func.jvp(first, (x,), (ones,)),  # noqa: B023
        ):
            before = calls(comm)
            with raises(ArgumentError, "no forward-mode derivative", "torch.func.vjp"):
                transform()
            assert_equal(calls(comm), before, "calls of a refused transform")


@runs_on("ranks")
def test_refused_transforms(comm: Any) -> None:
    """What has no rule is refused before a launch, never dropped or run per element."""
    x, before = given(comm), calls(comm)
    ones = torch.ones_like(x)
    for name in DIFFERENTIABLE:
        for call in (torch.func.jvp, lambda f, a, b: torch.func.jacfwd(f)(*a)):
            with raises(ArgumentError, "no forward-mode derivative", "torch.func.vjp"):
                call(UNARY[name], (x,), (ones,))
        with forward_ad.dual_level(), raises(ArgumentError, "no forward-mode derivative"):
            UNARY[name](forward_ad.make_dual(x, ones))
    peer = 1 - comm.rank
    for body in (lambda t: ops.send(t, peer=peer), lambda t: ops.recv(t, peer=peer)):
        with raises(ArgumentError, "under torch.vmap", "whole batch"):
            torch.vmap(body)(x)
    with raises(ArgumentError, "all_gather under torch.vmap with 0-D x"):
        torch.vmap(ops.all_gather)(x[0])
    with raises(ArgumentError, "with a symbolic Tensor", "commlib.ops.all_reduce"):
        torch.vmap(lambda t: comm.all_reduce(t, t))(x)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    with forward_ad.dual_level():
        assert_bits_equal(ops.all_reduce(x), ops.all_reduce(x.clone()), "without a tangent")
