"""``shrink_group`` for groups of ours: torch says that a group can't shrink, and no way round."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlib.compat.c10d.batches import replace
from commlib.compat.c10d.bridges import calls_of

_stock: Callable[..., dist.ProcessGroup] | None = getattr(distributed_c10d, "shrink_group", None)


def shrink_group(
    ranks_to_exclude: list[int], group: Any = None, *args: Any, **options: Any
) -> dist.ProcessGroup:
    """Return a group without some ranks.

    Raises:
        NotImplementedError: The group is one of rings.
    """
    assert _stock is not None
    process_group = distributed_c10d._get_default_group() if group is None else group
    if isinstance(process_group, dist.ProcessGroup):  # else this rank is not a member
        calls = calls_of(process_group)
        if calls is not None:
            calls.shrink(ranks_to_exclude)
    return _stock(ranks_to_exclude, group, *args, **options)


def install() -> None:
    """Give torch this function; groups of other backends are not changed."""
    if _stock is not None:  # new in torch 2.9
        replace("shrink_group", _stock, wraps(_stock)(shrink_group))
