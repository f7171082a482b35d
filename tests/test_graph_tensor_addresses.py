"""Tensors that a program replaces between calls of a captured function, or their memory alone."""

from collections import deque
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.graph.calls.tensor_addresses import HeldTensors, layout_guards
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on

Function = Callable[[torch.Tensor], torch.Tensor]
_weight = torch.empty(0)


def _in_global(weight: torch.Tensor) -> Function:
    global _weight
    _weight = weight
    return lambda x: x @ _weight


def _in_long_list(weight: torch.Tensor) -> Function:
    held = [torch.zeros_like(weight) for _ in range(99)] + [weight]
    return lambda x: x @ held[99]


def _in_object(weight: torch.Tensor) -> Function:
    holder = SimpleNamespace(held={"weights": [weight]})
    return lambda x: x @ holder.held["weights"][0]


def _in_attribute_of_module(weight: torch.Tensor) -> Function:
    module: Any = torch.nn.Module()
    module.held = {"weight": weight}
    return lambda x: x @ module.held["weight"]


def _in_parameter(weight: torch.Tensor) -> Function:
    linear = torch.nn.Linear(3, 3, bias=False)
    linear.weight = weight
    return linear


PLACES: dict[str, Callable[[Any], Function]] = {
    "closure": lambda weight: lambda x: x @ weight,
    "closure, by its data": lambda weight: lambda x: x @ weight.data,
    "global": _in_global,
    "long list": _in_long_list,
    "object": _in_object,
    "attribute of a module": _in_attribute_of_module,
    "parameter": _in_parameter,
}


def _replace(weight: torch.Tensor) -> None:
    weight.data = weight.data * 2


def _set(weight: torch.Tensor) -> None:
    other = weight * 2
    with torch.no_grad():
        weight.set_(other.untyped_storage(), 0, other.shape, other.stride())


def _transpose(weight: torch.Tensor) -> None:
    weight.data = weight.data.t()


@pytest.mark.parametrize("place", PLACES)
@runs_on("unified_ranks")
def test_other_memory(comm: Any, place: str) -> None:
    """A graph is captured again for another address or layout; no verified call finds it."""
    for change in (_replace, _set, _transpose):
        values = torch.arange(9.0, device=comm.device).view(3, 3)
        weight = torch.nn.Parameter(values, requires_grad=False)
        fn = PLACES[place](weight)
        captured, x = graph.capture(fn, verify=False), torch.ones(2, 3, device=comm.device)
        for turn in range(6):
            if turn == 4:
                change(weight)
            assert_bits_equal(captured(x + turn), fn(x + turn), f"{change.__name__}, call {turn}")


Held = tuple[Function, Callable[[torch.Tensor], None]]


def _item_of_list(weight: torch.Tensor) -> Held:
    held = [torch.zeros_like(weight) for _ in range(149)] + [weight]
    return lambda x: x @ held[149], partial(held.__setitem__, 149)


def _item_of_deque(weight: torch.Tensor) -> Held:
    held = deque([weight])
    return lambda x: x @ held[0], partial(held.__setitem__, 0)


def _item_deep_in_object(weight: torch.Tensor) -> Held:
    holder = SimpleNamespace(held={"weights": [{"first": weight}]})
    bind = partial(holder.held["weights"][0].__setitem__, "first")
    return lambda x: x @ holder.held["weights"][0]["first"], bind


def _item_of_module(weight: torch.Tensor) -> Held:
    module: Any = torch.nn.Module()
    module.held = [weight]
    return lambda x: x @ module.held[0], partial(module.held.__setitem__, 0)


def _attribute_of_module(weight: torch.Tensor) -> Held:
    module: Any = torch.nn.Module()
    module.held = weight
    return lambda x: x @ module.held, partial(setattr, module, "held")


class _Layer:
    def __init__(self, weight: torch.Tensor) -> None:
        self.held = {"weight": weight}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.held["weight"]


def _item_of_own_object(weight: torch.Tensor) -> Held:
    layer = _Layer(weight)
    return layer.__call__, partial(layer.held.__setitem__, "weight")


HOLDERS: dict[str, Callable[[torch.Tensor], Held]] = {
    "list": _item_of_list,
    "deque": _item_of_deque,
    "deep in an object": _item_deep_in_object,
    "list of a module": _item_of_module,
    "attribute of a module": _attribute_of_module,
    "object of a method": _item_of_own_object,
}


@pytest.mark.parametrize("holder", HOLDERS)
@runs_on("unified_ranks")
def test_another_tensor(comm: Any, holder: str) -> None:
    """A tensor that the program replaces and keeps elsewhere is not read by the next call."""
    weight = torch.arange(9.0, device=comm.device).view(3, 3)
    fn, bind = HOLDERS[holder](weight)
    captured, x = graph.capture(fn, verify=False), torch.ones(2, 3, device=comm.device)
    for turn in range(9):
        if turn == 4:
            bind(weight * 2)
        if turn == 7:
            bind(weight)  # the first one again
        assert_bits_equal(captured(x + turn), fn(x + turn), f"call {turn}")


@runs_on("unified_ranks")
def test_memory_that_stays(comm: Any) -> None:
    """No graph is captured again in another mode of torch, or for other arguments."""
    weight = torch.arange(9.0, device=comm.device).view(3, 3)
    captured = graph.capture(lambda x: x @ weight)
    for turn in range(8):
        x = torch.full((2, 3), float(turn), device=comm.device)
        assert_bits_equal(captured(x), x @ weight, f"call {turn}")
        with torch.inference_mode():
            captured(x)
        if turn == 2:
            before = [*captured.entries.values()]
    now = [*captured.entries.values()]
    assert_equal((len(now), len(before)), (2, 2), "graphs")
    assert all(any(x is y for y in now) for x in before), "a graph was captured again"


class Weight(torch.nn.Parameter):
    """A class of a program: no wrapper."""


@runs_on("unified_ranks")
def test_a_parameter_of_another_class(comm: Any) -> None:
    """The memory of parameters and buffers is compared whatever their class is."""
    values = torch.arange(9.0, device=comm.device).view(3, 3)
    linear = torch.nn.Linear(3, 3, bias=False, device=comm.device)
    linear.weight = Weight(values, requires_grad=False)
    captured, x = graph.capture(linear, verify=False), torch.ones(2, 3, device=comm.device)
    for turn in range(6):
        if turn == 4:
            linear.weight.data = linear.weight.data * 2
        assert_bits_equal(captured(x), linear(x), f"call {turn}")


@runs_on("unified_ranks")
def test_a_conjugate(comm: Any) -> None:
    """Another view of the same memory is another tensor: its values are negated at reads."""
    weight = torch.full((3, 3), 1j, device=comm.device)
    held, x = [weight], torch.ones(2, 3, dtype=torch.complex64, device=comm.device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x @ held[0]

    captured = graph.capture(fn, verify=False)
    for turn in range(6):
        if turn == 4:
            held[0] = weight.conj()
        assert_bits_equal(captured(x), fn(x), f"call {turn}")


class Stateful(torch.nn.Module):
    """Two kinds of calls bind a tensor, a third one reads it."""

    state: torch.Tensor

    def forward(self, x: torch.Tensor, kind: str) -> torch.Tensor:
        if kind != "read":
            self.state = x * (2 if kind == "two" else 3)
        return x + self.state


@runs_on("unified_ranks")
def test_a_tensor_that_other_calls_bind(comm: Any) -> None:
    """A kind of call that reads what other kinds bind does not read an old tensor."""
    results = []
    for way in (lambda module: module, graph.capture(verify=False, on_fail="eager")):
        module, states, outputs = Stateful(), list[torch.Tensor](), list[torch.Tensor]()
        call = way(module)
        for turn in range(24):
            kind = ("two", "read", "three", "read")[turn % 4]
            outputs.append(call(torch.full((3,), float(turn), device=comm.device), kind).clone())
            states.append(module.state)
        results.append(torch.stack(outputs))
    assert_bits_equal(results[1], results[0], "24 calls")


@runs_on("unified_ranks")
def test_arguments_that_are_kept(comm: Any) -> None:
    """Arguments that the program also keeps in an attribute: one graph replays all calls."""
    module: Any = torch.nn.Linear(3, 3, device=comm.device)
    module.batch = None
    captured = graph.capture(lambda x: module(x) if module.batch is None else module(x) * 2)
    with torch.no_grad():
        for turn in range(12):
            x = module.batch = torch.full((2, 3), float(turn), device=comm.device)
            assert_bits_equal(captured(x), module(x) * 2, f"call {turn}")
    assert_equal(captured.entries.replays >= 9, True, "replays")


@runs_on("unified_ranks")
def test_tensors_that_have_no_address(comm: Any) -> None:
    """Nested tensors and uninitialised parameters around a function do not disturb a capture."""
    module: Any = torch.nn.Linear(3, 3, device=comm.device)
    parts = [torch.ones(2, device=comm.device), torch.ones(3, device=comm.device)]
    module.register_buffer("nested", torch.nested.nested_tensor(parts))
    module.held = [torch.nested.nested_tensor(parts), torch.nn.UninitializedParameter()]
    captured = graph.capture(lambda x: module(x) * len(module.held))
    with torch.no_grad():
        for turn in range(4):
            x = torch.full((2, 3), float(turn), device=comm.device)
            assert_bits_equal(captured(x), module(x) * 2, f"call {turn}")


def test_tied_tensors() -> None:
    """Tied parameters are compared in one call of torch, as others are."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    module[1].weight = module[0].weight
    captured = graph.capture(module, verify=False)
    for _ in range(3):
        captured(torch.ones(2, 3))
    tensors = captured._keys.around._modules.compared()
    assert_equal(len(tensors), 3, "different parameters")
    assert layout_guards(tensors).check(*tensors)


def test_tensors_that_are_released() -> None:
    """A tensor that the program drops has not moved; those that it keeps are still compared."""
    live, dropped, parameter = torch.zeros(3, 3), torch.zeros(2), torch.nn.Parameter(torch.zeros(2))
    held = HeldTensors([live, dropped, parameter])
    del dropped
    assert not held.have_moved()
    with torch.inference_mode():
        assert not held.have_moved(), "another mode of torch"
    live.data = live.data.t()
    assert held.have_moved()
    live.data = live.data.t()
    assert not held.have_moved()
    parameter.data = torch.zeros(2)
    assert held.have_moved()
