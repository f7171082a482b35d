"""The legacy normalisation by data summaries, as its GPU or its CPU kernel."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring
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
    """Return (y, means, scales) of ``ops.data_norm``; y alone has a gradient.

    ``x``: [N, C]; the summaries, ``scale_w`` and ``bias``: [C]; y: [N, C]; means and scales: [C].
    ``behaviour`` is the kernel, on any device. As upstream, "gpu" takes no notice of ``slot_dim``,
    ``enable_scale_and_shift``, ``scale_w`` and ``bias``, and "cpu" none of ``sync_stats`` and
    ``summary_decay_rate``. Synchronises over ring 0 unless told otherwise; always on the current
    stream. Errors as ``ops.data_norm``; also an ``ArgumentError`` is a layout other than NCHW and
    NHWC, which mean the same for two dims. Source: operator ``data_norm``.
    """
    context, own = ring("data_norm", ring_id), behaviour == "cpu"
    if data_layout not in ("NCHW", "NHWC"):
        raise ArgumentError(
            f"{context._describe('data_norm')}: data_layout={data_layout!r}; expected NCHW or NHWC"
        )
    shifts = own and enable_scale_and_shift
    if shifts and (scale_w is None or bias is None):
        raise ArgumentError(
            f"{context._describe('data_norm')}: enable_scale_and_shift=True without scale_w or "
            f"bias; give both, or type enable_scale_and_shift=False"
        )
    found: tuple[Tensor, Tensor, Tensor] = ops.data_norm(
        x,
        batch_size,
        batch_sum,
        batch_square_sum,
        ring_id,
        epsilon=epsilon,
        slot_dim=slot_dim if own and slot_dim > 0 else -1,
        summary_decay_rate=summary_decay_rate,
        scale_w=scale_w if shifts else None,
        bias=bias if shifts else None,
        sync_stats=sync_stats and not own,
        behaviour=behaviour,
        return_moments=True,
    )
    return found
