"""Captured functions against eager ones, bit for bit: operators, views, autocast, gradients."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.ranks import Ranks


def alike(program: Callable[[Callable[..., Any]], list[Any]], what: str) -> None:
    """Raise unless a program gives the same with captured functions as with eager ones.

    ``program`` makes all that it uses, and hands its functions to what it is given.
    """
    wanted = program(lambda fn, **options: fn)
    actual = program(graph.capture)
    for i, (one, want) in enumerate(zip(actual, wanted, strict=True)):
        if isinstance(want, torch.Tensor):
            assert_bits_equal(one, want, f"{what}: number {i}")
        else:
            assert_equal(one, want, f"{what}: number {i}")


# -- what operators write without saying so --------------------------------------------------------


def batch_norms(comm: Any) -> None:
    """Running statistics count each call once, in training, in evaluation, for every shape."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        norm = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)).to(comm.device)
        step, results = captured(norm), []
        for turn in range(6):
            norm.train(turn != 4)
            x = torch.randn(4 + turn % 2, 3).to(comm.device).requires_grad_(turn % 3 == 0)
            with torch.set_grad_enabled(turn != 5):
                y = step(x)
                results.append(y.detach().clone())
            if y.requires_grad:
                y.square().sum().backward()
            results += [part.clone() for part in norm.buffers()]
        return results + [part.grad for part in norm.parameters()]

    alike(program, "batch norms")


# -- views -----------------------------------------------------------------------------------------


def views(comm: Any) -> None:
    """A view of an argument is one of this call's, wherever it is; other types are copies."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        base = torch.arange(48.0, device=comm.device)
        table = base.view(6, 8)
        tail, left, turned = (
            captured(fn) for fn in (lambda x: x[1:], lambda x: x[:, :2], lambda x: (x.t(), x + 1))
        )
        results = []
        for start in (0, 3, 9):
            results.append(tail(base[start : start + 4]).clone())
            results.append(left(table[:, start % 2 :: 2]).clone())
            results += [part.clone() for part in turned(table[start % 5 : start % 5 + 2])]
        view = tail(base[5:9])
        view += 100  # reaches the argument
        ints, conjugate, real = (
            captured(fn)
            for fn in (lambda x: x.view(torch.int32), lambda x: x.conj(), lambda x: x.real)
        )
        z = torch.tensor([1 + 2j, 3 - 1j], device=comm.device)
        results += [ints(base[:3]).clone(), conjugate(z).resolve_conj().clone(), real(z).clone()]
        return [*results, base]

    alike(program, "views")


class Reverse(torch.autograd.Function):
    """The identity forward, and the other sign back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


def gradients_of_views(comm: Any) -> None:
    """A view has the gradient that it has eagerly: none if detached, and not that of its place."""

    reverse: Any = Reverse.apply

    def program(captured: Callable[..., Any]) -> list[Any]:
        fns = (
            lambda x: (x.detach(), x * 2),
            lambda x: (reverse(x), x * 1),
            lambda x: (x[1:].unsqueeze(0), x * 3),
            lambda x: (x.expand(2, 3), x.exp()),
            lambda x: (x.unfold(0, 2, 1), x * x),
            lambda x: ((x * x).conj(), x * 1),
        )
        results = []
        for fn in fns:
            call = captured(fn)
            for turn in range(3):
                x = torch.linspace(turn, turn + 1, 3, device=comm.device).requires_grad_()
                one, other = call(x)
                (one.sum() * 2 + (other * other).sum()).backward()
                results += [one.requires_grad, one.detach().clone(), x.grad]
        return results

    alike(program, "gradients of views")


def views_of_results(comm: Any) -> None:
    """Views of a tensor that is returned too share its memory, with and without gradients."""

    def several(x: torch.Tensor) -> Any:
        y = x * 2
        return y[1:], y, y.t(), {"all": y.view(-1)}

    for options in ({}, {"outputs": "copy"}):

        def program(captured: Callable[..., Any], options: Any = options) -> list[Any]:
            call, results = captured(several, **options), []
            for turn in range(4):
                x = torch.full((2, 3), float(turn + 1), device=comm.device)
                with torch.no_grad():
                    tail, full, turned, rest = call(x)
                    full[1, 2] = -1
                    tail[0, 0] = -2
                    rest["all"][0] = -3
                results += [part.clone() for part in (tail, full, turned, rest["all"])]
                x.requires_grad_()
                tail, full, turned, rest = call(x)
                (tail.sin().sum() + full.square().sum() + turned[1].sum() * 3).backward()
                results += [x.grad, tail.detach().clone()]
            return results

        alike(program, f"views of results, {options}")


class Marked(torch.Tensor):
    """A tensor with another type."""


def other_views_of_results(comm: Any) -> None:
    """Detached ones share memory; tensors with gaps, and other types, are what they are."""

    def detached(x: torch.Tensor) -> Any:
        y = x * 2
        return y.detach()[1:], y, y.detach(), y.t()

    def with_gaps(x: torch.Tensor) -> Any:
        y = torch.zeros(10, device=x.device).copy_(x)
        return y[::3][:2].unsqueeze(1).expand(2, 2), y[1:3], y[::2], y[2:6:2]

    def marked(x: torch.Tensor) -> Any:
        y = x * 2
        return y, y[0].as_subclass(Marked)

    def program(captured: Callable[..., Any]) -> list[Any]:
        results: list[Any] = []
        for options in ({}, {"outputs": "copy"}):
            calls = [captured(fn, **options) for fn in (detached, with_gaps, marked)]
            for turn in range(4):
                x = torch.full((2, 2), float(turn + 1), device=comm.device).requires_grad_()
                tail, full, same, turned = calls[0](x)
                tail[0, 0] = -1
                results += [part.detach().clone() for part in (full, same, turned)]
                results += [part.requires_grad for part in (tail, full, same, turned)]
                parts = calls[1](torch.arange(10.0, device=comm.device) + turn)
                results += [part.clone() for part in parts]
        results += [type(part).__name__ for part in captured(marked, outputs="copy")(x.detach())]
        return results

    alike(program, "other views of results")


def same_twice(comm: Any) -> None:
    """What is returned twice is one tensor."""

    @graph.capture
    def call(x: torch.Tensor) -> Any:
        y = x + 1
        return y, y.t(), y

    for turn in range(3):
        one, _, other = call(torch.full((2, 2), float(turn), device=comm.device))
        assert_equal(one is other, True, "identity")
        one.mul_(5)
        assert_bits_equal(other, torch.full((2, 2), 5.0 * (turn + 1)), "written through the other")


# -- autocast --------------------------------------------------------------------------------------


class Times(torch.autograd.Function):
    """x @ weight, with a backward that autocast would see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight, None


def autocast(comm: Any) -> None:
    """The caller's autocast is over when operators are replayed, and in a backward after it."""
    kind = comm.device.type

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(2)
        weight = torch.randn(8, 8).to(comm.device).requires_grad_()
        plain = weight.detach().clone()

        def outside(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(kind, enabled=False):
                return x @ plain

        def twice(x: torch.Tensor) -> torch.Tensor:  # one cast of the weight, used twice
            return torch.nn.functional.gelu(x @ weight) @ weight

        results = []
        times: Any = Times.apply

        for fn in (outside, twice, lambda x: times(x, plain)):
            call = captured(fn)
            for _ in range(3):
                x = torch.randn(4, 8).to(comm.device).requires_grad_()
                with torch.autocast(kind, dtype=torch.bfloat16):
                    y = call(x)
                (y.float() * torch.linspace(0, 1, 8, device=comm.device)).sum().backward()
                results += [y.detach().clone(), x.grad]
            with torch.autocast(kind, dtype=torch.bfloat16):  # also after the forward
                x = torch.randn(4, 8).to(comm.device).requires_grad_()
                (call(x).float() * torch.linspace(0, 1, 8, device=comm.device)).sum().backward()
            results.append(x.grad)
            results.append(None if weight.grad is None else weight.grad.clone())
        return results

    alike(program, "autocast")


# -- gradients -------------------------------------------------------------------------------------


def hooks(comm: Any) -> None:
    """Hooks of leaves run once a backward, with what they make of the gradient."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        weight = torch.ones(2, device=comm.device, requires_grad=True)
        runs: list[int] = []

        def double(grad: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return grad * 2

        weight.register_hook(double)
        call = captured(lambda x: weight * x)
        for turn in range(3):
            call(torch.full((2,), turn + 1.0, device=comm.device)).sum().backward()
        return [weight.grad, len(runs)]

    alike(program, "hooks")


def some_outputs(comm: Any) -> None:
    """Where only some outputs go back, the others give nothing: no zeros, and no NaN from them."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        one, two = (nn.Linear(3, 3).to(comm.device) for _ in range(2))
        weights = [*one.parameters(), *two.parameters()]

        def step(x: torch.Tensor) -> Any:
            h = one(x).tanh()
            return h.exp(), two(h), (h * 0).sqrt(), torch.dropout(h, 0.5, True)

        call, optimizer = captured(step), torch.optim.SGD(weights, 0.1, momentum=0.9)
        ways = [(0,), (1,), (0, 1), (1,), (0,), (3,), (0, 1)]
        results: list[Any] = []
        for way in ways:
            x = torch.randn(2, 3).to(comm.device).requires_grad_()
            outs = call(x)
            optimizer.zero_grad()
            torch.stack([outs[i].sum() for i in way]).sum().backward()
            if way != (3,):  # the mask is drawn otherwise on a GPU
                results += [x.grad, *(weight.grad for weight in weights)]
            results = [None if part is None else part.clone() for part in results]
            optimizer.step() if way != (3,) else None
        return results

    alike(program, "some outputs")


def unfrozen(comm: Any) -> None:
    """Parameters that want a gradient at one call and not at another."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(4)
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(comm.device)
        call, results = captured(module), []
        for turn in range(4):
            module[0].requires_grad_(turn % 2 == 1)
            call(torch.full((1, 2), turn + 1.0, device=comm.device)).sum().backward()
            grads = [weight.grad for weight in module.parameters()]
            results += [None if grad is None else grad.clone() for grad in grads]
        return results

    alike(program, "frozen and not")


def tied(comm: Any) -> None:
    """What is computed outside and wants a gradient is refused however it is read."""
    weight = torch.ones(2, device=comm.device, requires_grad=True)
    other = torch.ones(2, device=comm.device, requires_grad=True)
    x, outside = torch.ones(2, device=comm.device), torch.zeros(2, device=comm.device)
    computed = weight * 2
    plain = computed.detach()
    for fn in (lambda x: plain * x + computed * x * other, lambda x: plain * x + computed * x):
        with raises(GraphError, "tensor that requires grad", "detach"):
            graph.capture(fn)(x)
    part = torch.zeros(2, 2, device=comm.device)[0]
    for target in (outside, part):
        with raises(GraphError, "writes a value that requires grad", "detach"):
            graph.capture(lambda x, target=target: target.copy_(x * weight))(x)
        assert_equal(target.tolist(), [0.0, 0.0], "as before")
    assert_equal(outside.requires_grad, False, "no part of the graph")


def written_between(comm: Any) -> None:
    """What a backward needs and somebody has written to since is refused, as in eager code."""
    x = torch.ones(2, device=comm.device, requires_grad=True)
    weight = torch.ones(2, device=comm.device, requires_grad=True)
    shift = torch.ones(2, device=comm.device, requires_grad=True)
    times, plus, power = (
        graph.capture(fn) for fn in (lambda x: x * weight, lambda x: x + shift, lambda x: x.exp())
    )
    x.grad = torch.zeros(2, device=comm.device)
    for call in (times, plus, power):
        call(x)
    for turn in range(3):
        y, z, w = times(x), plus(x), power(x)
        with torch.no_grad():
            weight.add_(1)
            shift.add_(1)  # a sum needs nothing
            w.zero_()
        for out in (y, w):
            with raises(GraphError, "modified in place"):
                out.sum().backward()
        z.sum().backward()
        assert_bits_equal(x.grad, torch.full((2,), turn + 1.0), f"turn {turn}")
    times(x).sum().backward()
    assert_bits_equal(x.grad, torch.full((2,), 7.0), "the next call")


def written_in_passing(comm: Any) -> None:
    """Also where nobody holds what was written to; what a hook reads is as it is then."""
    weight = torch.ones(4, device=comm.device, requires_grad=True)
    power = graph.capture(lambda x: torch.sigmoid(x * weight))
    power(torch.ones(4, device=comm.device))
    for _ in range(3):  # two that are verified, and one that is not
        with raises(GraphError, "modified in place"):
            power(torch.ones(4, device=comm.device)).mul_(3).sum().backward()

    def program(captured: Callable[..., Any]) -> list[Any]:
        scale = torch.ones((), device=comm.device)
        weight = torch.ones(3, device=comm.device, requires_grad=True)

        def scaled(x: torch.Tensor) -> torch.Tensor:
            y = x * weight
            y.register_hook(lambda grad: grad * scale)
            return y * 2

        call = captured(scaled)
        for _ in range(3):
            y = call(torch.ones(3, device=comm.device))
            scale.add_(1)
            y.sum().backward()
        return [weight.grad]

    alike(program, "a hook that reads")


def inference(comm: Any) -> None:
    """Outputs of inference mode have no versions."""
    for outputs in ("borrow", "copy"):
        call = graph.capture(lambda x: x * 2, outputs=outputs)
        with torch.inference_mode():
            for turn in range(3):
                x = torch.full((3,), float(turn), device=comm.device)
                assert_bits_equal(call(x), x * 2, f"turn {turn}, {outputs}")


def freed(comm: Any) -> None:
    """A captured function keeps no gradient of an argument alive."""
    x = torch.ones(3, device=comm.device, requires_grad=True)
    x.grad = torch.ones(3, device=comm.device)
    call = graph.capture(lambda x: x * 2)
    call(x).sum().backward()
    held = weakref.ref(x.grad)
    x.grad = None
    assert_equal(held(), None, "the gradient")


def own_grad(comm: Any) -> None:
    """Whether an argument has a gradient can be asked; its values would be another tensor's."""
    ask = graph.capture(lambda x: x * 2 if x.grad is None else x * 3)
    read = graph.capture(lambda x: x * 2 if x.grad is None else x * x.grad)
    x = torch.ones(2, device=comm.device, requires_grad=True)
    assert_bits_equal(ask(x), torch.full((2,), 2.0), "without")
    x.grad = torch.ones(2, device=comm.device)
    assert_bits_equal(ask(x), torch.full((2,), 3.0), "with")
    with raises(GraphError, "reads .grad of argument tensor 0"):
        read(x)


def attention(comm: Any) -> None:
    """An operator that asks whether two of its tensors are one finds the same in a replay."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        module = nn.MultiheadAttention(4, 2, batch_first=True).to(comm.device).eval()
        step, results = captured(lambda x: module(x, x, x)), []
        with torch.no_grad():
            for _ in range(4):
                results += [part.clone() for part in step(torch.randn(2, 3, 4).to(comm.device))]
        return results

    alike(program, "attention")


CASES = (
    attention,
    batch_norms,
    views,
    gradients_of_views,
    views_of_results,
    other_views_of_results,
    same_twice,
    autocast,
    hooks,
    some_outputs,
    unfrozen,
    tied,
    written_between,
    written_in_passing,
    inference,
    freed,
    own_grad,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values(unified_ranks: Ranks, case: Callable[[Any], None]) -> None:
    unified_ranks(case)
