"""The legacy companions of tensor parallelism, all of them with a gradient."""

from typing import Any

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of, ring_of_rank


def mp_allreduce_sum(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = True,
) -> torch.Tensor:
    """Return, on every rank, the sum of ``x`` over the ring; the gradient passes unchanged.

    Source: operator ``mp_allreduce_sum``, whose gradient is ``c_identity``. It follows a
    row-parallel layer: every rank computes the same loss from the sum.

    Args:
        x: Any shape, the same on every rank.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream. A
            call whose ``x`` requires grad is always fenced.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.all_reduce``.
    """
    ring_of("mp_allreduce_sum", ring_id)
    total: torch.Tensor = ops.all_reduce(
        x, ring_id, backward="identity", use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return total


def c_identity(
    x: torch.Tensor,
    ring_id: int = 0,
    use_calc_stream: bool = True,
    use_model_parallel: bool = True,
) -> torch.Tensor:
    """Return, on every rank, a copy of this rank's ``x``; the gradient is summed over the ring.

    Source: operator ``c_identity``, whose gradient is ``c_allreduce_sum``. It precedes a
    column-parallel layer.

    Args:
        x: Any shape, the same on every rank.
        ring_id: The ring.
        use_calc_stream: True runs the backward on the current stream, False on the ring's comm
            stream. Both are fenced.
        use_model_parallel: Ignored.

    Returns:
        A new tensor of the shape of ``x``.

    Raises:
        CommError: As ``ops.identity``.
    """
    ring_of("c_identity", ring_id)
    return ops.identity(x, ring_id, use_calc_stream=use_calc_stream)


def c_concat(
    x: torch.Tensor,
    rank: int = 0,
    nranks: int = 1,
    ring_id: int = 0,
    use_calc_stream: bool = True,
    use_model_parallel: bool = True,
) -> torch.Tensor:
    """Return, on every rank, the ``x`` of rank 0, 1, … concatenated along the last axis.

    Source: operator ``c_concat``, whose gradient is ``c_split``: this rank's part of the last
    axis.

    Args:
        x: [..., n], the same shape on every rank.
        rank: This rank's position in the ring.
        nranks: Size of the ring.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False on the ring's comm stream. Both are
            fenced.
        use_model_parallel: Ignored.

    Returns:
        [..., n * nranks].

    Raises:
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's.
        CommError: As ``ops.concat``.
    """
    ring_of_rank("c_concat", ring_id, nranks, rank)
    return ops.concat(x, ring_id, use_calc_stream=use_calc_stream)


def c_split(
    x: torch.Tensor,
    rank: int = 0,
    nranks: int = 1,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    use_model_parallel: bool = True,
    *,
    legacy_grad: bool = False,
) -> torch.Tensor:
    """Return, on rank r, a copy of the r-th part of ``x`` along the last axis.

    Source: operator ``c_split``, whose gradient is ``c_allgather``. The forward does not
    communicate. The backward concatenates the gradients of all ranks along the last axis.

    Args:
        x: [..., n]; ``nranks`` must divide n.
        rank: This rank's position in the ring.
        nranks: Size of the ring.
        ring_id: The ring.
        use_calc_stream: True runs the backward on the current stream, False on the ring's comm
            stream. Both are fenced.
        use_model_parallel: Ignored.
        legacy_grad: True concatenates the gradients along axis 0, as upstream does, and views
            them in the shape of ``x``. The two differ unless ``x`` is 1-D.

    Returns:
        [..., n / nranks].

    Raises:
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's.
        ShapeError: ``nranks`` does not divide n.
    """
    ring_of_rank("c_split", ring_id, nranks, rank)
    if legacy_grad:
        part: torch.Tensor = _SplitGatheringRows.apply(x, ring_id, use_calc_stream)  # type: ignore[no-untyped-call]
        return part
    return ops.split(x, ring_id, use_calc_stream=use_calc_stream)


class _SplitGatheringRows(torch.autograd.Function):
    """The split with the gradient that upstream declares."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ring_id: int, use_calc_stream: bool) -> torch.Tensor:
        ctx.shape, ctx.how = x.shape, (ring_id, use_calc_stream)
        return ops.split(x, ring_id)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        ring_id, use_calc_stream = ctx.how
        rows = ops.all_gather(grads[0], ring_id, use_calc_stream=use_calc_stream)
        return rows.view(ctx.shape), None, None


def c_embedding(
    weight: torch.Tensor, x: torch.Tensor, start_index: int = 0, vocab_size: int = -1
) -> torch.Tensor:
    """Return the rows of this rank's shard that the ids ``x`` name, and zeros for other ids.

    Source: operator ``c_embedding``. It does not communicate; ``mp_allreduce_sum`` adds the shards.
    The gradient of ``weight`` adds up the gradients of equal ids.

    Args:
        weight: [rows, dim], this rank's shard of the table.
        x: int32 or int64 ids, any shape.
        start_index: Id of the first row of the shard.
        vocab_size: Number of ids; eager code raises for an id outside of it. -1 checks nothing.

    Returns:
        x.shape + [dim].

    Raises:
        ArgumentError: ``start_index`` is negative, or an id is outside of the table.
        ShapeError: ``weight`` is empty or not 2-D.
    """
    return ops.vocab_parallel_embedding(x, weight, start_index, vocab_size=vocab_size)
