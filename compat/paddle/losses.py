"""Legacy losses over sharded classes. Both have a gradient."""

from typing import Any

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of, ring_of_rank
from commlib.core.context import CommContext
from commlib.errors import ArgumentError, ShapeError
from commlib.ops.agreement import refuse_together
from commlib.ops.classification.shards import flattened, shards_of
from commlib.streams import sees_capture

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


def c_softmax_with_multi_label_cross_entropy(
    logits: Tensor,
    label: Tensor,
    smooth_weight: Tensor,
    ignore_index: int = -100,
    sum_multi_label_loss: bool = True,
    ring_id: int = 0,
    rank: int = 0,
    nranks: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the softmax and the weighted cross-entropy of several labels over all ranks' classes.

    Source: operator ``c_softmax_with_multi_label_cross_entropy``. It runs on the current stream.
    The gradient is that of the loss, for any weights. Upstream's assumes that the weights of a row
    add up to 1, and, without the sum, that its labels have one gradient.

    Args:
        logits: [..., D], the classes of this rank; D may differ between ranks.
        label: [..., C] int32 or int64 class ids, the same on every rank.
        smooth_weight: [..., C] weight of each label.
        ignore_index: Label whose loss and gradient are 0.
        sum_multi_label_loss: True adds the losses of a row.
        ring_id: The ring.
        rank: This rank's position in the ring.
        nranks: Size of the ring. If ``rank`` and ``nranks`` are both 0, neither is checked.

    Returns:
        The softmax, [..., D] without a gradient, and the loss, [..., 1] or [..., C].

    Raises:
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's, or, outside captures, a label
            is not a class. In a graph the loss of such a label is NaN.
        ShapeError: The shapes of ``logits``, ``label`` and ``smooth_weight`` do not fit.
        CommError: As ``ops.all_reduce``.
    """
    name = "c_softmax_with_multi_label_cross_entropy"
    ring = ring_of_rank(name, ring_id, nranks, rank) if nranks or rank else ring_of(name, ring_id)
    start, total_classes = _bounds(ring, name, logits, label, smooth_weight, ignore_index)
    classes = logits.shape[-1]
    ignored = label == ignore_index
    unknown = ((label < 0) | (label >= total_classes)) & ~ignored
    if not torch.compiler.is_compiling() and not sees_capture(label) and bool(unknown.any()):
        raise ArgumentError(
            f"{ring._describe(name)}: label {int(label[unknown][0])}; expected a class, 0 to "
            f"{total_classes - 1}, or ignore_index={ignore_index}"
        )
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    x = x - ops.all_reduce(x.detach().amax(-1, keepdim=True), ring_id, op="max")
    index = label.long() - start
    targets = x.gather(-1, index.clamp(0, classes - 1)).where((index >= 0) & (index < classes), 0)
    exponentials = x.exp()
    parts = torch.cat([exponentials.sum(-1, keepdim=True), targets], dim=-1)
    total, targets = ops.all_reduce(parts, ring_id, backward="identity").split(
        [1, label.shape[-1]], dim=-1
    )
    loss = ((total.log() - targets) * smooth_weight).masked_fill(unknown, torch.nan)
    loss = loss.masked_fill(ignored, 0)
    if sum_multi_label_loss:
        loss = loss.sum(-1, keepdim=True)
    return (exponentials / total).detach().to(logits.dtype), loss.to(logits.dtype)


def _bounds(
    ring: CommContext,
    name: str,
    logits: Tensor,
    label: Tensor,
    smooth_weight: Tensor,
    ignore_index: int,
) -> tuple[int | Tensor, int | Tensor]:
    """Return this rank's first class and the number of all classes, after checking the call."""
    if torch.compiler.is_compiling():  # compiled code has no exchange between the hosts
        _check_labels(ring, name, logits, label, smooth_weight)
        classes = torch.full((1,), logits.shape[-1], device=logits.device)
        sizes = ops.all_gather(classes, ring.ring_id)
        return sizes[: ring.rank].sum(), sizes.sum()
    with refuse_together(ring, name):
        _check_labels(ring, name, logits, label, smooth_weight)
    options = [("ignore_index", ignore_index)]
    shards = shards_of(ring, name, flattened(logits), label.shape[-1], options)
    return shards.start, shards.total


def _check_labels(
    ring: CommContext, name: str, logits: Tensor, label: Tensor, smooth_weight: Tensor
) -> None:
    shapes = [tuple(each.shape) for each in (logits, label, smooth_weight)]
    fit = label.shape == smooth_weight.shape and label.shape[:-1] == logits.shape[:-1]
    if not fit or 0 in (label.dim(), logits.dim()) or 0 in (label.shape[-1:] + logits.shape[-1:]):
        raise ShapeError(
            f"{ring._describe(name)}: logits, label and smooth_weight have shapes {shapes}; "
            f"expected [..., D], [..., C] and [..., C], with D and C of 1 or more"
        )
