"""The legacy reductions to one rank: c_reduce_*."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import detached, position, ring_of
from commlib.engines.reduction_names import ReductionName


def reduced(
    name: str,
    op: ReductionName,
    x: torch.Tensor,
    ring_id: int,
    root_id: int,
    use_calc_stream: bool,
    in_place: bool = False,
) -> torch.Tensor:
    """Return the reduction of ``x`` on the root; ``in_place`` writes it to ``x`` there."""
    root = position(name, ring_of(name, ring_id), "root_id", root_id)
    x = detached(x)
    total: torch.Tensor = ops.reduce(
        x,
        ring_id,
        root=root,
        op=op,
        out=x if in_place else None,
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
    return reduced("c_reduce_sum", "sum", x, ring_id, root_id, use_calc_stream)


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
    return reduced("c_reduce_max", "max", x, ring_id, root_id, use_calc_stream)


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
    return reduced("c_reduce_min", "min", x, ring_id, root_id, use_calc_stream)


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
    return reduced("c_reduce_prod", "prod", x, ring_id, root_id, use_calc_stream)


def c_reduce_avg(
    x: torch.Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return the mean of ``x`` over the ring on position ``root_id``.

    Source: operator ``c_reduce_avg``. It has no gradient.

    Args:
        x: As in ``c_reduce_sum``; the mean of integers is rounded towards zero.
        ring_id: The ring.
        root_id: Position of the root in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        A new tensor of the shape of ``x``. On other ranks it is a copy of ``x``.

    Raises:
        PeerError: ``root_id`` is not a position in the ring.
        CommError: As ``ops.reduce``.
    """
    return reduced("c_reduce_avg", "avg", x, ring_id, root_id, use_calc_stream)
