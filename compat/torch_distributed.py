"""``torch.distributed`` on rings, for code that prefers a changed import to a changed backend.

``import commlib.compat.torch_distributed as dist`` has every name of ``torch.distributed`` with the
same signature. Groups for "nccl", "gloo" and the default backend are groups of rings.
``FLAGS_comm_torch_backend=1`` gives torch these functions for programs that change nothing.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as _torch

from commlib.compat.c10d.batches import replace
from commlib.compat.c10d.group_calls import NAME

if TYPE_CHECKING:
    from torch.distributed import *  # noqa: F403

Function = TypeVar("Function", bound=Callable[..., Any])

_REPLACED = ("nccl", "gloo", "undefined")
_STOCK: dict[str, Callable[..., Any]] = {
    name: getattr(_torch, name)
    for name in (
        "init_process_group",
        "new_group",
        "new_subgroups",
        "new_subgroups_by_enumeration",
    )
}


def _on_rings(function: Function, *, default: str | None = None) -> Function:
    """Return ``function`` with rings in the place of torch's backends."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        backend = bound.arguments.get("backend") or default
        if backend is not None:
            bound.arguments["backend"] = _backend(backend)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def _backend(given: str) -> str:
    """Return the backend of rings for each device that torch's backends were given for."""
    pairs = (part.rpartition(":") for part in given.lower().split(","))
    return ",".join(
        device + colon + (NAME if name in _REPLACED else name) for device, colon, name in pairs
    )


init_process_group = _on_rings(_torch.init_process_group, default=NAME)
new_group = _on_rings(_torch.new_group)
new_subgroups = _on_rings(_torch.new_subgroups)
new_subgroups_by_enumeration = _on_rings(_torch.new_subgroups_by_enumeration)


def replace_torch() -> None:
    """Give programs of ``torch.distributed`` these functions."""
    for name, stock in _STOCK.items():
        replace(name, stock, globals()[name])


def __dir__() -> list[str]:
    """List the names of torch.distributed."""
    return dir(_torch)


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Return what torch.distributed has under this name, which may be imported by then."""
        if name == "__all__":
            return [each for each in dir(_torch) if not each.startswith("_")]
        return getattr(_torch, name)
