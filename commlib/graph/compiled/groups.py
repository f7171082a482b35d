"""Process groups of functional collectives: those whose communicators are rings of ours."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from commlib.core.context import CommContext
from commlib.graph.compiled.called import Call

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


def is_collective(call: Call) -> bool:
    """Return True for a functional collective of torch in an FX graph, and for its wait."""
    return getattr(call.op, "namespace", "") in _NAMESPACES


def stock_group(call: Call) -> str | None:
    """Return the group of a functional collective, unless rings of ours move its bytes."""
    schema = call.op._schema.arguments
    values = dict(zip((x.name for x in schema), call.args, strict=False)) | dict(call.kwargs)
    group = values.get("group_name")
    return None if group is None or is_ours(group) else f"group {group!r}"


def is_ours(group: Any) -> bool:
    """Return True if rings of ours move the bytes of a process group, given itself or by name.

    Such a group, or its backend, has these as ``rings``, by kind of device.
    """
    if isinstance(group, str):
        try:
            group = _named(group)
        except (LookupError, RuntimeError, ValueError):  # a name that is not registered
            return False
    return _has_rings(group) or any(map(_has_rings, _backends(group)))


_named: Callable[[Any], Any] = dist.distributed_c10d._resolve_process_group


def _has_rings(x: Any) -> bool:
    rings = getattr(x, "rings", None)
    return isinstance(rings, dict) and any(isinstance(x, CommContext) for x in rings.values())


def _backends(group: Any) -> Iterator[Any]:
    for device in ("cuda", "cpu"):
        try:
            yield group._get_backend(torch.device(device))
        except (AttributeError, RuntimeError):  # no backend for this device
            continue
