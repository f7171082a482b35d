"""Captured forwards and their backwards: what comes back, and when a slot is free again."""

import gc
import threading
import warnings
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.replaying.slot import Slot
from commlib.graph.replaying.slots import Slots
from tests.support.checks import assert_bits_equal, assert_equal, raises, until
from tests.support.runs_on import runs_on


def layers(device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(3)
    parts = (torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2), torch.nn.Linear(2, 2))
    for parameter in parts[3].parameters():
        parameter.requires_grad_(False)
    return torch.nn.Sequential(*parts).to(device)


def batch(turn: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, turn + 1, 12, device=device).view(3, 4)


def slots(g: graph.CapturedFunction) -> list[Slot]:
    (entry,) = g.entries.values()
    assert isinstance(entry, Slots)
    return entry.slots


@runs_on("unified_ranks")
def test_a_training_loop_has_one_slot(comm: Any) -> None:
    """A loop that holds its losses takes one slot: a backward has freed it for the next call."""
    module = layers(comm.device)
    g, losses = graph.capture(module), []
    g(batch(0, comm.device))
    for turn in range(4):
        loss = g(batch(turn, comm.device)).sum()
        loss.backward()
        losses.append(loss)
    assert_equal(len(slots(g)), 1, "slots")
    for turn, loss in enumerate(losses):
        assert_bits_equal(loss, module(batch(turn, comm.device)).sum(), f"loss {turn}")
        with raises(GraphError, "second backward", "retain_graph=True"):
            loss.backward()


@runs_on("unified_ranks")
def test_backwards_that_may_come_again(comm: Any) -> None:
    """A slot waits while another backward may come: asked for by torch's means, or the way left."""
    one, two = (torch.ones(3, device=comm.device, requires_grad=True) for _ in range(2))
    x = torch.arange(3.0, device=comm.device)
    g = graph.capture(lambda x: (x * one, x * two))
    g(x)

    def retained() -> None:
        loss = sum(part.sum() for part in g(x))
        loss.backward(retain_graph=True)
        assert_equal([slot.free for slot in slots(g)], [False], "free")
        loss.backward()

    def output_by_output() -> None:
        first, second = g(x)
        first.sum().backward(torch.tensor(2.0, device=comm.device))
        assert_equal([slot.free for slot in slots(g)], [False], "free")
        second.sum().backward(torch.tensor(2.0, device=comm.device))

    def leaf_by_leaf() -> None:
        loss = sum(part.sum() for part in g(x))
        for weight in (one, two):
            loss.backward(inputs=[weight])
            loss.backward(inputs=[weight])

    def handed_over() -> None:
        loss = sum(part.sum() for part in g(x))
        for weight in (one, two):
            (grad,) = torch.autograd.grad(loss, weight)
            assert weight.grad is not None
            weight.grad.add_(grad, alpha=2)
        assert_equal([slot.free for slot in slots(g)], [False], "free")

    for number, way in enumerate((retained, output_by_output, leaf_by_leaf, handed_over)):
        for turn in range(2):
            way()
            for weight in (one, two):
                want = x * (4 * number + 2 * turn + 2)
                assert_bits_equal(weight.grad, want, f"{way.__name__}, {turn}")
            assert_equal(len(slots(g)), 1, "slots")


@runs_on("unified_ranks")
def test_gradients_that_are_handed_over(comm: Any) -> None:
    """Gradients of all that a function has, asked for by autograd.grad, free the slot too."""
    module = layers(comm.device)
    wanted = [parameter for parameter in module.parameters() if parameter.requires_grad]
    g, losses = graph.capture(module), []
    for turn in range(4):
        losses.append(g(batch(turn, comm.device)).sum())
        want = torch.autograd.grad(module(batch(turn, comm.device)).sum(), wanted)
        for grad, expected in zip(torch.autograd.grad(losses[-1], wanted), want, strict=True):
            assert_bits_equal(grad, expected, f"turn {turn}")
    assert_equal(len(slots(g)), 1, "slots")


@runs_on("unified_ranks")
def test_hooks_on_saved_tensors(comm: Any) -> None:
    """A first call in a checkpoint, or where saved tensors move, captures as any other."""
    x = batch(2, comm.device).requires_grad_()

    def under_checkpoint(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        result: torch.Tensor = checkpoint(lambda x: call(x) * 2, x, use_reentrant=False)
        return result

    def with_offloading(call: Callable[..., torch.Tensor]) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            return call(x) * 2

    for way in (under_checkpoint, with_offloading):
        module = layers(comm.device)
        g = graph.capture(module)
        for turn in range(3):
            actual, want = (
                torch.autograd.grad(way(call).sum(), (x, next(module.parameters())))
                for call in (g, module)
            )
            for one, other in zip(actual, want, strict=True):
                assert_bits_equal(one, other, f"{way.__name__}, turn {turn}")
        assert_equal(len(slots(g)), 1, "slots")


@runs_on("unified_ranks")
def test_checkpoints_of_several_forwards(comm: Any) -> None:
    """Forward and second run save the same, whichever of them is a replay, verified or eager."""
    module = layers(comm.device)
    g, weight = graph.capture(module, outputs="copy"), next(module.parameters())
    for turn in range(6):  # 18 forwards and more: replays 1, 2 and 10 are verified
        inputs = [batch(turn + i, comm.device).requires_grad_() for i in range(3)]
        results = []
        for call in (g, module):
            outs = [checkpoint(call, x, use_reentrant=False) for x in inputs]
            grads = [
                torch.autograd.grad(out.square().sum(), (x, weight))
                for out, x in zip(outs, inputs, strict=True)
            ]
            results.append([*outs, *(grad for pair in grads for grad in pair)])
        for one, other in zip(*results, strict=True):
            assert_bits_equal(one, other, f"turn {turn}")


@runs_on("unified_ranks")
def test_writes_between_forward_and_backward_under_hooks(comm: Any) -> None:
    """A first call shows hooks on saved tensors nothing, and autograd still sees writes."""
    seen = count()
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    g = graph.capture(lambda x: (x * weight).sin(), outputs="copy")
    x = torch.ones(3, device=comm.device)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (x, next(seen)), lambda held: held[0]):
        out = g(x)
    assert_equal(next(seen), 0, "saved tensors that hooks saw")
    x.add_(1)
    with raises(RuntimeError, "modified by an inplace operation"):
        out.sum().backward()


@runs_on("unified_ranks")
@pytest.mark.parametrize("dims", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_gradients_in_another_order_of_memory(comm: Any, dims: tuple[int, ...]) -> None:
    """A gradient that is laid out otherwise than its output is added up as eager code does it."""
    weight, bias = (torch.ones(7, device=comm.device, requires_grad=True) for _ in range(2))

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x * weight + bias).permute(dims)

    g, draw = graph.capture(fn, verify=True), torch.Generator().manual_seed(1)
    for turn in range(8):
        x = torch.randn(9, 33, 7, generator=draw).to(comm.device)
        grads = []
        for call in (g, fn):
            out = call(x).contiguous() if turn % 2 else call(x)
            grads.append(torch.autograd.grad(out.exp().mean(), (weight, bias)))
        for one, other in zip(*grads, strict=True):
            assert_bits_equal(one, other, f"turn {turn}")
    (slot,) = slots(g)
    assert len(slot.forward._backwards) <= 2


def trained(call: Callable[..., torch.Tensor], module: torch.nn.Module) -> list[torch.Tensor]:
    """Return what some steps with sums of gradients lead to, and their outputs."""
    results = []
    for turn in range(6):
        x = batch(turn, next(module.parameters()).device).requires_grad_(turn == 3)
        out = call(x)
        results.append(out.detach().clone())
        (out**2).sum().backward()
        results += [x.grad] if x.grad is not None else []
        if turn % 2:
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
            module.zero_grad(set_to_none=turn == 3)
    return [*results, *module.parameters()]


@runs_on("unified_ranks")
def test_sums_of_gradients(comm: Any) -> None:
    """Gradients are added up, made and released with the bits of eager code."""
    module, plain = layers(comm.device), layers(comm.device)
    pairs = zip(trained(graph.capture(module), module), trained(plain, plain), strict=True)
    for number, (actual, want) in enumerate(pairs):
        assert_equal(torch.equal(actual, want), True, f"tensor {number}")


@runs_on("unified_ranks")
def test_a_backward_during_a_capture(comm: Any) -> None:
    """A backward in another thread is not part of what this one captures, and breaks nothing."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    x = torch.arange(3.0, device=comm.device)
    g = graph.capture(lambda x: x * weight)
    for _ in range(2):  # the second one comes from elsewhere, and is captured again
        g(x * 1).sum().backward()

    def train() -> None:
        aside = torch.cuda.Stream() if comm.device.type == "cuda" else None
        with torch.cuda.stream(aside):
            g(x * 1).sum().backward()
            if aside is not None:
                aside.synchronize()

    def f() -> torch.Tensor:
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
        return x + 1

    captured = graph.capture(f, outputs="copy", verify=False)
    for turn in range(3):
        assert_bits_equal(captured(), x + 1, f"turn {turn}")
    assert_bits_equal(weight.grad, x * 5, "after two runs and the capture")


class _Late(torch.autograd.Function):
    """The identity, with a backward that takes its time on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        if grad.is_cuda:
            torch.cuda._sleep(20_000_000)
        return grad * 1


def streams(device: torch.device) -> list[Any]:
    """Return contexts: the default stream, and its own one."""
    if device.type == "cpu":
        return [torch.enable_grad()]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    return [torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.stream(aside)]


@runs_on("unified_ranks")
def test_order_of_streams(comm: Any) -> None:
    """The caller's stream follows the gradients, and the backward after the caller's work."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    g = graph.capture(lambda x: _Late.apply(x * weight))  # type: ignore[no-untyped-call]
    x = torch.ones(3, device=comm.device)
    g(x).sum().backward()
    for stream in streams(comm.device):
        with stream:
            for turn in range(3):
                weight.grad = torch.zeros_like(weight)
                out = g(x)
                if comm.device.type == "cuda":
                    torch.cuda._sleep(5_000_000)
                out.backward(torch.full_like(out, turn + 1))
                grad = weight.grad.clone()
                weight.grad.fill_(-1)  # after the sum, so that it does not reach what was read
                assert_bits_equal(grad, x * (turn + 1), f"turn {turn}")
    if comm.device.type == "cuda":
        torch.cuda.synchronize()


@runs_on("unified_ranks")
def test_nothing_outlives_a_captured_function(comm: Any) -> None:
    """A captured function with gradients holds nothing of itself alive: no cycle through autograd.

    A node that outlives a failed capture belongs to another stream, and no capture can use it.
    """
    module = layers(comm.device)
    captured = graph.capture(module)
    captured(batch(0, comm.device)).sum().backward()
    (slot,) = slots(captured)
    held = weakref.ref(slot)
    del slot, captured
    gc.collect()
    assert_equal(held() is None, True, "the slot is gone")


@runs_on("unified_ranks")
def test_backwards_through_one_of_two_outputs(comm: Any) -> None:
    """A backward through the loss alone has its own graph; one through both has another."""

    def program(captured: Callable[..., Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        weight = torch.randn(16, 16).to(comm.device).requires_grad_()

        def model(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            heads = (x @ weight).view(2, 8, 2, 8).transpose(1, 2)
            y = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return y * 2, y.square().mean()

        call = captured(model)
        results: list[torch.Tensor] = []
        for both in (False, False, False, True, False, True):
            weight.grad = None
            y, loss = call(batch(len(results), comm.device).view(2, 8, 16))
            (loss + y.square().sum() if both else loss).backward()
            assert weight.grad is not None
            results += [y.detach().clone(), weight.grad]
        return results

    def batch(turn: int, device: torch.device) -> torch.Tensor:
        return torch.linspace(0, turn + 1.0, 256, device=device)

    for options in ({}, {"verify": False}):
        seen: list[Any] = []

        def captured(fn: Any, how: Any = options, seen: list[Any] = seen) -> Any:
            seen.append(graph.capture(fn, **how))
            return seen[0]

        pairs = zip(program(captured), program(lambda fn: fn), strict=True)
        for number, (one, want) in enumerate(pairs):
            assert_bits_equal(one, want, f"number {number}, {options}")
        (slot,) = slots(seen[0])
        assert_equal(len(slot._backwards), 2, "captured backwards")


def test_a_step_that_returns_what_its_backward_has_used() -> None:
    weight = torch.ones(3, requires_grad=True)

    @graph.capture
    def step(x: torch.Tensor) -> torch.Tensor:
        weight.grad = None
        loss = (weight * x).sum()
        loss.backward()
        return loss

    with raises(GraphError, "an output leads back through a backward", "return loss.detach()"):
        for _ in range(2):
            step(torch.ones(3))


@pytest.mark.parametrize("verify", [True, False])
@runs_on("unified_ranks")
def test_second_derivatives(comm: Any, verify: bool) -> None:
    """They raise a GraphError; first ones are right with create_graph=True."""
    module = layers(comm.device)
    weight, g = next(module.parameters()), graph.capture(module, verify=verify)
    for turn in range(3):
        x = batch(turn, comm.device).requires_grad_()
        (want,) = torch.autograd.grad(module(x).sum(), x)
        (grad,) = torch.autograd.grad(g(x).sum(), x, create_graph=True)
        assert_bits_equal(grad.detach(), want, f"turn {turn}")
        if not turn:  # the first call is eager
            continue
        with raises(GraphError, "no second derivatives"):
            grad.square().sum().backward(retain_graph=True)
        for by in (x, weight):  # of which torch would report None
            with raises(GraphError, "no second derivatives"):
                torch.autograd.grad(grad.square().sum(), by, retain_graph=True, allow_unused=True)


@pytest.mark.parametrize("leaf", [True, False])
@runs_on("unified_ranks")
def test_products_with_second_derivatives(comm: Any, leaf: bool) -> None:
    """Those of torch.autograd.functional raise instead of returning zeros."""
    functional: Any = torch.autograd.functional
    x, v = torch.arange(1.0, 3, device=comm.device), torch.ones(2, device=comm.device)
    programs: dict[str, Callable[[Any], Any]] = {
        "hvp": lambda f: functional.hvp(f, x, v)[1],
        "vhp": lambda f: functional.vhp(f, x, v)[1],
        "hessian": lambda f: functional.hessian(f, x),
        "jvp": lambda f: functional.jvp(f, x, v)[1],
    }

    def found(name: str, call: Callable[..., torch.Tensor]) -> torch.Tensor:
        product: torch.Tensor = programs[name](call if leaf else lambda x: call(x * 1))
        return product

    for name in programs:
        g = graph.capture(lambda x: x.pow(3).sum())
        want = found(name, lambda x: x.pow(3).sum())
        assert_bits_equal(found(name, g), want, f"the first call, which is eager: {name}")
        for _ in range(2):
            with raises(GraphError, "no second derivatives"):
                found(name, g)


@runs_on("unified_ranks")
def test_gradients_of_parameters_with_create_graph(comm: Any) -> None:
    """They have their history in .grad, as in eager code; without it their slot is free again."""
    module, same = layers(comm.device), layers(comm.device)
    weights, g = [*module.parameters()][:4], graph.capture(module)

    def go_back(call: Callable[..., Any], x: torch.Tensor) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of the cycle that .grad is part of
            call(x).square().sum().backward(create_graph=True)

    def freed() -> bool:
        gc.collect()  # a caught error refers to the frames that it came through
        return all(slot.free for slot in slots(g))

    def release() -> None:
        """Break the cycle; on a GPU, autograd's thread holds the error for a moment longer."""
        module.zero_grad()
        until(freed, "no cycle holds a node")

    for turn in range(4):
        if turn:
            release()
        same.zero_grad()
        go_back(g, batch(turn, comm.device))
        go_back(same, batch(turn, comm.device))
        for weight, other in zip(weights, same.parameters(), strict=False):
            assert weight.grad is not None and other.grad is not None
            assert_bits_equal(weight.grad.detach(), other.grad.detach(), f"turn {turn}")
            if turn:  # the first call is eager
                with raises(GraphError, "no second derivatives"):
                    torch.autograd.grad(weight.grad.sum(), weights[0], allow_unused=True)
    release()
    assert_equal(len(slots(g)), 1, "slots")


@pytest.mark.parametrize("verify", [True, False])
@runs_on("unified_ranks")
def test_derivatives_inside(comm: Any, verify: bool) -> None:
    """Derivatives of torch.func, whose zeros have no memory, are captured in the function."""
    programs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "hessian": torch.func.hessian(lambda x: (x**3).sum()),
        "hessian of a linear function": torch.func.hessian(lambda x: (x * 3).sum()),
        "jacfwd": torch.func.jacfwd(lambda x: x**2),
        "zeros": lambda x: torch._efficientzerotensor((2,), device=x.device),
    }
    for name, fn in programs.items():
        g = graph.capture(fn, verify=verify)
        for turn in range(4):
            x = torch.full((2,), float(turn), device=comm.device)
            assert_bits_equal(g(x), fn(x).clone(), f"{name}, turn {turn}")
        assert_equal(len(g.entries), 1, "graphs")
