"""Legacy operators that write their result into ``x``: the names that end in ``_``.

Each has the arguments of the operator without the underscore, and returns ``x``. Raw calls, those
with ``use_calc_stream=False``, write to ``x`` on the comm stream.
"""

import torch

from commlib import ops
from commlib.compat.paddle.checks import detached, position, ring_of
from commlib.compat.paddle.partial import partial_allgather
from commlib.compat.paddle.reductions import all_reduced
from commlib.compat.paddle.streams import c_sync_calc_stream, c_sync_comm_stream
from commlib.compat.paddle.tensor_parallel import c_identity, mp_allreduce_sum

Tensor = torch.Tensor


def c_broadcast_(
    x: Tensor, ring_id: int = 0, root: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Write the ``x`` of position ``root`` to ``x``, on every rank.

    Source: operator ``c_broadcast_``. It has no gradient.

    Args:
        x: Any shape and dtype, the same on every rank.
        ring_id: The ring.
        root: Position of the sender in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        ``x``.

    Raises:
        PeerError: ``root`` is not a position in the ring.
    """
    root = position("c_broadcast_", ring_of("c_broadcast_", ring_id), "root", root)
    data = detached(x)
    ops.broadcast(
        data, ring_id, root=root, out=data, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return x


def mp_allreduce_sum_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = False, use_model_parallel: bool = True
) -> Tensor:
    """Write the sum of ``x`` over the ring to ``x``; the gradient passes unchanged.

    Source: operator ``mp_allreduce_sum_``, whose gradient is ``c_identity``.

    Args:
        x: Any shape, the same on every rank. If it requires grad, it must not be a leaf of the
            graph.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream. A
            call whose ``x`` requires grad is always fenced.
        use_model_parallel: Ignored.

    Returns:
        ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
        return x.copy_(mp_allreduce_sum(x, ring_id, use_calc_stream))
    all_reduced("mp_allreduce_sum_", "sum", x, ring_id, use_calc_stream, in_place=True)
    return x


def c_identity_(
    x: Tensor, ring_id: int = 0, use_calc_stream: bool = True, use_model_parallel: bool = True
) -> Tensor:
    """Return ``x``, whose gradient is summed over the ring from here on.

    Source: operator ``c_identity_``, whose gradient is ``c_allreduce_sum``.

    Args:
        x: Any shape, the same on every rank. If it requires grad, it must not be a leaf of the
            graph.
        ring_id: The ring.
        use_calc_stream: True runs the backward on the current stream, False on the ring's comm
            stream. Both are fenced.
        use_model_parallel: Ignored.

    Returns:
        ``x``.

    Raises:
        CommError: As ``ops.identity``.
    """
    ring_of("c_identity_", ring_id)
    if x.requires_grad and torch.is_grad_enabled():
        x.copy_(c_identity(x, ring_id, use_calc_stream))
    return x


def c_sync_calc_stream_(x: Tensor) -> Tensor:
    """Hold the host until the current stream has finished its work.

    Source: operator ``c_sync_calc_stream_``, which is ``c_sync_calc_stream``.

    Args:
        x: A tensor.

    Returns:
        ``x``. It is unchanged.

    Raises:
        CommTimeout: The stream is still busy after FLAGS_comm_timeout_s seconds.
    """
    return c_sync_calc_stream(x)


def c_sync_comm_stream_(x: Tensor, ring_id: int = 0) -> Tensor:
    """Hold the host until the ring's comm stream has finished its work.

    Source: operator ``c_sync_comm_stream_``, which is ``c_sync_comm_stream``.

    Args:
        x: A tensor.
        ring_id: The ring.

    Returns:
        ``x``. It is unchanged.

    Raises:
        CommTimeout: The comm stream is still busy after the ring's timeout.
    """
    return c_sync_comm_stream(x, ring_id)


def partial_allgather_(
    x: Tensor, nranks: int, rank: int, ring_id: int = 0, use_calc_stream: bool = False
) -> Tensor:
    """Fill slice r of the flattened ``x`` from position r, in place.

    Source: operator ``partial_allgather_``, which is ``partial_allgather``.

    Args:
        x: Any shape and dtype; ``nranks`` must divide its number of elements. This rank sends its
            own slice.
        nranks: Size of the ring.
        rank: This rank's position in the ring.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.

    Returns:
        ``x``.

    Raises:
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's.
        ShapeError: ``nranks`` does not divide the number of elements.
    """
    return partial_allgather(x, nranks, rank, ring_id, use_calc_stream)
