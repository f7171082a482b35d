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

    Source: operator ``all_reduce_``. Arguments and errors are those of ``all_reduce``.
    """
    op = reduction_of("all_reduce_", ring_id, reduce_type)
    all_reduced("all_reduce_", op, x, ring_id, use_calc_stream=True, in_place=True)
    return x


def broadcast_(x: Tensor, ring_id: int = 0, root: int = 0) -> Tensor:
    """Write the ``x`` of position ``root`` to ``x``, on every rank.

    Source: operator ``broadcast_``. Arguments and errors are those of ``broadcast``.
    """
    return c_broadcast_(x, ring_id, root, use_calc_stream=True)


def reduce_(x: Tensor, ring_id: int = 0, root_id: int = 0, reduce_type: int = 0) -> Tensor:
    """Write the reduction of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``reduce_``. Arguments and errors are those of ``reduce``. Other ranks keep
    ``x``.
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

    Source: operator ``sync_batch_norm_``. Arguments and errors are those of ``sync_batch_norm``,
    which writes the running values in place too.

    Returns:
        What ``sync_batch_norm`` returns, and an empty tensor for upstream's reserved space.
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
