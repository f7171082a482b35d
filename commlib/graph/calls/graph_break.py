"""Functions that compiled code can't contain: each call of them is a graph break of Dynamo."""

from collections.abc import Callable
from typing import Any, TypeVar

from commlib.core.compiler import untraced_function

Function = TypeVar("Function", bound=Callable[..., Any])

REPLAYS = (
    "commlib.graph replays graphs, which can't be traced; without fullgraph=True the call runs "
    "between two compiled parts. To have one graph, don't capture the function, and compile its "
    "caller with backend=commlib.graph.backend"
)


def graph_break(reason: str) -> Callable[[Function], Function]:
    """Return a decorator of functions whose calls in compiled code are graph breaks.

    Torch reads the mark while it traces. Where it can mark code, a call runs nothing for it.

    Args:
        reason: What can't be traced and what to do instead, for torch's message.
    """

    def mark(function: Function) -> Function:
        marked: Any = untraced_function(function)
        marked._torchdynamo_disable = True
        marked._torchdynamo_disable_msg = reason
        result: Function = marked
        return result

    return mark
