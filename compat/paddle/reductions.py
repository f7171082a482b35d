"""The legacy reductions whose result every rank gets: c_allreduce_*, c_reducescatter."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import detached, ring_of, ring_of_size
from commlib.engines.reduction_names import ReductionName


def all_reduced(
    name: str,
    op: ReductionName,
    x: torch.Tensor,
    ring_id: int,
    use_calc_stream: bool,
    in_place: bool = False,
) -> torch.Tensor:
    """Return the reduction of ``x`` on every rank; ``in_place`` writes it to ``x``."""
    ring_of(name, ring_id)
    x = detached(x)
    total: torch.Tensor = ops.all_reduce(
        x,
        ring_id,
        op=op,
        out=x if in_place else None,
        use_calc_stream=use_calc_stream,
        fenced=use_calc_stream,
    )
    return total


def c_allreduce_sum(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = False,
) -> torch.Tensor:
    """Return, on every rank, the sum of ``x`` over the ring.

    Source: operator ``c_allreduce_sum``. It has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.all_reduce``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored. Upstream marks the operator for its passes with it.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    return all_reduced("c_allreduce_sum", "sum", x, ring_id, use_calc_stream)


def c_allreduce_max(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = False,
) -> torch.Tensor:
    """Return, on every rank, the maximum of ``x`` over the ring.

    Source: operator ``c_allreduce_max``. It has no gradient.

    Args:
        x: As in ``c_allreduce_sum``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    return all_reduced("c_allreduce_max", "max", x, ring_id, use_calc_stream)


def c_allreduce_min(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = False,
) -> torch.Tensor:
    """Return, on every rank, the minimum of ``x`` over the ring.

    Source: operator ``c_allreduce_min``. It has no gradient.

    Args:
        x: As in ``c_allreduce_sum``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    return all_reduced("c_allreduce_min", "min", x, ring_id, use_calc_stream)


def c_allreduce_prod(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = False,
) -> torch.Tensor:
    """Return, on every rank, the product of ``x`` over the ring.

    Source: operator ``c_allreduce_prod``. It has no gradient.

    Args:
        x: As in ``c_allreduce_sum``.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    return all_reduced("c_allreduce_prod", "prod", x, ring_id, use_calc_stream)


def c_allreduce_avg(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = False,
) -> torch.Tensor:
    """Return, on every rank, the mean of ``x`` over the ring.

    Source: operator ``c_allreduce_avg``. It has no gradient.

    Args:
        x: As in ``c_allreduce_sum``; the mean of integers is rounded towards zero.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    return all_reduced("c_allreduce_avg", "avg", x, ring_id, use_calc_stream)


def c_reducescatter(
    x: torch.Tensor, ring_id: int = 0, nranks: int = 1, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return, on rank r, the r-th part along dim 0 of the sum of ``x`` over the ring.

    Source: operator ``c_reducescatter``. It has no gradient.

    Args:
        x: [n, …], the same shape on every rank; ``nranks`` must divide n.
        ring_id: The ring.
        nranks: Size of the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        [n / nranks, …].

    Raises:
        ArgumentError: ``nranks`` differs from the ring's size.
        ShapeError: ``nranks`` does not divide n.
        CommError: As ``ops.reduce_scatter``.
    """
    ring_of_size("c_reducescatter", ring_id, nranks)
    part: torch.Tensor = ops.reduce_scatter(
        detached(x), ring_id, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return part
