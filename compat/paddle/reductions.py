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

    ``x``: any shape; the result has the same. Dtypes and errors as ``commlib.ops.all_reduce``.
    Raw on the comm stream by default. No gradient. ``use_model_parallel`` was a note for Paddle's
    passes and changes nothing. Source: operator ``c_allreduce_sum``.
    """
    return _all_reduce("c_allreduce_sum", "sum", x, ring_id, use_calc_stream)


def c_allreduce_max(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = False,
) -> torch.Tensor:
    """Return, on every rank, the maximum of ``x`` over the ring; otherwise as ``c_allreduce_sum``.

    Source: operator ``c_allreduce_max``.
    """
    return _all_reduce("c_allreduce_max", "max", x, ring_id, use_calc_stream)


def c_allreduce_min(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = False,
) -> torch.Tensor:
    """Return, on every rank, the minimum of ``x`` over the ring; otherwise as ``c_allreduce_sum``.

    Source: operator ``c_allreduce_min``.
    """
    return _all_reduce("c_allreduce_min", "min", x, ring_id, use_calc_stream)


def c_allreduce_prod(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = False,
) -> torch.Tensor:
    """Return, on every rank, the product of ``x`` over the ring; otherwise as ``c_allreduce_sum``.

    Source: operator ``c_allreduce_prod``.
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
    """Return the sum of ``x`` over the ring on position ``root_id``, and a copy of ``x`` elsewhere.

    ``x``: any shape; the result has the same. Upstream leaves the result undefined off the root.
    Raw on the comm stream by default. No gradient. Raises ``PeerError`` for a root outside the
    ring. Source: operator ``c_reduce_sum``.
    """
    return _reduce("c_reduce_sum", "sum", x, ring_id, root_id, use_calc_stream)


def c_reduce_max(
    x: torch.Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return the maximum over the ring on ``root_id``, a copy of ``x`` elsewhere.

    Otherwise as ``c_reduce_sum``. Source: operator ``c_reduce_max``.
    """
    return _reduce("c_reduce_max", "max", x, ring_id, root_id, use_calc_stream)


def c_reduce_min(
    x: torch.Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return the minimum over the ring on ``root_id``, a copy of ``x`` elsewhere.

    Otherwise as ``c_reduce_sum``. Source: operator ``c_reduce_min``.
    """
    return _reduce("c_reduce_min", "min", x, ring_id, root_id, use_calc_stream)


def c_reduce_prod(
    x: torch.Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return the product over the ring on ``root_id``, a copy of ``x`` elsewhere.

    Otherwise as ``c_reduce_sum``. Source: operator ``c_reduce_prod``.
    """
    return _reduce("c_reduce_prod", "prod", x, ring_id, root_id, use_calc_stream)


def c_reducescatter(
    x: torch.Tensor, ring_id: int = 0, nranks: int = 1, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return, on rank r, the r-th part along dim 0 of the sum of ``x`` over the ring.

    ``x``: [n, …] with n divisible by ``nranks``; the result is [n / nranks, …]. Raw on the comm
    stream by default. No gradient. Raises ``ArgumentError`` when ``nranks`` is not the ring's size,
    ``ShapeError`` when n does not divide. Source: operator ``c_reducescatter``.
    """
    ring_of_size("c_reducescatter", ring_id, nranks)
    part: torch.Tensor = ops.reduce_scatter(
        detached(x), ring_id, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return part
