"""Parts of modules that are replaced without a report: by torch itself, or in a module's dicts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from commlib import graph
from commlib.graph.surroundings.modules import ModuleWatch
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on


class Table(nn.Module):
    """A buffer alone: nothing else changes with it."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.tensor([0.1, 0.3]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.table


class Layer(Table):
    """A buffer, a parameter and a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]), requires_grad=False)
        self.act: nn.Module = nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.act(super().forward(x) + self.weight)
        return result


def _write(name: str, key: str, value: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    def change(module: nn.Module) -> None:
        held = vars(module)[name]
        held[key] = value(held[key])

    return change


def _parameter(x: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(x * 2, requires_grad=False)


CHANGES: dict[str, tuple[type[Table], Callable[[Table], object]]] = {
    "another dtype": (Table, lambda module: module.double()),
    "there and back": (Table, lambda module: module.to(torch.bfloat16).float()),
    "_buffers": (Layer, _write("_buffers", "table", lambda x: x * 2)),
    "_parameters": (Layer, _write("_parameters", "weight", _parameter)),
    "_modules": (Layer, _write("_modules", "act", lambda _: nn.Sigmoid())),
}


@pytest.mark.parametrize("keep", [False, True], ids=["released", "kept"])
@pytest.mark.parametrize("change", CHANGES)
@runs_on("unified_ranks")
def test_parts_that_are_replaced(comm: Any, change: str, keep: bool) -> None:
    """The call after the change uses what the module holds now; no verified call finds it."""
    (kind, replace), runs = CHANGES[change], list[list[torch.Tensor]]()
    for way in (lambda module: module, graph.capture(verify=False)):
        module = kind().to(comm.device)
        held = [*module.buffers(), *module.parameters(), *module.children()] if keep else []
        call, results = way(module), list[torch.Tensor]()
        for turn in range(7):
            if turn == 4:
                replace(module)
            results.append(call(torch.full((2,), turn + 1.0, device=comm.device)).clone())
        runs.append(results)
        del held
    for turn, (actual, exact) in enumerate(zip(runs[1], runs[0], strict=True)):
        assert_bits_equal(actual, exact, f"call {turn}")


class Other(Layer):
    """Another forward over the same parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 3


CLASSES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], nn.Module]]] = {
    "the module": (Layer, lambda module: module),
    "a submodule": (lambda: nn.Sequential(nn.Tanh(), Layer()), lambda module: module[1]),
}


@pytest.mark.parametrize("which", CLASSES)
@runs_on("unified_ranks")
def test_another_class(comm: Any, which: str) -> None:
    """The class of a module is a part of the key, and so is the one that it had before."""
    make, part = CLASSES[which]
    ours, theirs = make().to(comm.device), make().to(comm.device)
    captured = graph.capture(ours, verify=False)
    for turn, kind in enumerate([Layer] * 4 + [Other] * 3 + [Layer] * 3):
        for module in (ours, theirs):
            part(module).__class__ = kind
        x = torch.full((2,), turn + 1.0, device=comm.device)
        assert_bits_equal(captured(x), theirs(x), f"call {turn}")
    assert_equal([row["replays"] for row in graph.report(captured)], [6, 2], "two graphs")


def test_parts_that_come_and_go() -> None:
    """A part more or less in the dicts of a module is seen, the last one too."""
    module, watch = Layer(), ModuleWatch()
    watch.add([module], [])
    look, table = watch.look(), module.table
    assert not look.is_old
    module._modules["more"] = nn.Tanh()
    assert look.is_old
    del module._modules["more"]
    assert not look.is_old
    del module._buffers["table"]
    assert look.is_old
    module._buffers["table"] = table
    assert not look.is_old
    del module._modules["act"]
    assert look.is_old
