"""Reductions and options of calls in the terms of c10d."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from commlib.deadlines import Deadline
from commlib.engines.reduction_names import BITWISE
from commlib.engines.reductions import UNSIGNED, ReductionSpec, factor_of
from commlib.errors import ReductionError

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "avg": dist.ReduceOp.AVG,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
    "premul_sum": dist.ReduceOp.SUM,  # of copies that are multiplied first
}


@dataclass(frozen=True, eq=False)  # equal by identity: a key at every call
class Plan:
    """A reduction in c10d's terms; the options of the most frequent call are made once."""

    dtype: torch.dtype
    name: str
    op: Any
    divides: bool
    all_reduce: Any
    factor: torch.Tensor | None = None


def plan_of(dtype: torch.dtype, reduction: ReductionSpec, *, on_host: bool) -> Plan:
    """Return the plan of a reduction of tensors of ``dtype``.

    Raises:
        ReductionError: NCCL has no such reduction.
    """
    if not on_host and reduction.op in BITWISE:
        raise ReductionError(
            f"{reduction.op} of {dtype} is refused: NCCL has no bitwise reduction; call "
            f"all_gather and combine the parts with torch.bitwise_{reduction.op[1:]}"
        )
    # gloo has no mean on every torch we support, and unsigned integers travel as signed ones, whose
    # mean is another one: sum, then divide.
    divides = reduction.op == "avg" and (on_host or dtype in UNSIGNED)
    op = dist.ReduceOp.SUM if divides else _OPS[reduction.op]
    options = options_of(c10d.AllreduceOptions)
    options.reduceOp = op
    return Plan(reduction.dtype, reduction.op, op, divides, options, factor_of(reduction))


def options_of(kind: Any, limit: Deadline | None = None) -> Any:
    """Return options of a launch on the caller's current stream, and with its deadline."""
    options = kind()
    if hasattr(options, "asyncOp"):  # since torch 2.8; before, torch chooses the stream
        options.asyncOp = False
    if limit is not None:
        options.timeout = limit.timedelta()
    return options
