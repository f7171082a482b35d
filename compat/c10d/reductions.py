"""The reductions of ``torch.distributed`` by the names that rings have for them."""

from typing import Any

import torch

from commlib.engines.reduction_names import TORCH_NAMES

# By hash, which is the number of an operation: of all ways to read one it takes the fewest calls.
# A premul_sum also has a factor.
BY_HASH = {hash(kind): name for kind, name in TORCH_NAMES.items() if name != "premul_sum"}


def arguments_of(op: Any) -> dict[str, Any]:
    """Return ``op``, and ``factor`` where it has one, as the reductions of a ring take them.

    Args:
        op: A ``ReduceOp``, or one of its values.

    Raises:
        NotImplementedError: No ring has this reduction; the text says what to call instead.
    """
    kind = getattr(op, "op", op)
    name = TORCH_NAMES.get(kind)
    if name is None:
        raise NotImplementedError(
            f"{kind}: rings have no such reduction; call all_gather, and torch"
        )
    return {"op": name, "factor": _factor(op)} if name == "premul_sum" else {"op": name}


def _factor(op: Any) -> float:
    factor = op.__getstate__()[1]
    if isinstance(factor, torch.Tensor):
        raise NotImplementedError(
            "PREMUL_SUM with a tensor as its factor: rings take a number; pass factor.item(), or "
            "multiply before a SUM"
        )
    return float(factor)
