"""The legacy companions of tensor parallelism, all of them with a gradient."""

from typing import Any

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of, ring_of_rank


def mp_allreduce_sum(
    x: torch.Tensor, ring_id: int = 0, use_calc_stream: bool = False
) -> torch.Tensor:
    """Return, on every rank, the sum of ``x`` over the ring; the gradient passes as it is.

    ``x``: any shape. It follows a row-parallel layer: every rank computes the same loss from
    the sum, hence the identity backward. Raw on the comm stream by default, unless ``x`` wants a
    gradient. Source: operator ``mp_allreduce_sum``, whose gradient is ``c_identity``.
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

    ``x``: any shape. It precedes a column-parallel layer. The backward runs on the stream
    that ``use_calc_stream`` chooses, always fenced. ``use_model_parallel`` changes nothing.
    Source: operator ``c_identity``, whose gradient is ``c_allreduce_sum``.
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

    ``x``: [..., n], the same shape on every rank; the result is [..., n * nranks]. The gradient is
    the own part of the last axis. Always fenced, for the parts are put side by side on the
    current stream. ``use_model_parallel`` changes nothing. Raises ``ArgumentError`` when ``nranks``
    or ``rank`` is not the ring's. Source: operator ``c_concat``, whose gradient is ``c_split``.
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

    ``x``: [..., n] with n divisible by ``nranks``; the result is [..., n / nranks]. No
    communication forward. The gradient concatenates all ranks' gradients along the last axis.
    Upstream gathers them along axis 0, which is another tensor unless ``x`` is 1-D:
    ``legacy_grad=True`` gives those values, in that order, under the shape of ``x``. The backward
    is fenced. ``use_model_parallel`` changes nothing. Raises ``ArgumentError`` when ``nranks`` or
    ``rank`` is not the ring's, ``ShapeError`` when n does not divide. Source: operator ``c_split``,
    whose gradient is ``c_allgather``.
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

    ``weight``: [rows, dim], the rows from ``start_index`` on of the whole table; ``x``: ids of any
    shape, int32 or int64. The result is x.shape + [dim]; ``mp_allreduce_sum`` completes it. The
    gradient of ``weight`` adds up the rows that were used. No communication. ``vocab_size >= 0``
    refuses ids outside of it in eager code. Raises ``ArgumentError`` for ``start_index`` < 0,
    ``ShapeError`` for an empty or not 2-D ``weight``. Source: operator ``c_embedding``.
    """
    return ops.vocab_parallel_embedding(x, weight, start_index, vocab_size=vocab_size)
