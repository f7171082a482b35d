"""Dynamo and the handlers of the modes that watch the runs of a captured function."""

import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch._dynamo

from commlib import graph


@pytest.fixture
def called() -> Iterator[list[str]]:
    """Note the files of all functions that are called."""
    files: list[str] = []

    def note(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    sys.setprofile(note)
    yield files
    sys.setprofile(None)


def test_no_wrapper_of_torch(called: list[str]) -> None:
    """No operator goes through the wrapper that torch puts around the handlers of modes."""
    captured = graph.capture(lambda y: y * 3, verify=False)
    captured(torch.ones(2))
    sys.setprofile(None)
    assert any(name.endswith("watching/recorder.py") for name in called)
    assert not [name for name in called if name.endswith("torch/_compile.py")]


@pytest.mark.parametrize("inline", [False, True])
def test_dynamo_leaves_it_alone(inline: bool) -> None:
    """Compiled code around an operator: Dynamo compiles nothing of the handler."""
    graphs: list[Any] = []

    def backend(module: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        graphs.append(module)
        return module.forward

    @torch.compile(backend=backend)
    def part(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        torch._dynamo.graph_break()
        return y + 1

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    captured = graph.capture(lambda x: part(x) + x)
    config, name = torch._dynamo.config, "inline_torch_dispatch_torch_compile"
    with config.patch({name: inline} if hasattr(config, name) else {}):
        for i in range(4):
            x = torch.full((3,), float(i))
            assert torch.equal(captured(x), x * 3 + 1)
    assert not graphs
    assert not torch._dynamo.utils.counters["graph_break"]
