"""Captured forwards and their backwards: when a slot is free again, and who adds up gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from tests._check import close, refused, same
from tests._ranks import Ranks

GRADS = ("fresh", "accumulate")


def twice_wide(device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(3)
    layers = (torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2), torch.nn.Linear(2, 2))
    module = torch.nn.Sequential(*layers).to(device)
    for parameter in layers[3].parameters():
        parameter.requires_grad_(False)
    return module


def batch(turn: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, turn + 1, 12, device=device).view(3, 4)


def loop(comm: Any) -> None:
    """A loop that still holds the last outputs takes one slot: its backward has freed it."""
    module = twice_wide(comm.device)
    g = graph.capture(module)
    for turn in range(4):
        out = g(batch(turn, comm.device))
        out.sum().backward()
    (slots,) = g.entries.values()
    same(len(slots.parts), 1, "slots")
    with refused(GraphError, "second backward", "retain_graph=True"):
        out.sum().backward()
    loss = g(batch(1, comm.device)).sum()
    loss.backward(retain_graph=True)
    (weight, *_) = module.parameters()
    assert weight.grad is not None
    before = weight.grad.clone()
    loss.backward()
    want = torch.autograd.grad(module(batch(1, comm.device)).sum(), weight)[0]
    close(weight.grad, before + want, "both backwards")


def test_a_training_loop_has_one_slot(unified_ranks: Ranks) -> None:
    unified_ranks(loop)


def apart(comm: Any) -> None:
    """Two outputs go back one by one, as eagerly where their ways are apart; the slot waits."""
    one, two = (torch.ones(3, device=comm.device, requires_grad=True) for _ in range(2))
    g = graph.capture(lambda x: (x * one, x * two))
    x = torch.arange(3.0, device=comm.device)
    for turn in range(3):
        first, second = g(x)
        first.sum().backward()
        (slots,) = g.entries.values()
        same([getattr(slot, "free", None) for slot in slots.parts], [False], "free")
        second.sum().backward()
        for weight in (one, two):
            close(weight.grad, x * (turn + 1), f"turn {turn}")
        del first, second
    same(len(graph.report(g)), 1, "slots")


def test_outputs_that_go_back_apart(unified_ranks: Ranks) -> None:
    unified_ranks(apart)


def trained(call: Callable[..., torch.Tensor], module: torch.nn.Module) -> list[torch.Tensor]:
    """Return what some steps with sums of gradients lead to, and their outputs."""
    device = next(module.parameters()).device
    found = []
    for turn in range(6):
        x = batch(turn, device).requires_grad_(turn == 3)
        out = call(x)
        found.append(out.detach().clone())
        (out**2).sum().backward()
        found += [x.grad] if x.grad is not None else []
        if turn % 2:
            with torch.no_grad():
                for parameter in module.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.1)
            module.zero_grad(set_to_none=turn == 3)
    return [
        *found,
        *module.parameters(),
        *(x.grad for x in module.parameters() if x.grad is not None),
    ]


def adds_up(comm: Any, grads: str) -> None:
    """Gradients that are there are added to, those that are not are made, with eager bits."""
    module, plain = twice_wide(comm.device), twice_wide(comm.device)
    pairs = zip(
        trained(graph.capture(module, grads=grads), module), trained(plain, plain), strict=True
    )
    for number, (given, want) in enumerate(pairs):
        close(given, want, f"tensor {number}")


@pytest.mark.parametrize("grads", GRADS)
def test_sums_of_gradients(unified_ranks: Ranks, grads: str) -> None:
    unified_ranks(adds_up, grads)


def asked_for(comm: Any, grads: str) -> None:
    """Nothing is added where torch would not: autograd.grad, backward(inputs=), hooks."""
    one, two = (torch.ones(3, device=comm.device, requires_grad=True) for _ in range(2))
    x = torch.arange(3.0, device=comm.device)
    g = graph.capture(lambda x: x * one * two, grads=grads, outputs="copy")
    for weight in (one, two):
        weight.grad = torch.zeros_like(weight)
    given = torch.autograd.grad(g(x).sum(), [two, one])
    for found in given:
        close(found, x, "autograd.grad")
    close(one.grad, x * 0, "behind autograd.grad")
    g(x).sum().backward(inputs=[two])
    close(one.grad, x * 0, "behind backward(inputs=)")
    close(two.grad, x, "of backward(inputs=)")
    seen: list[torch.Tensor] = []

    def doubled(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad.clone())
        return grad * 2

    handles = [one.register_hook(doubled)]
    handles.append(two.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())))
    g(x).sum().backward()
    for handle in handles:
        handle.remove()
    same(len(seen), 2, "hooks that ran")
    close(one.grad, x * 2, "behind a hook")
    close(two.grad, x * 2, "behind a post hook")
    for found in given:
        close(found, x, "autograd.grad, later")
    two.grad = one.grad  # one memory for both: no kernel may add to it twice at a time
    g(x).sum().backward()
    close(one.grad, x * 4, "gradients in one place")
    wide = graph.capture(lambda x, w: x * w * one, grads=grads, outputs="copy")
    one.grad = torch.zeros_like(one)
    wide(x, one).sum().backward()  # the same leaf as argument and from outside
    close(one.grad, x * 2, "a leaf given twice")


@pytest.mark.parametrize("grads", GRADS)
def test_what_torch_would_not_add(unified_ranks: Ranks, grads: str) -> None:
    unified_ranks(asked_for, grads)


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


def in_order(comm: Any, grads: str) -> None:
    """The caller's stream comes behind the gradients, and the backward behind the caller's work."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    g = graph.capture(lambda x: _Late.apply(x * weight), grads=grads)  # type: ignore[no-untyped-call]
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
                given = weight.grad.clone()
                weight.grad.fill_(-1)  # behind the sum, so that it does not reach what was read
                close(given, x * (turn + 1), f"turn {turn}")
    if comm.device.type == "cuda":
        torch.cuda.synchronize()


def streams(device: torch.device) -> list[Any]:
    """Return contexts: the default stream, and one of its own."""
    if device.type == "cpu":
        return [torch.enable_grad()]
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    return [torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.stream(aside)]


@pytest.mark.parametrize("grads", GRADS)
def test_order_of_streams(unified_ranks: Ranks, grads: str) -> None:
    unified_ranks(in_order, grads)
