"""Graphs of the program inside a captured function: those of graphed modules are unrolled.

A graph can't hold the replay of another one. A module that torch.cuda.make_graphed_callables was
given keeps its own forward, so that one graph is made of all.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from commlib.core import observers
from commlib.errors import GraphError
from commlib.graph.operators.exchange import Exchange


def unrolled(modules: Iterable[torch.nn.Module]) -> AbstractContextManager[None]:
    """Run the own forwards of graphed modules inside a ``with`` block."""
    graphed = [(module, orig) for module in modules if (orig := _own_forward(module)) is not None]
    return _exchanged(graphed) if graphed else nullcontext()


@contextmanager
def _exchanged(forwards: Sequence[tuple[torch.nn.Module, Any]]) -> Iterator[None]:
    before = [vars(module)["forward"] for module, _ in forwards]
    for module, orig in forwards:
        vars(module)["forward"] = orig
    try:
        yield
    finally:
        for (module, _), forward in zip(forwards, before, strict=True):
            vars(module)["forward"] = forward


def _own_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """Return the forward that a graphed module had; torch keeps it for the other training mode."""
    forward = vars(module).get("forward")
    if forward is None or getattr(forward, "__module__", "") != "torch.cuda.graphs":
        return None
    orig: Callable[..., Any] | None = inspect.getclosurevars(forward).nonlocals.get("orig_fwd")
    return orig


def _checked(name: str, replay: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(replay)
    def checked(self: torch.cuda.CUDAGraph) -> Any:
        if observers.observers and observers.refusing():
            raise GraphError(
                f"{name} of a CUDA graph can't be captured: no graph can hold another one; "
                f"capture the function that it was made of (a module before "
                f"torch.cuda.make_graphed_callables), or mark the part with commlib.graph.eager"
            )
        return replay(self)

    return checked


watching_replays = Exchange([(torch.cuda.CUDAGraph, "replay")], _checked)
