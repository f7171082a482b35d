"""data_norm: normalise columns by running summaries, and update the summaries."""

from typing import Any, Literal, overload

import torch

from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.errors import DtypeError, ShapeError
from commlib.ops.agreement import Fact, check_ranks_agree, refuse_together
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.normalisation.checks import (
    NAME,
    SUMMARIES,
    check_options,
    check_tensors,
    check_traced,
    check_writable,
)
from commlib.ops.normalisation.summaries import batch_summaries, skipped_groups
from commlib.ops.registered.library import like, once, register, traced

Tensor = torch.Tensor

_TENSORS = ("x", *SUMMARIES, "scale_w", "bias")


@overload
def data_norm(
    x: Tensor,
    batch_size: Tensor,
    batch_sum: Tensor,
    batch_square_sum: Tensor,
    ring_id: Ring = ...,
    *,
    epsilon: float = ...,
    slot_dim: int = ...,
    summary_decay_rate: float = ...,
    scale_w: Tensor | None = ...,
    bias: Tensor | None = ...,
    sync_stats: bool = ...,
    behaviour: str = ...,
    return_moments: Literal[False] = False,
    use_calc_stream: bool = ...,
) -> Tensor: ...
@overload
def data_norm(
    x: Tensor,
    batch_size: Tensor,
    batch_sum: Tensor,
    batch_square_sum: Tensor,
    ring_id: Ring = ...,
    *,
    epsilon: float = ...,
    slot_dim: int = ...,
    summary_decay_rate: float = ...,
    scale_w: Tensor | None = ...,
    bias: Tensor | None = ...,
    sync_stats: bool = ...,
    behaviour: str = ...,
    return_moments: Literal[True],
    use_calc_stream: bool = ...,
) -> tuple[Tensor, Tensor, Tensor]: ...
@overload
def data_norm(
    x: Tensor,
    batch_size: Tensor,
    batch_sum: Tensor,
    batch_square_sum: Tensor,
    ring_id: Ring = ...,
    *,
    epsilon: float = ...,
    slot_dim: int = ...,
    summary_decay_rate: float = ...,
    scale_w: Tensor | None = ...,
    bias: Tensor | None = ...,
    sync_stats: bool = ...,
    behaviour: str = ...,
    return_moments: bool,
    use_calc_stream: bool = ...,
) -> Tensor | tuple[Tensor, Tensor, Tensor]: ...


def data_norm(
    x: Tensor,
    batch_size: Tensor,
    batch_sum: Tensor,
    batch_square_sum: Tensor,
    ring_id: Ring = 0,
    *,
    epsilon: float = 0.0001,
    slot_dim: int = -1,
    summary_decay_rate: float = 0.9999999,
    scale_w: Tensor | None = None,
    bias: Tensor | None = None,
    sync_stats: bool = False,
    behaviour: str = "gpu",
    return_moments: bool = False,
    use_calc_stream: bool = True,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Normalise columns by running summaries, and add this batch to the summaries.

    The result is (x - mean) * scale, with mean = sum / size and scale = sqrt(size / square_sum).
    Source: operator ``data_norm``. Upstream's GPU and CPU kernels differ; both are available on
    every device. Below, dS is (size, sum, square sum) of the batch, and S the three summaries.

    ``behaviour="gpu"``: each backward sets S = S * ``summary_decay_rate`` + dS in place, all three
    or, on an error, none. dS is 1, the mean of x, and the mean of (x - mean)^2 + ``epsilon``; 0
    for N = 0. Only a backward updates: x or a summary must require grad, and the ``.grad`` of a
    summary stays None. In compiled code x must require grad and a summary must not; two forwards
    before the first backward raise a ``RuntimeError`` of torch.

    ``behaviour="cpu"``: summaries are only read. dS is N, the sum of x, and the sum of (x -
    mean)^2 + N * ``epsilon``. It is added to the ``.grad`` of the summaries that require grad.

    The gradient by x is the result's times scale (and ``scale_w``); summaries are constants.

    Args:
        x: [N, C], float32 or float64. All other tensors have its dtype.
        batch_size: [C], the summary size.
        batch_sum: [C], the summary sum.
        batch_square_sum: [C], the summary square sum.
        ring_id: The ring, its id or its name.
        epsilon: 0 to 1e-3, added to the square sum.
        slot_dim: Columns per group ("cpu" only); -1: no groups. A group of a row is skipped if its
            first value is between -1e-7 and 1e-7: its result is 0. Over the n rows that are not
            skipped dS is 1, the mean of x, and the mean of (x - mean)^2 + n * ``epsilon``; 0 for n
            = 0. As upstream, a skipped group has gradient 0 only with ``scale_w``.
        summary_decay_rate: Decay of the summaries per backward ("gpu" only).
        scale_w: [C], with ``bias`` ("cpu" only): factor of the result.
        bias: [C], with ``scale_w``: added after ``scale_w``.
        sync_stats: Add the dS of all ranks ("gpu" only): one exchange between the hosts in a
            forward with gradient, and one all_reduce in its backward, on every rank.
        behaviour: "gpu" or "cpu".
        return_moments: Also return mean and scale.
        use_calc_stream: Run the all_reduce on the caller's current stream. False: on the ring's
            stream. The rest runs on the current stream.

    Returns:
        The result [N, C]; with ``return_moments`` (result, mean [C], scale [C]).

    Raises:
        ArgumentError, ShapeError, DtypeError, DeviceError, RingError: Before any launch; on every
            rank if ranks differ.
    """
    ring_id = ring_number("data_norm", ring_id)
    check_options(epsilon, slot_dim, summary_decay_rate, behaviour, scale_w, bias, sync_stats)
    tensors = x, batch_size, batch_sum, batch_square_sum, scale_w, bias
    trains = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
    call: Any = _run
    if torch.compiler.is_compiling():
        check_traced(behaviour, tensors[1:4])
        call = _registered_op
    elif traced(NAME, use_calc_stream, True, ring_id, **dict(zip(_TENSORS, tensors, strict=True))):
        call = _registered_op
    elif trains:  # before the dispatcher rejects another device
        ring = comm(ring_id)
        with refuse_together(ring, NAME, awaited=sync_stats):
            check_tensors(ring, tensors, slot_dim)
        call = _registered_op
    numbers = float(epsilon), slot_dim, float(summary_decay_rate)
    options = sync_stats, behaviour == "gpu", trains, use_calc_stream
    y, means, scales, _ = call(*tensors, ring_id, *numbers, *options)
    return (y, means.detach(), scales.detach()) if return_moments else y


def _run(
    x: Tensor,
    size: Tensor,
    total: Tensor,
    square: Tensor,
    scale_w: Tensor | None,
    bias: Tensor | None,
    ring_id: int,
    epsilon: float,
    slot_dim: int,
    decay: float,
    sync_stats: bool,
    updates: bool,
    trains: bool,
    use_calc_stream: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the result, mean, scale, and the batch's summaries if a backward needs them."""
    ring = comm(ring_id)
    synced = trains and updates and sync_stats
    with refuse_together(ring, NAME, awaited=synced):
        check_tensors(ring, (x, size, total, square, scale_w, bias), slot_dim)
        if trains and updates:
            check_writable(ring, (size, total, square))
    if synced:
        numbers = Fact("epsilon", epsilon), Fact("summary_decay_rate", decay)
        columns = Fact("columns of x", x.shape[1], ShapeError)
        check_ranks_agree(
            ring, NAME, [columns, Fact("the dtype of x", x.dtype, DtypeError), *numbers]
        )
    x, means, scales = x.detach(), total.detach() / size.detach(), (size / square).detach().sqrt_()
    y = (x - means).mul_(scales)
    if scale_w is not None and bias is not None:
        y.mul_(scale_w.detach()).add_(bias.detach())
    if slot_dim > 0:
        y.masked_fill_(skipped_groups(x, slot_dim), 0)
    batch = batch_summaries(x, means, epsilon, slot_dim, updates) if trains else x.new_empty(0)
    return y, means, scales, batch


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *columns, ring_id, _, slot_dim, _, _, _, trains, _ = rest
    check_tensors(comm(ring_id), (x, *columns), slot_dim)
    width = x.shape[1]
    batch = x.new_empty((3, width) if trains else (0,))
    return like(x), x.new_empty(width), x.new_empty(width), batch


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *summaries, scale_w, _, ring_id, _, slot_dim, decay, sync_stats, updates, _, stream = inputs
    _, means, scales, batch = output
    ctx.save_for_backward(scales, batch, *(() if scale_w is None else (x, means, scale_w)))
    # Not saved: autograd would reject the in-place update of an earlier backward.
    ctx.summaries = [summary.detach() for summary in summaries] if updates else []
    ctx.slot_dim, ctx.options = slot_dim, (ring_id, decay, sync_stats, stream)


def _backward(ctx: Any, grad: Tensor | None, *rest: object) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 14
    scales, batch, *scaled = ctx.saved_tensors
    by_scale = by_bias = None
    if scaled:
        by_x, by_scale, by_bias = _grad_op(grad, scales, *scaled, ctx.slot_dim)
    else:
        by_x = grad * scales
    by_summaries: tuple[Tensor | None, ...] = (None, None, None)
    if ctx.summaries:
        with torch.no_grad():
            updated = _update_op(batch, *ctx.summaries, *ctx.options)
            for summary, value in zip(ctx.summaries, updated.unbind(0), strict=True):
                summary.copy_(value)
    else:
        by_summaries = tuple(row.clone() for row in batch.unbind(0))
    return by_x, *by_summaries, by_scale, by_bias, *([None] * 8)


def _update_run(
    batch: Tensor,
    size: Tensor,
    total: Tensor,
    square: Tensor,
    ring_id: int,
    decay: float,
    sync_stats: bool,
    use_calc_stream: bool,
) -> Tensor:
    """Return [3, C]: the summaries updated with the batch, of all ranks if synchronised."""
    if sync_stats:
        ring, out = comm(ring_id), like(batch)
        needs_result(ring, NAME)
        ring.all_reduce(out, batch, op="sum", use_calc_stream=use_calc_stream)
        batch = out
    return torch.stack([size, total, square]).mul_(decay).add_(batch)


def _grad_run(
    grad: Tensor, scales: Tensor, x: Tensor, means: Tensor, scale_w: Tensor, slot_dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients by x, scale_w and bias."""
    if slot_dim > 0:
        grad = grad.masked_fill(skipped_groups(x, slot_dim), 0)
    by_scale = (x - means).mul_(scales).mul_(grad).sum(0)
    return (grad * scales).mul_(scale_w), by_scale, grad.sum(0)


def _grad_fake(
    grad: Tensor, scales: Tensor, x: Tensor, *rest: object
) -> tuple[Tensor, Tensor, Tensor]:
    return like(x), like(scales), like(scales)


_grad_op = register(
    f"{NAME}_grad(Tensor grad, Tensor scales, Tensor x, Tensor means, Tensor scale_w,"
    f" int slot_dim) -> (Tensor, Tensor, Tensor)",
    _grad_run,
    _grad_fake,
    backward=once(NAME),
    ordered=False,
)
_update_op = register(
    f"{NAME}_update(Tensor batch, Tensor size, Tensor total, Tensor square, int ring_id,"
    f" float decay, bool sync_stats, bool use_calc_stream) -> Tensor",
    _update_run,
    lambda batch, *rest: like(batch),
)
_registered_op = register(
    f"{NAME}(Tensor x, Tensor size, Tensor total, Tensor square, Tensor? scale_w, Tensor? bias,"
    f" int ring_id, float epsilon, int slot_dim, float decay, bool sync_stats, bool updates,"
    f" bool trains, bool use_calc_stream) -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
)
