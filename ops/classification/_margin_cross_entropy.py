"""margin_cross_entropy: the loss of cosines with a margin at the label, over sharded classes."""

import math
from typing import Any, Literal, overload

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.errors import ArgumentError, ShapeError
from commlib.ops.agreement import refuse_together
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.classification.row_statistics import gradient, softmax, targets
from commlib.ops.classification.rows import Rows, accumulates_in
from commlib.ops.classification.shards import check_inputs, shards_of, takes_registered_op
from commlib.ops.registered.library import like, once, register

Tensor = torch.Tensor
Margins = tuple[float, float, float]

NAME = "margin_cross_entropy"
REDUCTIONS = ("mean", "sum", "none")
NAMES = ("margin1", "margin2", "margin3", "scale")
LEAST = 1e-8  # a margin closer to its neutral value has no effect


@overload
def margin_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ring_id: Ring = ...,
    *,
    margin1: float = ...,
    margin2: float = ...,
    margin3: float = ...,
    scale: float = ...,
    return_softmax: Literal[False] = False,
    reduction: str | None = ...,
    use_calc_stream: bool = ...,
) -> Tensor: ...
@overload
def margin_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ring_id: Ring = ...,
    *,
    margin1: float = ...,
    margin2: float = ...,
    margin3: float = ...,
    scale: float = ...,
    return_softmax: Literal[True],
    reduction: str | None = ...,
    use_calc_stream: bool = ...,
) -> tuple[Tensor, Tensor]: ...
@overload
def margin_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ring_id: Ring = ...,
    *,
    margin1: float = ...,
    margin2: float = ...,
    margin3: float = ...,
    scale: float = ...,
    return_softmax: bool,
    reduction: str | None = ...,
    use_calc_stream: bool = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


def margin_cross_entropy(
    logits: Tensor,
    label: Tensor,
    ring_id: Ring = 0,
    *,
    margin1: float = 1.0,
    margin2: float = 0.5,
    margin3: float = 0.0,
    scale: float = 64.0,
    return_softmax: bool = False,
    reduction: str | None = "mean",
    use_calc_stream: bool = True,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute cross entropy of cosines with a margin at the label, over sharded classes.

    At the label the cosine x becomes cos(margin1 * acos(x) + margin2) - margin3 (SphereFace,
    ArcFace, CosFace); all cosines are multiplied by ``scale``. The gradient by logits is local;
    the softmax has no gradient. At x = -1 and 1, where upstream divides by 0, the slope is that of
    the nearest number inside. Source: operator ``margin_cross_entropy``.

    Args:
        logits: [N, D] cosines, this rank's classes in rank order; float64, float32, float16 or
            bfloat16. D may differ between ranks.
        label: [N] or [N, 1], int32 or int64 ids of the whole axis, the same on every rank.
        ring_id: The ring, its id or its name.
        margin1: Factor of the angle.
        margin2: Added to the angle, in radians.
        margin3: Subtracted from the cosine.
        scale: Factor of all cosines, above 0.
        return_softmax: Also return the softmax; it is not computed otherwise.
        reduction: "mean", "sum", or "none" (the same as None).
        use_calc_stream: Gather on the caller's current stream. False: gather on the ring's stream.
            The rest runs on the current stream.

    Returns:
        The loss of logits' dtype, computed in float32 or wider: 0-D for "mean" and "sum", [N, 1]
        otherwise. With ``return_softmax`` (loss, softmax), with this rank's [N, D] of the softmax.

    Raises:
        ArgumentError: On every rank, after the gather, for a label that is not a class or differs
            between ranks. It is also raised there for a label's cosine outside [-1, 1] if margin1
            or margin2 acts. To check, a GPU call waits for the loss. In a CUDA graph the loss and
            gradient of such a row are NaN instead. An invalid option: before any launch.
        RingError, DeviceError, DtypeError, ShapeError: Before any launch.
    """
    ring_id = ring_number("margin_cross_entropy", ring_id)
    numbers = _numbers((margin1, margin2, margin3, scale))
    if reduction not in (*REDUCTIONS, None):
        raise ArgumentError(f"{NAME}: reduction={reduction!r}; expected one of {REDUCTIONS}, None")
    call: Any = _run
    if takes_registered_op(NAME, logits, label, ring_id, use_calc_stream):
        call = _registered_op
    options = *numbers, return_softmax, reduction or "none", use_calc_stream
    loss, probabilities, *_ = call(logits, label, ring_id, *options)
    return (loss, probabilities.detach()) if return_softmax else loss


def _numbers(values: tuple[Any, ...]) -> tuple[float, ...]:
    """Return margins and scale as floats; raises ``ArgumentError`` for values that give NaN."""
    for name, value in zip(NAMES, values, strict=True):
        # compared, not math.isfinite: that can't be traced once a number varies between calls
        if not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
            raise ArgumentError(f"{NAME}: {name}={value!r}; expected a finite number")
    if values[3] <= 0:
        raise ArgumentError(f"{NAME}: scale={values[3]!r}; expected a number above 0")
    return tuple(float(value) for value in values)


def _check(ring: CommContext, logits: Tensor, label: Tensor) -> None:
    check_inputs(ring, NAME, logits, label)
    if logits.dim() != 2 or tuple(label.shape) not in (logits.shape[:1], (logits.shape[0], 1)):
        raise ShapeError(
            f"{ring._describe(NAME)}: logits has shape {tuple(logits.shape)} and label "
            f"{tuple(label.shape)}; expected [N, D] and [N] or [N, 1]"
        )


def _run(
    logits: Tensor,
    label: Tensor,
    ring_id: int,
    margin1: float,
    margin2: float,
    margin3: float,
    scale: float,
    return_softmax: bool,
    reduction: str,
    use_calc_stream: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the loss, the softmax or an empty tensor, and two tensors for the backward."""
    ring = comm(ring_id)
    with refuse_together(ring, NAME):
        _check(ring, logits, label)
    x, margins = logits.detach(), (margin1, margin2, margin3)
    # Adding 0 makes one number of both zeros.
    options = [(n, v + 0.0) for n, v in zip(NAMES, (*margins, scale), strict=True)]
    shards = shards_of(ring, NAME, x, 1, options)
    labels = label.reshape(-1, 1).long()
    rows = Rows(x, shards.columns(labels), scale)
    cosines = targets(rows)[:, 0]
    rows = rows._replace(aim=_with_margin(cosines, margins).mul_(scale))
    checked = cosines if _turns(margins) else None
    loss, stats = shards.joined(rows, labels, checked, use_calc_stream)
    probabilities = softmax(rows, stats) if return_softmax else logits.new_empty(0)
    return _reduced(loss, reduction).to(logits.dtype), probabilities, stats, rows.columns


def _turns(margins: Margins) -> bool:
    """Return True if the margins change the angle."""
    return abs(margins[0] - 1) > LEAST or abs(margins[1]) > LEAST


def _turned(cosines: Tensor, margins: Margins) -> Tensor:
    """Return the angle with the margins."""
    angle = cosines.acos()
    if abs(margins[0] - 1) > LEAST:
        angle = angle * margins[0]
    return angle + margins[1] if abs(margins[1]) > LEAST else angle


def _with_margin(cosines: Tensor, margins: Margins) -> Tensor:
    """Return the labels' cosines with the margin, a new tensor."""
    moved = _turned(cosines, margins).cos_() if _turns(margins) else cosines.clone()
    return moved.sub_(margins[2]) if abs(margins[2]) > LEAST else moved


def _slope(cosines: Tensor, margins: Margins) -> Tensor | None:
    """Return the derivative of ``_with_margin``; None where it is 1."""
    if not _turns(margins):
        return None
    inside = 1 - torch.finfo(cosines.dtype).eps / 2
    x = cosines.clamp(-inside, inside)
    return _turned(x, margins).sin_().mul_(margins[0]).div_((1 - x * x).sqrt_())


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction == "mean":
        return loss.mean()
    return loss.sum() if reduction == "sum" else loss.unsqueeze(1)


def _fake(
    logits: Tensor, label: Tensor, ring_id: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check(comm(ring_id), logits, label)
    *_, return_softmax, reduction, _ = options
    count = logits.shape[0]
    return (
        logits.new_empty((count, 1) if reduction == "none" else ()),
        like(logits) if return_softmax else logits.new_empty(0),
        logits.new_empty((2, count), dtype=accumulates_in(logits.dtype)),
        logits.new_empty((count, 1), dtype=torch.int64),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(inputs[0], *output[2:])
    ctx.saved = *inputs[3:7], inputs[8] == "mean"


def _backward(ctx: Any, grad: Tensor | None, *rest: object) -> tuple[Tensor | None, ...]:
    by_logits = None if grad is None else _grad_op(grad, *ctx.saved_tensors, *ctx.saved)
    return by_logits, *([None] * 9)


def _grad_run(
    grad: Tensor,
    logits: Tensor,
    stats: Tensor,
    columns: Tensor,
    margin1: float,
    margin2: float,
    margin3: float,
    scale: float,
    mean: bool,
) -> Tensor:
    margins = margin1, margin2, margin3
    rows = Rows(logits.detach(), columns, scale)
    cosines = targets(rows)[:, 0]
    aim = _with_margin(cosines, margins).mul_(scale)
    rows = rows._replace(aim=aim, slope=_slope(cosines, margins))
    weight = grad.reshape(-1).to(stats.dtype) * (scale / max(1, len(logits)) if mean else scale)
    return gradient(rows, stats, weight.expand(len(logits)).contiguous())


def _grad_fake(grad: Tensor, logits: Tensor, *rest: object) -> Tensor:
    return like(logits)


_grad_op = register(
    f"{NAME}_grad(Tensor grad, Tensor logits, Tensor stats, Tensor columns, float margin1,"
    f" float margin2, float margin3, float scale, bool mean) -> Tensor",
    _grad_run,
    _grad_fake,
    backward=once(NAME),
    ordered=False,
)
_registered_op = register(
    f"{NAME}(Tensor logits, Tensor label, int ring_id, float margin1, float margin2,"
    f" float margin3, float scale, bool return_softmax, str reduction, bool use_calc_stream)"
    f" -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
)
