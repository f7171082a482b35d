"""The losses of ``fleet.layers.mpu.mp_ops``, over the classes of all ranks of a group."""

import torch

from commlib.compat.paddle.distributed.groups import Group, member_ring
from commlib.compat.paddle.losses import (
    c_softmax_with_cross_entropy,
    c_softmax_with_multi_label_cross_entropy,
)
from commlib.core.context import CommContext
from commlib.errors import ArgumentError, ShapeError
from commlib.ops.agreement import check_ranks_agree

Tensor = torch.Tensor


def _c_softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    group: Group | None = None,
    return_softmax: bool = False,
    ignore_index: int = -100,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return the cross-entropy of labels over the classes of all ranks.

    Args:
        logits: [..., D], the classes of this rank.
        label: [...] or [..., 1] class ids.
        group: Default: the group of all ranks.
        return_softmax: True also returns the softmax, [..., D] without a gradient.
        ignore_index: Label whose loss and gradient are 0.

    Returns:
        The loss, [..., 1]; or the loss and the softmax.

    Raises:
        ArgumentError: A row has no label, or more labels than there are classes on all ranks.
        ShapeError: ``label`` has another number of dims.
    """
    name = "_c_softmax_with_cross_entropy"
    ring = member_ring(name, group)
    if ring is None:
        return None
    label = _with_classes(name, ring, logits, label)
    softmax, loss = c_softmax_with_cross_entropy(
        logits, label, ignore_index, ring.ring_id, ring.rank, ring.size
    )
    return (loss, softmax) if return_softmax else loss


def _c_softmax_with_multi_label_cross_entropy(
    logits: Tensor,
    label: Tensor,
    smooth_weight: Tensor,
    group: Group | None = None,
    return_softmax: bool = False,
    ignore_index: int = -100,
    sum_multi_label_loss: bool = True,
) -> Tensor | tuple[Tensor, Tensor] | None:
    """Return the weighted cross-entropy of several labels over the classes of all ranks.

    Args:
        logits: [..., D], the classes of this rank.
        label: [..., C] class ids, or [...] for one label.
        smooth_weight: The weight of each label, in the shape of ``label``.
        group: Default: the group of all ranks.
        return_softmax: True also returns the softmax, [..., D] without a gradient.
        ignore_index: Label whose loss and gradient are 0.
        sum_multi_label_loss: True adds the losses of a row.

    Returns:
        The loss, [..., 1] or [..., C]; or the loss and the softmax.

    Raises:
        ArgumentError: A label is not a class, a row has no label, or it has more labels than there
            are classes on all ranks.
        ShapeError: The shapes do not fit.
    """
    name = "_c_softmax_with_multi_label_cross_entropy"
    ring = member_ring(name, group)
    if ring is None:
        return None
    label = _with_classes(name, ring, logits, label)
    if smooth_weight.dim() == label.dim() - 1:
        smooth_weight = smooth_weight.unsqueeze(-1)
    ring_args = ring.ring_id, ring.rank, ring.size
    softmax, loss = c_softmax_with_multi_label_cross_entropy(
        logits, label, smooth_weight, ignore_index, sum_multi_label_loss, *ring_args
    )
    return (loss, softmax) if return_softmax else loss


def _with_classes(name: str, ring: CommContext, logits: Tensor, label: Tensor) -> Tensor:
    """Return ``label`` with as many dims as ``logits``, the last one of labels per row."""
    if label.dim() not in (logits.dim() - 1, logits.dim()):
        raise ShapeError(
            f"{ring._describe(name)}: label has shape {tuple(label.shape)} with logits of shape "
            f"{tuple(logits.shape)}; expected one dim less, or as many"
        )
    label = label if label.dim() == logits.dim() else label.unsqueeze(-1)
    if 1 <= label.shape[-1] <= ring.size or torch.compiler.is_compiling():
        return label  # each rank has a class; compiled code has no exchange between the hosts
    sizes = check_ranks_agree(ring, name, [], [logits.shape[-1]])
    classes = sum(size for (size,) in sizes)
    if not 1 <= label.shape[-1] <= classes:
        raise ArgumentError(
            f"{ring._describe(name)}: label has {label.shape[-1]} labels per row; expected 1 to "
            f"{classes}, the number of classes of all ranks"
        )
    return label
