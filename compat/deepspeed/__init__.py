"""DeepSpeed's dialect: its graph helpers, and its communication module as ``deepspeed.comm``."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commlib.compat.deepspeed.graphs import (
    Graph,
    capture_to_graph,
    create_graph,
    graph_clear,
    graph_process,
    replay_graph,
)

if TYPE_CHECKING:
    from commlib.compat.deepspeed import comm

__all__ = [
    "Graph",
    "capture_to_graph",
    "comm",
    "create_graph",
    "graph_clear",
    "graph_process",
    "replay_graph",
]


def __dir__() -> list[str]:
    """List the public names, also ``comm``, which is imported when it is used."""
    return [*__all__]


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Import ``comm``, which loads ``torch.distributed``, when it is used."""
        if name == "comm":
            return import_module("commlib.compat.deepspeed.comm")
        raise AttributeError(f"module 'commlib.compat.deepspeed' has no attribute {name!r}")
