"""``split_group`` for groups of ours: torch has it for groups that are bound to a GPU alone."""

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlib.compat.c10d.batches import replace
from commlib.compat.c10d.bridges import calls_of
from commlib.compat.c10d.group_calls import NAME
from commlib.errors import ArgumentError

_stock: Callable[..., dist.ProcessGroup | None] = distributed_c10d.split_group


@wraps(_stock)
def split_group(
    parent_pg: Any = None,
    split_ranks: list[list[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
    backend: Any = None,
) -> dist.ProcessGroup | None:
    """Return the group of this rank's part of the parent; None if it is in none.

    Every member of the parent calls it with the same lists of positions in the parent.
    """
    parent = distributed_c10d._get_default_group() if parent_pg is None else parent_pg
    calls = calls_of(parent) if isinstance(parent, dist.ProcessGroup) else None
    bound = getattr(parent, "bound_device_id", None) is not None
    if calls is None or bound or any(kind != "cpu" for kind in calls.rings):
        args = () if backend is None else (backend,)  # new in torch 2.13
        return _stock(parent_pg, split_ranks, timeout, pg_options, group_desc, *args)
    ranks = dist.get_process_group_ranks(parent)
    _check(split_ranks or [], len(ranks), backend)
    part = next((sorted(part) for part in split_ranks or [] if parent.rank() in part), [])
    name = calls.split_name(part)  # on ranks in no part too: all members count alike
    return (
        _made([ranks[position] for position in part], name, timeout, group_desc) if part else None
    )


def _check(split_ranks: list[list[int]], size: int, backend: Any) -> None:
    """Refuse parts that are not apart, and another backend than that of the parent."""
    members = [position for part in split_ranks for position in part]
    outside = not set(members) <= {*range(size)}
    if not members or outside or len(set(members)) != len(members):
        raise ArgumentError(
            f"split_group: split_ranks={split_ranks!r}; expected lists of positions in the parent, "
            f"0 to {size - 1}, each at most once"
        )
    if backend is not None and str(backend).lower() not in (NAME, f"cpu:{NAME}"):
        raise ArgumentError(
            f"split_group: backend={str(backend)!r}; expected that of the parent, {NAME!r}"
        )


def _made(
    ranks: list[int], name: str, timeout: timedelta | None, description: str | None
) -> dist.ProcessGroup:
    """Make a group as ``new_group`` does, under a name that torch does not choose."""
    make: Any = distributed_c10d._new_process_group_helper
    group: dist.ProcessGroup = make(
        len(ranks),
        ranks.index(dist.get_rank()),
        ranks,
        dist.Backend(NAME),
        distributed_c10d._get_default_store(),
        name,
        timeout=timeout or dist.constants.default_pg_timeout,
        group_desc=description,
    )[0]
    positions = {rank: position for position, rank in enumerate(ranks)}
    distributed_c10d._world.pg_group_ranks[group] = positions
    return group


def install() -> None:
    """Give torch this function; groups of other backends are not changed."""
    replace("split_group", _stock, split_group)
