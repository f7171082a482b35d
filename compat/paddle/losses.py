"""The legacy losses over sharded classes, both with a gradient."""

from typing import Any

import torch

from commlib import ops
from commlib.compat.paddle.checks import placed, ring

Tensor = torch.Tensor


def c_softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ignore_index: int = -100,
    ring_id: int = 0,
    rank: int = 0,
    nranks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return (softmax, loss) of labels over the classes of all ranks.

    ``logits``: [..., D], the shard of this rank; ``label``: [..., 1], or [..., C] for soft labels.
    The softmax is [..., D] and without gradient, the loss [..., 1]. Always on the current stream.
    ``nranks`` and ``rank`` are the ring's; both 0, the legacy defaults, leave them to the ring.
    Raises ``ArgumentError`` when they are others, otherwise as ``ops.softmax_with_cross_entropy``.
    Source: operator ``c_softmax_with_cross_entropy``.
    """
    name = "c_softmax_with_cross_entropy"
    placed(name, ring_id, nranks, rank) if nranks or rank else ring(name, ring_id)
    loss, softmax = ops.softmax_with_cross_entropy(
        logits, label, ring_id, ignore_index=ignore_index, return_softmax=True
    )
    return softmax, loss


def margin_cross_entropy(
    logits: Tensor,
    label: Tensor,
    return_softmax: bool = False,
    ring_id: int = 0,
    rank: int = 0,
    nranks: int = 1,
    margin1: float = 1.0,
    margin2: float = 0.5,
    margin3: float = 0.0,
    scale: float = 64.0,
) -> tuple[Tensor | None, Tensor]:
    """Return (softmax, loss) of cosines with a margin at the label, over the classes of all ranks.

    ``logits``: [N, D], the shard of this rank; ``label``: [N] or [N, 1]. The loss is [N, 1]; the
    softmax [N, D] and without gradient, None without ``return_softmax``: upstream's is overwritten
    then. Always on the current stream. Raises ``ArgumentError`` when ``nranks`` or ``rank`` is not
    the ring's, otherwise as ``ops.margin_cross_entropy``. Source: operator
    ``margin_cross_entropy``.
    """
    placed("margin_cross_entropy", ring_id, nranks, rank)
    found: Any = ops.margin_cross_entropy(
        logits,
        label,
        ring_id,
        margin1=margin1,
        margin2=margin2,
        margin3=margin3,
        scale=scale,
        return_softmax=return_softmax,
        reduction=None,
    )
    return found[::-1] if return_softmax else (None, found)
