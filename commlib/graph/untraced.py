"""Calls that Dynamo leaves to eager code: replays have nothing that it could trace."""

from collections.abc import Callable
from typing import Any, TypeVar

from commlib.core.compiler import untraced_function

Function = TypeVar("Function", bound=Callable[..., Any])

_REASON = (
    "commlib.graph replays graphs, which can't be traced; without fullgraph=True the call runs "
    "between two compiled parts. To have one graph, don't capture the function, and compile its "
    "caller with backend=commlib.graph.backend"
)


def untraced(function: Function) -> Function:
    """Return a function whose calls in compiled code are graph breaks.

    Torch reads the mark while it traces. A call of the function runs no code for it.
    """
    marked: Any = untraced_function(function)
    marked._torchdynamo_disable = True
    marked._torchdynamo_disable_msg = _REASON
    found: Function = marked
    return found
