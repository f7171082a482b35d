"""The reductions of ``torch.distributed`` by the names that rings have for them."""

from typing import Any

import torch
import torch.distributed as dist

_NAMES = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
# By hash, which is the number of an operation: of all ways to read one it takes the fewest calls.
BY_HASH = {hash(kind): name for kind, name in _NAMES.items()}


def arguments_of(op: Any) -> dict[str, Any]:
    """Return ``op``, and ``factor`` where it has one, as the reductions of a ring take them.

    Args:
        op: A ``ReduceOp``, or one of its values.

    Raises:
        NotImplementedError: No ring has this reduction; the text says what to call instead.
    """
    kind = getattr(op, "op", op)
    name = _NAMES.get(kind)
    if name is not None:
        return {"op": name}
    if kind == dist.ReduceOp.PREMUL_SUM:
        factor = op.__getstate__()[1]
        if not isinstance(factor, torch.Tensor):
            return {"op": "premul_sum", "factor": float(factor)}
        raise NotImplementedError(
            "PREMUL_SUM with a tensor as its factor: rings take a number; pass factor.item(), or "
            "multiply before a SUM"
        )
    raise NotImplementedError(f"{kind}: rings have no such reduction; call all_gather, and torch")
