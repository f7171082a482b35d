"""The works that DDP's reducer keeps in C++ for uneven inputs, ``with ddp.join():``.

A work of ours is waited for by its Python object. Torch keeps that object alive for works that a
group returns to C++, and for those of functional collectives. It does not for the one work that
Python gives to a reducer: without its object, that work's ``wait`` would never return.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from commlib.compat.c10d.work import GroupWork

_NAME = "_set_forward_pass_work_handle"
_stock: Callable[..., None] | None = getattr(c10d.Reducer, _NAME, None)
_kept = WeakKeyDictionary[Any, GroupWork]()  # by reducer, as long as C++ has it


def _set_work(reducer: Any, work: dist.Work, *args: Any) -> None:
    """Give a reducer the work whose result is the divisor of the next gradients."""
    assert _stock is not None
    _stock(reducer, work, *args)
    if isinstance(work, GroupWork):
        _kept[reducer] = work
    else:
        _kept.pop(reducer, None)


def install() -> None:
    """Give reducers this method; works of other backends are not kept."""
    if _stock is not None:
        setattr(c10d.Reducer, _NAME, wraps(_stock)(_set_work))
