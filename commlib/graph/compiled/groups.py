"""Process groups of functional collectives: those whose communicators are rings of ours."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from commlib.core.context import CommContext

_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "c10d_functional")


def is_collective(node: torch.fx.Node) -> bool:
    """Return True for a functional collective of torch in an FX graph, and for its wait."""
    return getattr(node.target, "namespace", "") in _NAMESPACES


def stock_group(node: torch.fx.Node) -> str | None:
    """Return the group of a functional collective, unless a ring of ours moves its bytes."""
    schema = node.target._schema.arguments  # type: ignore[union-attr]
    values = dict(zip((x.name for x in schema), node.args, strict=False)) | node.kwargs
    group = values.get("group_name")
    return None if group is None or ring_of(group) is not None else f"group {group}"


_named: Callable[[Any], Any] = dist.distributed_c10d._resolve_process_group


def ring_of(group: Any) -> CommContext | None:
    """Return the ring that moves the bytes of a process group, which is given itself or by name.

    Such a group has a backend of ours, whose ``ring`` this is.
    """
    if isinstance(group, str):
        try:
            group = _named(group)
        except (LookupError, RuntimeError, ValueError):  # a name that is not registered
            return None
    for device in ("cuda", "cpu"):
        try:
            backend = group._get_backend(torch.device(device))
        except (AttributeError, RuntimeError):  # no backend for this device
            continue
        ring = getattr(backend, "ring", None)
        if isinstance(ring, CommContext):
            return ring
    return None
