"""Legacy losses over sharded classes. Both have a gradient."""

from typing import Any

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of, ring_of_rank

Tensor = torch.Tensor


def c_softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ignore_index: int = -100,
    ring_id: int = 0,
    rank: int = 0,
    nranks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the softmax and the cross-entropy of labels over the classes of all ranks.

    Source: operator ``c_softmax_with_cross_entropy``. It runs on the current stream.

    Args:
        logits: [..., D], the classes of this rank.
        label: [..., 1] class ids, or [..., C] for soft labels.
        ignore_index: Label whose loss and gradient are 0.
        ring_id: The ring.
        rank: This rank's position in the ring.
        nranks: Size of the ring. If ``rank`` and ``nranks`` are both 0, neither is checked.

    Returns:
        The softmax, [..., D] without a gradient, and the loss, [..., 1].

    Raises:
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's.
        CommError: As ``ops.softmax_with_cross_entropy``.
    """
    name = "c_softmax_with_cross_entropy"
    ring_of_rank(name, ring_id, nranks, rank) if nranks or rank else ring_of(name, ring_id)
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
    """Return the softmax and loss of cosines with a margin at the label, over all ranks' classes.

    Source: operator ``margin_cross_entropy``. It runs on the current stream.

    Args:
        logits: [N, D] cosines of this rank's classes.
        label: [N] or [N, 1] class ids.
        return_softmax: True also returns the softmax.
        ring_id: The ring.
        rank: This rank's position in the ring.
        nranks: Size of the ring.
        margin1: Factor of the angle.
        margin2: Summand of the angle.
        margin3: Subtrahend of the cosine.
        scale: Factor of the logits.

    Returns:
        The softmax, [N, D] without a gradient, and the loss, [N, 1]. Without ``return_softmax``
        the softmax is None; upstream overwrites it then.

    Raises:
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's.
        CommError: As ``ops.margin_cross_entropy``.
    """
    ring_of_rank("margin_cross_entropy", ring_id, nranks, rank)
    result: Any = ops.margin_cross_entropy(
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
    return result[::-1] if return_softmax else (None, result)
