"""Legacy normalisation whose statistics are those of the whole ring."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of
from commlib.core.context import CommContext
from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor


def data_norm(
    x: Tensor,
    batch_size: Tensor,
    batch_sum: Tensor,
    batch_square_sum: Tensor,
    scale_w: Tensor | None = None,
    bias: Tensor | None = None,
    epsilon: float = 1e-4,
    slot_dim: int = -1,
    summary_decay_rate: float = 0.9999999,
    enable_scale_and_shift: bool = False,
    data_layout: str = "NCHW",
    sync_stats: bool = False,
    ring_id: int = 0,
    *,
    behaviour: str = "gpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise ``x`` by summaries of the data that were seen so far.

    Source: operator ``data_norm``. It runs on the current stream. As upstream, "gpu" ignores
    ``slot_dim``, ``enable_scale_and_shift``, ``scale_w`` and ``bias``. "cpu" ignores
    ``sync_stats`` and ``summary_decay_rate``.

    Args:
        x: [N, C].
        batch_size: [C] summary: number of rows.
        batch_sum: [C] summary: sum of the rows.
        batch_square_sum: [C] summary: sum of the squares.
        scale_w: [C] factor of the result.
        bias: [C] summand of the result.
        epsilon: As ``ops.data_norm``.
        slot_dim: As ``ops.data_norm``.
        summary_decay_rate: As ``ops.data_norm``.
        enable_scale_and_shift: True applies ``scale_w`` and ``bias``.
        data_layout: "NCHW" or "NHWC", which are the same for two dims.
        sync_stats: True sums the summaries over the ring.
        ring_id: The ring.
        behaviour: "gpu" or "cpu": the upstream kernel to follow, on any device.

    Returns:
        y, [N, C], with a gradient; means, [C], and scales, [C], without.

    Raises:
        ArgumentError: The layout is unknown, or ``scale_w`` or ``bias`` is missing.
        CommError: As ``ops.data_norm``.
    """
    ring, on_cpu = ring_of("data_norm", ring_id), behaviour == "cpu"
    if data_layout not in ("NCHW", "NHWC"):
        raise ArgumentError(
            f"{ring._describe('data_norm')}: data_layout={data_layout!r}; expected NCHW or NHWC"
        )
    shifts = on_cpu and enable_scale_and_shift
    if shifts and (scale_w is None or bias is None):
        raise ArgumentError(
            f"{ring._describe('data_norm')}: enable_scale_and_shift=True without scale_w or bias; "
            f"pass both, or pass enable_scale_and_shift=False"
        )
    result: tuple[Tensor, Tensor, Tensor] = ops.data_norm(
        x,
        batch_size,
        batch_sum,
        batch_square_sum,
        ring_id,
        epsilon=epsilon,
        slot_dim=slot_dim if on_cpu and slot_dim > 0 else -1,
        summary_decay_rate=summary_decay_rate,
        scale_w=scale_w if shifts else None,
        bias=bias if shifts else None,
        sync_stats=sync_stats and not on_cpu,
        behaviour=behaviour,
        return_moments=True,
    )
    return result


def sync_batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    scale: Tensor,
    bias: Tensor,
    is_test: bool = False,
    momentum: float = 0.9,
    epsilon: float = 1e-5,
    data_layout: str = "NCHW",
    use_global_stats: bool = False,
    trainable_statistics: bool = False,
    ring_id: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalise ``x`` by the mean and variance of each channel over the ring's whole batch.

    Source: operator ``sync_batch_norm``. It runs on the current stream. The ranks do one
    all_gather in forward, and one reduce_scatter in backward.

    Args:
        x: [N, C, …] or [N, …, C]; N may differ between ranks.
        mean: [C] running mean; training moves it by 1 - ``momentum`` towards that of the batch.
        variance: [C] running variance, not corrected for the batch's size.
        scale: [C] factor of the result.
        bias: [C] summand of the result.
        is_test: True normalises by the running values, without a collective.
        momentum: Weight of the running values in their update.
        epsilon: Added to the variance.
        data_layout: "NCHW" or "NHWC".
        use_global_stats: True normalises by the running values in training too.
        trainable_statistics: True normalises by the batch with ``is_test`` too.
        ring_id: The ring.

    Returns:
        y, of the shape of ``x``, with a gradient; ``mean`` and ``variance``; and [C] the mean and
        the inverse standard deviation that were used.

    Raises:
        ArgumentError: The layout is unknown.
        ShapeError: ``x`` has no channels, or a parameter is not [C].
        CommError: As ``ops.all_gather``.
    """
    ring = ring_of("sync_batch_norm", ring_id)
    axis = _channel_axis(ring, x, data_layout, (mean, variance, scale, bias))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if use_global_stats or (is_test and not trainable_statistics):
        center, spread = mean.to(wide.dtype), variance.to(wide.dtype)
    else:
        center, spread = _of_the_ring(wide, axis, ring_id)
        with torch.no_grad():
            mean.mul_(momentum).add_(center * (1 - momentum))
            variance.mul_(momentum).add_(spread * (1 - momentum))
    inverse = (spread + epsilon).rsqrt()
    shape = [-1 if dim == axis else 1 for dim in range(x.dim())]
    y = (wide - center.view(shape)) * (inverse * scale).view(shape) + bias.view(shape)
    return y.to(x.dtype), mean, variance, center.detach(), inverse.detach()


def _channel_axis(
    ring: CommContext, x: Tensor, data_layout: str, parameters: tuple[Tensor, ...]
) -> int:
    if data_layout not in ("NCHW", "NHWC"):
        raise ArgumentError(
            f"{ring._describe('sync_batch_norm')}: data_layout={data_layout!r}; expected NCHW or "
            f"NHWC"
        )
    axis = 1 if data_layout == "NCHW" else x.dim() - 1
    shapes = [tuple(each.shape) for each in parameters]
    if x.dim() < 2 or shapes != [(x.shape[axis],)] * len(shapes):
        raise ShapeError(
            f"{ring._describe('sync_batch_norm')}: x of shape {tuple(x.shape)} as {data_layout} "
            f"with mean, variance, scale, bias of shapes {shapes}; expected two dims or more, and "
            f"one number per channel in each"
        )
    return axis


def _of_the_ring(x: Tensor, axis: int, ring_id: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance of each channel, from each rank's count, mean and squares."""
    rows = x.movedim(axis, 0).flatten(1)
    count = rows.new_full((1,), rows.shape[1])
    own_mean = rows.sum(1) / count.clamp(min=1)
    squares = (rows - own_mean[:, None]).square().sum(1)
    gathered = ops.all_gather(torch.cat([count, own_mean, squares])[None], ring_id)
    counts, means, sums = gathered.split([1, len(rows), len(rows)], dim=1)
    total = counts.sum().clamp(min=1)
    center = (counts * means).sum(0) / total
    return center, (sums + counts * (means - center).square()).sum(0) / total
