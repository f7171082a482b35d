"""``monitored_barrier`` for groups of ours: before 2.14 torch has it for gloo alone, by name."""

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlib.compat.c10d.batches import replace
from commlib.compat.c10d.bridges import calls_of

_stock: Callable[..., None] = distributed_c10d.monitored_barrier


@wraps(_stock)
def monitored_barrier(
    group: Any = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Block the host until every rank of the group has called it; the error names late ranks."""
    process_group = distributed_c10d._get_default_group() if group is None else group
    calls = (
        calls_of(process_group) if isinstance(process_group, dist.ProcessGroup) else None
    )  # not a member
    if calls is None:
        _stock(group, timeout, wait_all_ranks)
    else:
        calls.monitored_barrier(timeout, wait_all_ranks)


def install() -> None:
    """Give torch this function; groups of other backends are not changed."""
    replace("monitored_barrier", _stock, monitored_barrier)
