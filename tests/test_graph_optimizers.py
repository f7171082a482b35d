"""Captured steps whose optimizer or gradients the program changes between calls."""

import collections
import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commlib import graph
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on

Captured = Callable[[Callable[..., Any]], Callable[..., Any]]
Optimizer = torch.optim.Optimizer


def plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def one(value: float, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.full((3,), value, device=device))


def _set(name: str, value: Callable[[torch.Tensor], Any]) -> Callable[[Optimizer], None]:
    def change(optimizer: Optimizer) -> None:
        for parameter, held in optimizer.state.items():
            held[name] = value(parameter)

    return change


def _other_state(optimizer: Optimizer) -> None:
    optimizer.state = collections.defaultdict(dict)


def _loaded(optimizer: Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for held in state["state"].values():
        held["momentum_buffer"].mul_(0.5)
    optimizer.load_state_dict(state)


STATES: dict[str, Callable[[Optimizer], None]] = {
    "another moment": _set("momentum_buffer", torch.zeros_like),
    "no moment": _set("momentum_buffer", lambda _: None),
    "no entries": lambda optimizer: optimizer.state.clear(),
    "another dict": _other_state,
    "loaded": _loaded,
}


def stepped(
    captured: Captured,
    device: torch.device,
    change: Callable[[Optimizer], None],
    *,
    keep: bool,
) -> list[torch.Tensor]:
    """Train with whole steps, and change the optimizer's state between them, twice."""
    p = one(1.0, device)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        p.square().sum().backward()
        optimizer.step()

    step, weights, held = captured(step), list[torch.Tensor](), list[Any]()
    for turn in range(10):
        step()
        if turn in (4, 7):
            held += [optimizer.state, [dict(x) for x in optimizer.state.values()]] if keep else []
            change(optimizer)
        weights.append(p.detach().clone())
    return weights


@pytest.mark.parametrize("keep", [False, True], ids=["released", "kept"])
@pytest.mark.parametrize("change", STATES)
@runs_on("unified_ranks")
def test_a_state_that_is_replaced(comm: Any, change: str, keep: bool) -> None:
    """A whole step uses what the optimizer's state holds now, also where the old one is kept.

    The calls that follow the change are not verified: nothing else may find it.
    """
    captured = graph.capture(verify=False)
    expected = stepped(plain, comm.device, STATES[change], keep=keep)
    results = stepped(captured, comm.device, STATES[change], keep=keep)
    for turn, (actual, exact) in enumerate(zip(results, expected, strict=True)):
        assert_bits_equal(actual, exact, f"after step {turn}")


@runs_on("unified_ranks")
def test_a_fused_optimizer_whose_moment_is_replaced(comm: Any) -> None:
    """What the program binds in place of a moment of Adam is used by the next step."""
    results = []
    for captured in (plain, graph.capture(verify=False)):
        p = one(1.0, comm.device)
        optimizer = torch.optim.Adam([p], lr=0.1, fused=True)
        p.grad, old = torch.ones_like(p), []
        step = captured(optimizer.step)
        for turn in range(8):
            step()
            if turn == 4:
                old.append(optimizer.state[p]["exp_avg"])
                optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
        results.append(p.detach().clone())
    assert_bits_equal(results[1], results[0], "after 8 steps")


@runs_on("unified_ranks")
def test_a_state_that_grows_elsewhere(comm: Any) -> None:
    """A state that gets an entry for another parameter still fits: nothing is captured again."""
    p, q = one(1.0, comm.device), one(2.0, comm.device)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.ones_like(p)
    step = graph.capture(optimizer.step)
    for turn in range(6):
        step()
        if turn == 3:
            (entry,) = step.entries.values()
            optimizer.state[q]["momentum_buffer"] = torch.zeros_like(q)
    assert_equal([x is entry for x in step.entries.values()], [True], "the same graph")


def late(captured: Captured, device: torch.device, case: str) -> list[torch.Tensor]:
    """Two parameters, of which one, or both, get a gradient after some steps."""
    p, q = one(1.0, device), one(2.0, device)
    optimizer = torch.optim.SGD([p, q], lr=0.5, momentum=0.9)
    step, weights = captured(optimizer.step), list[torch.Tensor]()
    if case != "both":
        p.grad = torch.ones_like(p)
    for turn in range(9):
        if turn == (1 if case == "at once" else 4):
            p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        if turn == 6 and case == "for a time":
            q.grad = None
        step()
        weights += [p.detach().clone(), q.detach().clone()]
    return weights


@pytest.mark.parametrize("case", ["one", "both", "at once", "for a time"])
@runs_on("unified_ranks")
def test_a_gradient_that_comes_later(comm: Any, case: str) -> None:
    """An optimizer skips leaves without a gradient: which these are is a part of the key."""
    expected = late(plain, comm.device, case)
    for name, results in {
        "default": late(graph.capture, comm.device, case),
        "not verified": late(graph.capture(verify=False), comm.device, case),
    }.items():
        for at, (actual, exact) in enumerate(zip(results, expected, strict=True)):
            assert_bits_equal(actual, exact, f"{name}, step {at // 2}")


def clipped(captured: Captured, device: torch.device) -> list[torch.Tensor]:
    """Gradients are clipped; a part of the module is trained later."""
    torch.manual_seed(1)
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)).to(device)
    module[0].requires_grad_(False)
    clip = captured(lambda: nn.utils.clip_grad_norm_(module.parameters(), 1e-2))
    results = []
    for turn in range(8):
        if turn == 4:
            module[0].requires_grad_(True)
        module.zero_grad()
        module(torch.full((2, 3), turn + 1.0, device=device)).sum().backward()
        results.append(clip().clone())
        results += [x.grad.clone() for x in module.parameters() if x.grad is not None]
    return results


@runs_on("unified_ranks")
def test_a_part_that_is_trained_later(comm: Any) -> None:
    """New gradients are further inputs of the calls that follow, each of them once."""
    expected, results = (clipped(x, comm.device) for x in (plain, graph.capture))
    assert_equal(len(results), len(expected), "tensors")
    for at, (actual, exact) in enumerate(zip(results, expected, strict=True)):
        assert_bits_equal(actual, exact, f"tensor {at}")


@runs_on("unified_ranks")
def test_a_frozen_part_with_gradients(comm: Any) -> None:
    """A step that drops all gradients drops those of frozen parameters too, as eager code does."""
    results = []
    for captured in (plain, graph.capture(verify=False)):
        p, q = one(1.0, comm.device), one(2.0, comm.device)
        optimizer = torch.optim.SGD([p, q], lr=0.1)

        def step(p: nn.Parameter = p, optimizer: Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            p.square().sum().backward()
            optimizer.step()

        step, dropped = captured(step), list[bool]()
        q.requires_grad_(False)
        for turn in range(8):
            if turn in (4, 6):
                q.grad = torch.ones_like(q)
            step()
            dropped.append(q.grad is None)
        results.append((dropped, p.tolist(), q.tolist()))
    assert_equal(results[1], results[0], "gradients that are dropped, and parameters")


@runs_on("unified_ranks")
def test_a_moment_that_is_released(comm: Any) -> None:
    """A graph keeps no moment of a state alive: others learn of its release."""
    p = one(1.0, comm.device)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    p.grad = torch.ones_like(p)
    step = graph.capture(optimizer.step)
    for _ in range(4):
        step()
    moment = weakref.ref(optimizer.state[p]["momentum_buffer"])
    optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    assert moment() is None, "something holds the old moment"


@runs_on("unified_ranks")
def test_another_parameter_in_a_group(comm: Any) -> None:
    """Which parameters a group has is a part of the key, not only how many."""
    results = []
    for captured in (plain, graph.capture(verify=False)):
        p, q = one(1.0, comm.device), one(2.0, comm.device)
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
        optimizer = torch.optim.SGD([p], lr=0.5)
        step = captured(optimizer.step)
        for turn in range(8):
            if turn == 4:
                optimizer.param_groups[0]["params"][0] = q
            step()
        results.append(torch.stack([p.detach(), q.detach()]))
    assert_bits_equal(results[1], results[0], "after 8 steps")


@pytest.mark.parametrize("verify", ["auto", False])
@runs_on("unified_ranks")
def test_gradients_without_a_run_before_the_capture(comm: Any, verify: Any) -> None:
    """``first="warmup", warmup=1``: the call itself shows which leaves get gradients."""
    results = []
    for captured in (plain, graph.capture(first="warmup", warmup=1, verify=verify)):
        p = one(1.0, comm.device)
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)

        def step(p: nn.Parameter = p, optimizer: Optimizer = optimizer) -> None:
            optimizer.zero_grad()
            p.square().sum().backward()
            optimizer.step()

        step, tensors = captured(step), list[torch.Tensor]()
        for _ in range(6):
            step()
            assert p.grad is not None
            tensors += [p.detach().clone(), p.grad.clone()]
        results.append(torch.stack(tensors))
    assert_bits_equal(results[1], results[0], "parameters and gradients")
