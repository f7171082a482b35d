"""Legacy reductions that write their result into ``x``: c_allreduce_*_ and c_reduce_*_.

Each returns ``x``. Raw calls, those with ``use_calc_stream=False``, write to ``x`` on the comm
stream.
"""

import torch

from commlib.compat.paddle.reductions import all_reduced
from commlib.compat.paddle.root_reductions import reduced

Tensor = torch.Tensor


def c_allreduce_sum_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the sum of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_sum_``. It has no gradient.

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
    all_reduced("c_allreduce_sum_", "sum", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_allreduce_max_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the maximum of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_max_``. It has no gradient.

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
    all_reduced("c_allreduce_max_", "max", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_allreduce_min_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the minimum of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_min_``. It has no gradient.

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
    all_reduced("c_allreduce_min_", "min", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_allreduce_prod_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the product of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_prod_``. It has no gradient.

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
    all_reduced("c_allreduce_prod_", "prod", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_allreduce_avg_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the mean of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_avg_``. It has no gradient.

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
    all_reduced("c_allreduce_avg_", "avg", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_reduce_sum_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the sum of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_sum_``. It has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.reduce``. Ranks other than
            the root keep their values.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    reduced("c_reduce_sum_", "sum", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_reduce_max_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the maximum of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_max_``. It has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.reduce``. Ranks other than
            the root keep their values.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    reduced("c_reduce_max_", "max", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_reduce_min_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the minimum of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_min_``. It has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.reduce``. Ranks other than
            the root keep their values.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    reduced("c_reduce_min_", "min", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_reduce_prod_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the product of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_prod_``. It has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.reduce``. Ranks other than
            the root keep their values.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    reduced("c_reduce_prod_", "prod", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_reduce_avg_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the mean of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_avg_``. It has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.reduce``. Ranks other than
            the root keep their values.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    reduced("c_reduce_avg_", "avg", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x
