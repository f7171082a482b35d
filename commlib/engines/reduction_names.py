"""The names of reductions: in lower or upper case, or torch's enum."""

from typing import Any, Literal, TypeAlias, cast

import torch.distributed as dist

ReductionName: TypeAlias = Literal["sum", "prod", "min", "max", "avg"]
UpperName: TypeAlias = Literal["SUM", "PROD", "MIN", "MAX", "AVG"]
Reduction: TypeAlias = ReductionName | UpperName | dist.ReduceOp.RedOpType | dist.ReduceOp
# What a ring takes: some engines have more than what every operator takes.
LowerName: TypeAlias = ReductionName | Literal["premul_sum", "band", "bor", "bxor"]
RingReduction: TypeAlias = Reduction | LowerName | Literal["PREMUL_SUM", "BAND", "BOR", "BXOR"]

OPS = ("sum", "max", "min", "prod", "avg", "premul_sum")
BITWISE = ("band", "bor", "bxor")  # where the engine has them: gloo
NAMES = frozenset(OPS + BITWISE)
TORCH_NAMES: dict[Any, LowerName] = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PREMUL_SUM: "premul_sum",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}


def is_torch_reduction(value: Any) -> bool:
    """Return True for a reduction of ``torch.distributed``, which equals an int too."""
    return isinstance(value, (dist.ReduceOp, dist.ReduceOp.RedOpType))


def reduction_name(op: Any) -> LowerName:
    """Return the lower-case name of ``op``; anything else is left to the engine.

    A premul_sum of torch has its factor inside, where no ring looks for it.
    """
    if isinstance(op, str) and op.lower() in NAMES:
        return cast(LowerName, op.lower())
    if is_torch_reduction(op):
        kind = getattr(op, "op", op)
        if kind is op or kind != dist.ReduceOp.PREMUL_SUM:
            op = TORCH_NAMES.get(kind, op)
    return cast(LowerName, op)
