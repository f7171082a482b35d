"""The collectives of Paddle 3 that write their result into ``x``, on the current stream."""

import torch

from commlib.compat.paddle.in_place import c_broadcast_
from commlib.compat.paddle.normalization import sync_batch_norm
from commlib.compat.paddle.phi import reduction_of
from commlib.compat.paddle.reductions import all_reduced
from commlib.compat.paddle.root_reductions import reduced

Tensor = torch.Tensor


def all_reduce_(x: Tensor, ring_id: int = 0, reduce_type: int = 0) -> Tensor:
    """Write the reduction of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``all_reduce_``.

    Args:
        x: Any shape, the same on every rank.
        ring_id: The ring.
        reduce_type: 0 sum, 1 max, 2 min, 3 prod, 4 avg.

    Returns:
        ``x``.

    Raises:
        ArgumentError: ``reduce_type`` is none of these.
        CommError: As ``ops.all_reduce``.
    """
    op = reduction_of("all_reduce_", ring_id, reduce_type)
    all_reduced("all_reduce_", op, x, ring_id, use_calc_stream=True, in_place=True)
    return x


def broadcast_(x: Tensor, ring_id: int = 0, root: int = 0) -> Tensor:
    """Write the ``x`` of position ``root`` to ``x``, on every rank.

    Source: operator ``broadcast_``.

    Args:
        x: Any shape and dtype, the same on every rank.
        ring_id: The ring.
        root: Position of the sender in the ring.

    Returns:
        ``x``.

    Raises:
        PeerError: ``root`` is not a position in the ring.
    """
    return c_broadcast_(x, ring_id, root, use_calc_stream=True)


def reduce_(x: Tensor, ring_id: int = 0, root_id: int = 0, reduce_type: int = 0) -> Tensor:
    """Write the reduction of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``reduce_``.

    Args:
        x: Any shape, the same on every rank. Ranks other than the root keep their values.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        reduce_type: 0 sum, 1 max, 2 min, 3 prod, 4 avg.

    Returns:
        ``x``.

    Raises:
        ArgumentError: ``reduce_type`` is none of these.
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    op = reduction_of("reduce_", ring_id, reduce_type)
    reduced("reduce_", op, x, ring_id, root_id, use_calc_stream=True, in_place=True)
    return x


def sync_batch_norm_(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Normalise ``x`` by the ring's whole batch, and write the running values in place.

    Source: operator ``sync_batch_norm_``. ``sync_batch_norm`` writes the running values in place
    too.

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
        The results of ``sync_batch_norm``, and an empty tensor for upstream's reserved space.

    Raises:
        ArgumentError: The layout is unknown.
        ShapeError: ``x`` has no channels, or a parameter is not [C].
        CommError: As ``ops.all_gather``.
    """
    results = sync_batch_norm(
        x,
        mean,
        variance,
        scale,
        bias,
        is_test,
        momentum,
        epsilon,
        data_layout,
        use_global_stats,
        trainable_statistics,
        ring_id,
    )
    return *results, x.new_empty(0)
