"""``torch.distributed`` on rings, for code that prefers a changed import to a changed backend.

``import commlib.compat.torch_distributed as dist`` has every name of ``torch.distributed`` with the
same signature. Groups for "nccl", "gloo" and the default backend are groups of rings, and two
functions work that torch has for its own backends only: ``monitored_barrier``, and
``batch_isend_irecv`` as one operation. ``FLAGS_comm_torch_backend=1`` gives torch these functions
for programs that change nothing.
"""

import inspect
import sys
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as _torch
from torch.distributed import distributed_c10d as _c10d

from commlib.compat.c10d.bridges import calls_of
from commlib.compat.c10d.group_calls import NAME

if TYPE_CHECKING:
    from torch.distributed import *  # noqa: F403

Function = TypeVar("Function", bound=Callable[..., Any])

_REPLACED = ("nccl", "gloo", "undefined")
_STOCK: dict[str, Callable[..., Any]] = {
    name: getattr(_torch, name)
    for name in (
        *("init_process_group", "new_group", "new_subgroups", "new_subgroups_by_enumeration"),
        *("monitored_barrier", "batch_isend_irecv"),
    )
}


def _on_rings(function: Function, *, default: str | None = None) -> Function:
    """Return ``function`` with rings in the place of torch's backends."""
    signature = inspect.signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        backend = given.arguments.get("backend") or default
        if backend is not None:
            given.arguments["backend"] = _backend(backend)
        return function(*given.args, **given.kwargs)

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


@wraps(_torch.monitored_barrier)  # type: ignore[no-redef]
def monitored_barrier(
    group: Any = None,
    timeout: timedelta | None = None,
    wait_all_ranks: bool = False,
) -> None:
    """Block the host until every rank of the group has called it; the error names late ranks."""
    calls = calls_of(group or _c10d._get_default_group())
    if calls is None:
        _STOCK["monitored_barrier"](group, timeout, wait_all_ranks)
    else:
        calls.monitored_barrier(timeout, wait_all_ranks)


@wraps(_torch.batch_isend_irecv)  # type: ignore[no-redef]
def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
    """Launch sends and receives as one operation; returns the works to wait for."""
    _c10d._check_p2p_op_list(p2p_op_list)
    group = p2p_op_list[0].group or _c10d._get_default_group()
    calls = calls_of(group)
    if calls is None:
        works: list[Any] = _STOCK["batch_isend_irecv"](p2p_op_list)
        return works
    calls.start_coalescing()
    try:
        for one in p2p_op_list:
            peer = {"group_dst" if one.op is _torch.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=one.group, tag=one.tag, **peer)
    except BaseException:
        calls.drop_coalescing()
        raise
    return [calls.end_coalescing()]


def replace_torch() -> None:
    """Give ``torch.distributed`` these functions, in each of its modules that has torch's own."""
    loaded = [module for name, module in [*sys.modules.items()] if name.startswith(_torch.__name__)]
    for name, stock in _STOCK.items():
        for module in loaded:
            if vars(module).get(name) is stock:
                setattr(module, name, globals()[name])


def __dir__() -> list[str]:
    """List the names of torch.distributed."""
    return dir(_torch)


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Return what torch.distributed has under this name."""
        return getattr(_torch, name)
