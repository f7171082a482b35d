"""Reductions of tensor parallelism other than the sum: none of them has a gradient."""

import torch

from commlib.compat.paddle.reductions import all_reduced

Tensor = torch.Tensor


def mp_allreduce_max(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = True
) -> Tensor:
    """Return, on every rank, the maximum of ``x`` over the ring.

    Source: operator ``mp_allreduce_max``, which has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.all_reduce``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    return all_reduced("mp_allreduce_max", "max", x, ring_id, use_calc_stream)


def mp_allreduce_min(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = True
) -> Tensor:
    """Return, on every rank, the minimum of ``x`` over the ring.

    Source: operator ``mp_allreduce_min``, which has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.all_reduce``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    return all_reduced("mp_allreduce_min", "min", x, ring_id, use_calc_stream)


def mp_allreduce_prod(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = True
) -> Tensor:
    """Return, on every rank, the product of ``x`` over the ring.

    Source: operator ``mp_allreduce_prod``, which has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.all_reduce``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    return all_reduced("mp_allreduce_prod", "prod", x, ring_id, use_calc_stream)


def mp_allreduce_max_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = True
) -> Tensor:
    """Write the maximum of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``mp_allreduce_max_``, which has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.all_reduce``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    all_reduced("mp_allreduce_max_", "max", x, ring_id, use_calc_stream, in_place=True)
    return x


def mp_allreduce_min_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = True
) -> Tensor:
    """Write the minimum of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``mp_allreduce_min_``, which has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.all_reduce``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    all_reduced("mp_allreduce_min_", "min", x, ring_id, use_calc_stream, in_place=True)
    return x


def mp_allreduce_prod_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = True
) -> Tensor:
    """Write the product of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``mp_allreduce_prod_``, which has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.all_reduce``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    all_reduced("mp_allreduce_prod_", "prod", x, ring_id, use_calc_stream, in_place=True)
    return x
