"""Legacy normalisation by data summaries, with the behaviour of its GPU or its CPU kernel."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of
from commlib.errors import ArgumentError

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
