"""Legacy operators that write their result into ``x``: the names that end in ``_``.

Each has the arguments of the operator without the underscore, and returns ``x``. Raw calls, those
with ``use_calc_stream=False``, write to ``x`` on the comm stream.
"""

import torch

from commlib import ops
from commlib.compat.paddle.checks import detached, position, ring_of
from commlib.compat.paddle.partial import partial_allgather
from commlib.compat.paddle.reductions import all_reduced
from commlib.compat.paddle.root_reductions import reduced
from commlib.compat.paddle.streams import c_sync_calc_stream, c_sync_comm_stream
from commlib.compat.paddle.tensor_parallel import c_identity, mp_allreduce_sum

Tensor = torch.Tensor


def c_allreduce_sum_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the sum of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_sum_``. Arguments and errors are those of ``c_allreduce_sum``.
    """
    all_reduced("c_allreduce_sum_", "sum", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_allreduce_max_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the maximum of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_max_``. Arguments and errors are those of ``c_allreduce_max``.
    """
    all_reduced("c_allreduce_max_", "max", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_allreduce_min_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the minimum of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_min_``. Arguments and errors are those of ``c_allreduce_min``.
    """
    all_reduced("c_allreduce_min_", "min", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_allreduce_prod_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the product of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_prod_``. Arguments and errors are those of ``c_allreduce_prod``.
    """
    all_reduced("c_allreduce_prod_", "prod", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_allreduce_avg_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = False
) -> Tensor:
    """Write the mean of ``x`` over the ring to ``x``, on every rank.

    Source: operator ``c_allreduce_avg_``. Arguments and errors are those of ``c_allreduce_avg``.
    """
    all_reduced("c_allreduce_avg_", "avg", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_reduce_sum_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the sum of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_sum_``. Arguments and errors are those of ``c_reduce_sum``.
    Other ranks keep ``x``.
    """
    reduced("c_reduce_sum_", "sum", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_reduce_max_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the maximum of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_max_``. Arguments and errors are those of ``c_reduce_max``.
    Other ranks keep ``x``.
    """
    reduced("c_reduce_max_", "max", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_reduce_min_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the minimum of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_min_``. Arguments and errors are those of ``c_reduce_min``.
    Other ranks keep ``x``.
    """
    reduced("c_reduce_min_", "min", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_reduce_prod_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the product of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_prod_``. Arguments and errors are those of ``c_reduce_prod``.
    Other ranks keep ``x``.
    """
    reduced("c_reduce_prod_", "prod", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_reduce_avg_(
    x: Tensor, ring_id: int = 0, root_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the mean of ``x`` over the ring to ``x`` on position ``root_id``.

    Source: operator ``c_reduce_avg_``. Arguments and errors are those of ``c_reduce_avg``.
    Other ranks keep ``x``.
    """
    reduced("c_reduce_avg_", "avg", x, ring_id, root_id, use_calc_stream, in_place=True)
    return x


def c_broadcast_(
    x: Tensor, ring_id: int = 0, root: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the ``x`` of position ``root`` to ``x``, on every rank.

    Source: operator ``c_broadcast_``. Arguments and errors are those of ``c_broadcast``.
    """
    root = position("c_broadcast_", ring_of("c_broadcast_", ring_id), "root", root)
    own = detached(x)
    ops.broadcast(
        own, ring_id, root=root, out=own, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return x


def mp_allreduce_sum_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = True
) -> Tensor:
    """Write the sum of ``x`` over the ring to ``x``; the gradient passes unchanged.

    Source: operator ``mp_allreduce_sum_``. Arguments and errors are those of ``mp_allreduce_sum``.
    An ``x`` that requires grad must not be a leaf of the graph.
    """
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        return x.copy_(mp_allreduce_sum(x, ring_id, use_calc_stream))
    all_reduced("mp_allreduce_sum_", "sum", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_identity_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = True, use_model_parallel: bool = True
) -> Tensor:
    """Return ``x``, whose gradient is summed over the ring from here on.

    Source: operator ``c_identity_``. Arguments and errors are those of ``c_identity``. An ``x``
    that requires grad must not be a leaf of the graph.
    """
    ring_of("c_identity_", ring_id)
    if x.requires_grad and torch.is_grad_enabled():
        x.copy_(c_identity(x, ring_id, use_calc_stream))
    return x


def c_sync_calc_stream_(x: Tensor) -> Tensor:
    """Hold the host until the current stream has finished its work; return ``x``.

    Source: operator ``c_sync_calc_stream_``, which is ``c_sync_calc_stream``.
    """
    return c_sync_calc_stream(x)


def c_sync_comm_stream_(x: Tensor, ring_id: int = 0) -> Tensor:
    """Hold the host until the ring's comm stream has finished its work; return ``x``.

    Source: operator ``c_sync_comm_stream_``, which is ``c_sync_comm_stream``.
    """
    return c_sync_comm_stream(x, ring_id)


def partial_allgather_(
    x: Tensor, nranks: int, rank: int, ring_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Fill slice r of the flattened ``x`` from position r, and return ``x``.

    Source: operator ``partial_allgather_``, which is ``partial_allgather``.
    """
    return partial_allgather(x, nranks, rank, ring_id, use_calc_stream)
