"""The reductions of ``torch.distributed`` by the names that rings have for them."""

from typing import Any

import torch
import torch.distributed as dist

from commlib.engines.reduction_names import TORCH_NAMES

# By hash, which is the number of an operation: of all ways to read one it takes the fewest calls.
BY_HASH = {hash(kind): name for kind, name in TORCH_NAMES.items()}


def arguments_of(op: Any) -> dict[str, Any]:
    """Return ``op``, and ``factor`` where it has one, as the reductions of a ring take them.

    Args:
        op: A ``ReduceOp``, or one of its values.

    Raises:
        NotImplementedError: No ring has this reduction; the text says what to call instead.
    """
    kind = getattr(op, "op", op)
    name = TORCH_NAMES.get(kind)
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
