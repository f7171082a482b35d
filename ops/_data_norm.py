"""data_norm: normalise columns by summaries of everything seen, and fold this batch into them."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.core.validation import check_tensor, overlaps_itself
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.agreement import Fact, check_ranks_agree, refuse_together
from commlib.ops.registered.library import like, once, register, traced

Tensor = torch.Tensor

NAME = "data_norm"
DTYPES = (torch.float32, torch.float64)
SUMMARIES = ("batch_size", "batch_sum", "batch_square_sum")
_NAMES = ("x", *SUMMARIES, "scale_w", "bias")
LARGEST_EPSILON = 1e-3
NOTHING_SHOWN = 1e-7  # a group of columns whose first value is nearer to 0 is skipped


def data_norm(
    x: Tensor,
    batch_size: Tensor,
    batch_sum: Tensor,
    batch_square_sum: Tensor,
    ring_id: int = 0,
    *,
    epsilon: float = 1e-4,
    slot_dim: int = -1,
    summary_decay_rate: float = 0.9999999,
    scale_w: Tensor | None = None,
    bias: Tensor | None = None,
    sync_stats: bool = False,
    behaviour: str = "gpu",
    return_moments: bool = False,
    use_calc_stream: bool = True,
) -> Any:
    """Return (x - mean) * scale, with mean = sum / size and scale = sqrt(size / square_sum).

    ``x``: [N, C], float32 or float64; the three summaries: [C] of its dtype; the result: [N, C],
    with ``return_moments`` (result, mean, scale). Upstream's kernels for GPUs and CPUs differ; both
    exist here on every device. dS below are size, sum and square sum of the batch.
    ``behaviour="gpu"``: each backward sets S = S * ``summary_decay_rate`` + dS in the tensors given
    here, dS = 1, mean of x, mean of (x - mean)^2 + ``epsilon``, all 0 for N = 0; all three or, if
    it fails, none. With ``sync_stats`` the dS of all ranks are added: one exchange between the
    hosts in a forward with gradient, one all-reduce in its backward, on every rank. Nothing is
    updated without a backward: x, or a summary (its ``.grad`` stays None), must require grad; in
    compiled code x must, and a summary may not.
    Compiled code can't run two forwards before the first one's backward: torch then refuses the
    second backward with a ``RuntimeError``, and its update does not happen.
    ``behaviour="cpu"``: summaries are only read; dS = N, sum of x, sum of (x - mean)^2 + N *
    ``epsilon`` arrive in the ``.grad`` of those that require grad, whatever the gradient of the
    result is. With ``scale_w`` and ``bias``, both [C], the result is (x - mean) * scale * scale_w +
    bias. ``slot_dim`` = k cuts each row in groups of k columns; one whose first value lies between
    -1e-7 and 1e-7 has nothing to show: its result is 0. Over the n rows that show something
    dS = 1, mean of x, mean of (x - mean)^2 + n * ``epsilon``; all 0 for n = 0.
    Gradient by x: the result's times scale (and scale_w); as upstream, a skipped group has 0 only
    where there is a ``scale_w``. Summaries count as constants. Runs on the caller's stream; the
    all-reduce on the ring's with ``use_calc_stream=False``. ``ArgumentError``, ``ShapeError``,
    ``DtypeError``, ``DeviceError`` and ``RingError`` come before any launch; on every rank where
    ranks differ. Source: operator ``data_norm``.
    """
    _check_options(epsilon, slot_dim, summary_decay_rate, behaviour, scale_w, bias, sync_stats)
    tensors = x, batch_size, batch_sum, batch_square_sum, scale_w, bias
    trains = torch.is_grad_enabled() and any(getattr(t, "requires_grad", False) for t in tensors)
    call: Any = _run
    if torch.compiler.is_compiling():
        _check_traced(behaviour, tensors[1:4])
        call = _registered_op
    elif traced(NAME, use_calc_stream, True, ring_id, **dict(zip(_NAMES, tensors, strict=True))):
        call = _registered_op
    elif trains:  # the dispatcher would answer for other devices by itself
        ring = comm(ring_id)
        with refuse_together(ring, NAME, awaited=sync_stats):
            _check(ring, tensors, slot_dim)
        call = _registered_op
    numbers = float(epsilon), slot_dim, float(summary_decay_rate)
    how = sync_stats, behaviour == "gpu", trains, use_calc_stream
    y, means, scales, _ = call(*tensors, ring_id, *numbers, *how)
    return (y, means.detach(), scales.detach()) if return_moments else y


def _check_traced(behaviour: str, summaries: Sequence[Tensor]) -> None:
    """Refuse what not every torch can trace: a backward that writes to what wants a gradient."""
    if behaviour == "gpu" and any(summary.requires_grad for summary in summaries):
        raise ArgumentError(
            f"{NAME}: compiled with behaviour='gpu', a summary requires grad, but its .grad stays "
            f"None; call batch_size.requires_grad_(False), and the same on the other two"
        )


def _check_options(
    epsilon: float,
    slot_dim: int,
    decay: float,
    behaviour: str,
    scale_w: Tensor | None,
    bias: Tensor | None,
    sync_stats: bool,
) -> None:
    if behaviour not in ("gpu", "cpu"):
        raise ArgumentError(f"{NAME}: behaviour={behaviour!r}; expected 'gpu' or 'cpu'")
    if not isinstance(epsilon, (int, float)) or not 0 <= epsilon <= LARGEST_EPSILON:
        raise ArgumentError(
            f"{NAME}: epsilon={epsilon!r}; expected a number from 0 to {LARGEST_EPSILON}; "
            f"pass epsilon=1e-4"
        )
    if not isinstance(decay, (int, float)) or not -math.inf < decay < math.inf:
        raise ArgumentError(f"{NAME}: summary_decay_rate={decay!r}; expected a finite number")
    if isinstance(slot_dim, bool) or not isinstance(slot_dim, int) or not slot_dim >= -1:
        raise ArgumentError(f"{NAME}: slot_dim={slot_dim!r}; expected columns per group, or -1")
    if slot_dim == 0:
        raise ArgumentError(f"{NAME}: slot_dim=0; expected columns per group; pass slot_dim=-1")
    if (scale_w is None) != (bias is None):
        missing = "scale_w" if scale_w is None else "bias"
        raise ArgumentError(f"{NAME}: {missing} is missing; pass scale_w= and bias=, or neither")
    for name, given in (("slot_dim", slot_dim > 0), ("scale_w and bias", scale_w is not None)):
        if given and behaviour == "gpu":
            raise ArgumentError(
                f"{NAME}: {name} with behaviour='gpu', which does not support it; "
                f"pass behaviour='cpu'"
            )
    if sync_stats and behaviour == "cpu":
        raise ArgumentError(
            f"{NAME}: sync_stats=True with behaviour='cpu', which updates no summaries; "
            f"pass behaviour='gpu', or all_reduce their .grad"
        )


def _check(ring: CommContext, tensors: Sequence[Any], slot_dim: int) -> None:
    """Refuse tensors of other dtypes, shapes or devices, and columns that make no whole groups."""
    x, *columns = tensors
    where = ring.where(NAME)
    check_tensor(ring, NAME, "x", x)
    if x.dtype not in DTYPES:
        raise DtypeError(f"{where}: x is {x.dtype}; expected float32 or float64; pass x.float()")
    if x.dim() != 2:
        raise ShapeError(
            f"{where}: x has shape {tuple(x.shape)}; expected [N, C]; pass x.flatten(1)"
        )
    for name, given in zip((*SUMMARIES, "scale_w", "bias"), columns, strict=True):
        if given is None and name not in SUMMARIES:
            continue
        check_tensor(ring, NAME, name, given)
        if given.dtype != x.dtype:
            raise DtypeError(
                f"{where}: {name} is {given.dtype} and x is {x.dtype}; expected one dtype; "
                f"pass {name}.to({x.dtype})"
            )
        if given.dim() != 1 or given.shape[0] != x.shape[1]:
            raise ShapeError(
                f"{where}: {name} has shape {tuple(given.shape)} and x {tuple(x.shape)}; "
                f"expected ({x.shape[1]},), one value per column"
            )
    if slot_dim > 0 and x.shape[1] % slot_dim:
        raise ShapeError(
            f"{where}: slot_dim={slot_dim} with x of shape {tuple(x.shape)}; expected a divisor "
            f"of its {x.shape[1]} columns"
        )


def _check_writable(ring: CommContext, summaries: Sequence[Tensor]) -> None:
    """Refuse summaries whose update would overwrite another."""
    for name, summary in zip(SUMMARIES, summaries, strict=True):
        if overlaps_itself(summary):
            raise ArgumentError(
                f"{ring.where(NAME)}: {name} of shape {tuple(summary.shape)} and strides "
                f"{summary.stride()} overlaps itself and can't be updated; pass {name}.clone()"
            )
    if len({summary.data_ptr() for summary in summaries}) < 3 and summaries[0].numel():
        raise ArgumentError(
            f"{ring.where(NAME)}: two of {', '.join(SUMMARIES)} are one memory, and each has "
            f"its own update; pass a .clone() of one of them"
        )


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
    """Return the result, mean and scale, and the batch's own summaries where a backward may ask."""
    ring = comm(ring_id)
    synced = trains and updates and sync_stats
    with refuse_together(ring, NAME, awaited=synced):
        _check(ring, (x, size, total, square, scale_w, bias), slot_dim)
        if trains and updates:
            _check_writable(ring, (size, total, square))
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
        y.masked_fill_(_skipped(x, slot_dim), 0)
    batch = _summarised(x, means, epsilon, slot_dim, updates) if trains else x.new_empty(0)
    return y, means, scales, batch


def _skipped(x: Tensor, slot_dim: int) -> Tensor:
    """Return [N, C]: which values belong to a group whose first one is as good as 0."""
    return (x[:, ::slot_dim].abs() < NOTHING_SHOWN).repeat_interleave(slot_dim, 1)


def _summarised(x: Tensor, means: Tensor, epsilon: float, slot_dim: int, average: bool) -> Tensor:
    """Return [3, C]: size, sum and square sum of the batch."""
    count, squares = x.new_full((x.shape[1],), len(x)), (x - means).square_()
    if slot_dim > 0:
        skipped = _skipped(x, slot_dim)
        count = (len(x) - skipped.sum(0)).to(x.dtype)
        x, squares = x.masked_fill(skipped, 0), squares.masked_fill_(skipped, 0)
    batch = torch.stack([count, x.sum(0), squares.sum(0)])
    if average or slot_dim > 0:
        batch /= count.clamp(min=1)
    weight = count.clamp(max=1) if average else count
    batch[2] += weight * epsilon
    return batch


def _fake(x: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *columns, ring_id, _, slot_dim, _, _, _, trains, _ = rest
    _check(comm(ring_id), (x, *columns), slot_dim)
    width = x.shape[1]
    batch = x.new_empty((3, width) if trains else (0,))
    return like(x), x.new_empty(width), x.new_empty(width), batch


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *summaries, scale_w, _, ring_id, _, slot_dim, decay, sync_stats, updates, _, stream = inputs
    _, means, scales, batch = output
    ctx.save_for_backward(scales, batch, *(() if scale_w is None else (x, means, scale_w)))
    # Not saved: autograd would take the update of an earlier backward for a mistake.
    ctx.summaries = [summary.detach() for summary in summaries] if updates else []
    ctx.slot_dim, ctx.how = slot_dim, (ring_id, decay, sync_stats, stream)


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
            updated = _update_op(batch, *ctx.summaries, *ctx.how)
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
    """Return [3, C]: the summaries with the batch, of all ranks if they are synchronised."""
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
        grad = grad.masked_fill(_skipped(x, slot_dim), 0)
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
