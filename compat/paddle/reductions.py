"""The legacy reductions: c_allreduce_*, c_reduce_*, c_reducescatter."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import detached, position, ring_of, ring_of_size
from commlib.ops.arguments import ReductionName


def _all_reduce(
    name: str, op: ReductionName, x: torch.Tensor, ring_id: int, use_calc_stream: bool
) -> torch.Tensor:
    ring_of(name, ring_id)
    total: torch.Tensor = ops.all_reduce(
        detached(x), ring_id, op=op, use_calc_stream=use_calc_stream, fenced=use_calc_stream
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
    return _all_reduce("c_allreduce_sum", "sum", x, ring_id, use_calc_stream)


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
    return _all_reduce("c_allreduce_max", "max", x, ring_id, use_calc_stream)


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
    return _all_reduce("c_allreduce_min", "min", x, ring_id, use_calc_stream)


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
    return _all_reduce("c_allreduce_prod", "prod", x, ring_id, use_calc_stream)


def _reduce(
    name: str, op: ReductionName, x: torch.Tensor, ring_id: int, root_id: int, use_calc_stream: bool
) -> torch.Tensor:
    root = position(name, ring_of(name, ring_id), "root_id", root_id)
    total: torch.Tensor = ops.reduce(
        detached(x),
        ring_id,
        root=root,
        op=op,
        use_calc_stream=use_calc_stream,
        fenced=use_calc_stream,
    )
    return total


def c_reduce_sum(
    x: torch.Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return the sum of ``x`` over the ring on position ``root_id``.

    Source: operator ``c_reduce_sum``. It has no gradient.

    Args:
        x: Any shape, the same on every rank; a dtype of ``ops.reduce``.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        A new tensor of the shape of ``x``. On other ranks it is a copy of ``x``, which upstream
        leaves undefined.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    return _reduce("c_reduce_sum", "sum", x, ring_id, root_id, use_calc_stream)


def c_reduce_max(
    x: torch.Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return the maximum of ``x`` over the ring on position ``root_id``.

    Source: operator ``c_reduce_max``. It has no gradient.

    Args:
        x: As in ``c_reduce_sum``.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        A new tensor of the shape of ``x``. On other ranks it is a copy of ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    return _reduce("c_reduce_max", "max", x, ring_id, root_id, use_calc_stream)


def c_reduce_min(
    x: torch.Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return the minimum of ``x`` over the ring on position ``root_id``.

    Source: operator ``c_reduce_min``. It has no gradient.

    Args:
        x: As in ``c_reduce_sum``.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        A new tensor of the shape of ``x``. On other ranks it is a copy of ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    return _reduce("c_reduce_min", "min", x, ring_id, root_id, use_calc_stream)


def c_reduce_prod(
    x: torch.Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return the product of ``x`` over the ring on position ``root_id``.

    Source: operator ``c_reduce_prod``. It has no gradient.

    Args:
        x: As in ``c_reduce_sum``.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        A new tensor of the shape of ``x``. On other ranks it is a copy of ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    return _reduce("c_reduce_prod", "prod", x, ring_id, root_id, use_calc_stream)


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
