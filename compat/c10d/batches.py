"""Batches of ``torch.distributed`` that an exception leaves: none of their calls are launched.

After an exception in a block of ``_coalescing_manager`` torch records all later collectives of the
group for that block, and launches none. A group that is written in Python gets the calls of
``batch_isend_irecv`` one by one. So those before a wrong one would be under way already.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from commlib.compat.c10d.bridges import calls_of
from commlib.compat.c10d.group_calls import GroupCalls
from commlib.compat.c10d.work import GroupWork

_stock_manager: Callable[..., Any] = distributed_c10d._coalescing_manager
_stock_batch = distributed_c10d.batch_isend_irecv


@contextmanager
@wraps(_stock_manager.__wrapped__)  # type: ignore[attr-defined]
def _coalescing_manager(
    group: Any = None, device: Any = None, async_ops: bool = False
) -> Iterator[Any]:
    """Launch the collectives of a block as one operation; none if an exception leaves it."""
    process_group = group or distributed_c10d._get_default_group()
    recorded: dict[Any, Any] = distributed_c10d._world.pg_coalesce_state
    outermost = process_group not in recorded
    try:
        with _stock_manager(group, device, async_ops) as manager:
            yield manager
    except BaseException:
        calls = calls_of(process_group)
        if outermost and calls is not None:
            recorded.pop(process_group, None)
            calls.drop_coalescing()
        raise


@wraps(_stock_batch)
def batch_isend_irecv(p2p_op_list: list[Any]) -> list[Any]:
    """Launch sends and receives as one operation.

    Returns:
        The works to wait for: one per call on a CPU, one in all on a GPU.
    """
    distributed_c10d._check_p2p_op_list(p2p_op_list)
    group = p2p_op_list[0].group or distributed_c10d._get_default_group()
    if not isinstance(group, GroupCalls):  # torch's own groups coalesce their calls
        works: list[Any] = _stock_batch(p2p_op_list)
        return works
    group.start_coalescing()
    try:
        for one in p2p_op_list:
            peer = {"group_dst" if one.op is dist.isend else "group_src": one.group_peer}
            one.op(one.tensor, group=one.group, tag=one.tag, **peer)
    except BaseException:
        group.drop_coalescing()
        raise
    work = group.end_coalescing()
    return work.each() if isinstance(work, GroupWork) else [work] * len(p2p_op_list)


def replace(name: str, stock: object, ours: object) -> None:
    """Put ``ours`` in the place of a function of torch, in each loaded module that has it."""
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is stock:
            setattr(module, name, ours)


def install() -> None:
    """Give torch these two functions; groups of other backends are not changed."""
    replace("_coalescing_manager", _stock_manager, _coalescing_manager)
    replace("batch_isend_irecv", _stock_batch, batch_isend_irecv)
