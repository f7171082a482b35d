"""softmax_with_cross_entropy: the loss of labels whose classes are sharded over the ranks."""

import math
from typing import Any, Literal, overload

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.errors import ArgumentError, ShapeError
from commlib.ops.agreement import refuse_together
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.classification.row_statistics import gradient, softmax
from commlib.ops.classification.rows import Rows, accumulates_in
from commlib.ops.classification.shards import (
    check_inputs,
    flattened,
    shards_of,
    takes_registered_op,
)
from commlib.ops.registered.library import like, once, register

Tensor = torch.Tensor
NAME = "softmax_with_cross_entropy"


@overload
def softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ring_id: Ring = ...,
    *,
    ignore_index: int = ...,
    return_softmax: Literal[False] = False,
    use_calc_stream: bool = ...,
) -> Tensor: ...
@overload
def softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ring_id: Ring = ...,
    *,
    ignore_index: int = ...,
    return_softmax: Literal[True],
    use_calc_stream: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ring_id: Ring = ...,
    *,
    ignore_index: int = ...,
    return_softmax: bool,
    use_calc_stream: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def softmax_with_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ring_id: Ring = 0,
    *,
    ignore_index: int = -100,
    return_softmax: bool = False,
    use_calc_stream: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute softmax cross entropy over classes that are sharded over the ranks.

    The loss of a row is log(sum(exp(logits))) - logits[label]. The gradient by logits is local;
    the softmax has no gradient. The hosts exchange facts once, then the ranks do one all_gather.
    Source: operator ``c_softmax_with_cross_entropy``.

    Args:
        logits: [..., D], this rank's classes in rank order; float64, float32, float16 or bfloat16.
            D may differ between ranks.
        label: int32 or int64 ids of the whole axis, the same on every rank: [...], [..., 1], or
            [..., C] for a target of 1/C at each of C ids.
        ring_id: The ring, its id or its name.
        ignore_index: A row with this id has loss 0, gradient 0, and its ordinary softmax.
        return_softmax: Also return the softmax; it is not computed otherwise.
        use_calc_stream: Gather on the caller's current stream. False: gather on the ring's stream.
            The rest runs on the current stream.

    Returns:
        The loss [..., 1] of logits' dtype, computed in float32 or wider; with ``return_softmax``
        (loss, softmax), with this rank's [..., D] of the softmax. A target of -inf has loss inf. A
        row without a finite logit, or with NaN or inf, has loss NaN, as in torch.

    Raises:
        ArgumentError: On every rank, after the gather, for a label that is not a class or differs
            between ranks. To check, a GPU call waits for the loss. In a CUDA graph the loss and
            gradient of such a row are NaN instead. An invalid option: before any launch.
        RingError, DeviceError, DtypeError, ShapeError: Before any launch.
    """
    ring_id = ring_number("softmax_with_cross_entropy", ring_id)
    _check_ignore_index(ignore_index)
    call: Any = _run
    if takes_registered_op(NAME, logits, label, ring_id, use_calc_stream):
        call = _registered_op
    loss, probabilities, *_ = call(
        logits, label, ring_id, ignore_index, return_softmax, use_calc_stream
    )
    return (loss, probabilities.detach()) if return_softmax else loss


def _check_ignore_index(ignore_index: object) -> None:
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int):
        raise ArgumentError(f"{NAME}: ignore_index={ignore_index!r}; expected an int")
    if not -(2**63) <= ignore_index < 2**63:
        raise ArgumentError(f"{NAME}: ignore_index={ignore_index}; expected a number of 64 bits")


def _ids(ring: CommContext, logits: Tensor, label: Tensor) -> int:
    """Return the number of ids per row of ``label`` after checking the arguments."""
    check_inputs(ring, NAME, logits, label)
    lead = tuple(logits.shape[:-1])
    if tuple(label.shape) == lead:
        return 1
    if label.dim() == logits.dim() and tuple(label.shape[:-1]) == lead and label.shape[-1] > 0:
        return label.shape[-1]
    raise ShapeError(
        f"{ring._describe(NAME)}: label has shape {tuple(label.shape)} for logits of shape "
        f"{tuple(logits.shape)}; expected {lead}, {(*lead, 1)}, or {(*lead, 'C')} for soft labels"
    )


def _run(
    logits: Tensor,
    label: Tensor,
    ring_id: int,
    ignore_index: int,
    return_softmax: bool,
    use_calc_stream: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the softmax or an empty tensor, and two tensors for the backward."""
    ring = comm(ring_id)
    with refuse_together(ring, NAME):
        ids = _ids(ring, logits, label)
    x = flattened(logits)
    shards = shards_of(ring, NAME, x, ids, [("ignore_index", ignore_index)], ignore_index)
    labels = label.reshape(len(x), ids).long()
    rows = Rows(x, shards.columns(labels))
    loss, stats = shards.joined(rows, labels, None, use_calc_stream)
    probabilities = (
        softmax(rows, stats).view(logits.shape) if return_softmax else logits.new_empty(0)
    )
    return loss.to(logits.dtype).view(*logits.shape[:-1], 1), probabilities, stats, rows.columns


def _fake(
    logits: Tensor,
    label: Tensor,
    ring_id: int,
    ignore_index: int,
    return_softmax: bool,
    use_calc_stream: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids, count = _ids(comm(ring_id), logits, label), math.prod(logits.shape[:-1])
    return (
        logits.new_empty((*logits.shape[:-1], 1)),
        like(logits) if return_softmax else logits.new_empty(0),
        logits.new_empty((2, count), dtype=accumulates_in(logits.dtype)),
        logits.new_empty((count, ids), dtype=torch.int64),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], *output[2:])


def _backward(ctx: Any, grad: Tensor | None, *rest: object) -> tuple[Tensor | None, ...]:
    by_logits = None if grad is None else _grad_op(grad, *ctx.saved_tensors)
    return by_logits, None, None, None, None, None


def _grad_run(grad: Tensor, logits: Tensor, stats: Tensor, columns: Tensor) -> Tensor:
    weight = grad.reshape(-1).to(stats.dtype).contiguous()
    return gradient(Rows(flattened(logits), columns), stats, weight).view(logits.shape)


def _grad_fake(grad: Tensor, logits: Tensor, stats: Tensor, columns: Tensor) -> Tensor:
    return like(logits)


_grad_op = register(
    f"{NAME}_grad(Tensor grad, Tensor logits, Tensor stats, Tensor columns) -> Tensor",
    _grad_run,
    _grad_fake,
    backward=once(NAME),
    ordered=False,
)
_registered_op = register(
    f"{NAME}(Tensor logits, Tensor label, int ring_id, int ignore_index, bool return_softmax,"
    f" bool use_calc_stream) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
)
