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
) -> dist.ProcessGroup | None:
    """Return the group of this rank's part of the parent; None if it is in none.

    Every member of the parent calls it with the same lists of positions in the parent.
    """
    parent = distributed_c10d._get_default_group() if parent_pg is None else parent_pg
    calls = calls_of(parent) if isinstance(parent, dist.ProcessGroup) else None
    bound = getattr(parent, "bound_device_id", None) is not None
    if calls is None or bound or any(kind != "cpu" for kind in calls.rings):
        return _stock(parent_pg, split_ranks, timeout, pg_options, group_desc)
    members = [position for part in split_ranks or [] for position in part]
    ranks = dist.get_process_group_ranks(parent)
    outside = not set(members) <= {*range(len(ranks))}
    if not members or outside or len(set(members)) != len(members):
        raise ArgumentError(
            f"split_group: split_ranks={split_ranks!r}; expected lists of positions in the parent, "
            f"0 to {len(ranks) - 1}, each at most once"
        )
    rank = parent.rank()
    for part in split_ranks or []:
        if rank in part:
            made: dist.ProcessGroup = dist.new_group(
                [ranks[position] for position in sorted(part)],
                timeout,
                NAME,
                use_local_synchronization=True,
                group_desc=group_desc,
            )
            return made
    return None


def install() -> None:
    """Give torch this function; groups of other backends are not changed."""
    replace("split_group", _stock, split_group)
