"""The collectives of ``deepspeed.comm`` that reduce."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp, Work
from torch.distributed.distributed_c10d import _coalescing_manager, _CoalescingManager

from commlib.compat import torch_distributed as dist
from commlib.compat.deepspeed.comm.counters import counters
from commlib.errors import ArgumentError

Tensor = torch.Tensor
Group = dist.ProcessGroup | None


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: object = None,
) -> Work | None:
    """Reduce tensor r of the lists to ``output`` on rank r.

    Args:
        output: The output.
        input_list: The input, one tensor of the output's shape per rank.
        op: The reduction.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, input_list, prof)
    work: Work | None = dist.reduce_scatter(
        output, input_list, op=op, group=group, async_op=async_op
    )
    return work


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: object = None,
) -> Work | None:
    """Reduce part r of ``tensor`` to ``output_tensor`` on rank r.

    Args:
        output_tensor: The output.
        tensor: The input, with the elements of one output per rank.
        op: The reduction.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [tensor], prof)
    work: Work | None = dist.reduce_scatter_tensor(
        output_tensor, tensor, op=op, group=group, async_op=async_op
    )
    return work


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    debug: object = None,
) -> Work | None:
    """Reduce part r of ``tensor`` to ``output_tensor`` on rank r.

    Args:
        output_tensor: The output.
        tensor: The input, with the elements of one output per rank.
        op: The reduction.
        group, async_op, prof, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof)


def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: object = None,
) -> Work | None:
    """Reduce ``tensor`` over the group in place on rank ``dst``.

    Args:
        tensor: Any shape, the same on every rank. The result is written to it on ``dst``.
        dst: Rank of the receiver.
        op: The reduction.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [tensor], prof)
    work: Work | None = dist.reduce(tensor, dst, op=op, group=group, async_op=async_op)
    return work


def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: object = None,
) -> Work | None:
    """Reduce ``tensor`` over the group in place on every rank.

    Args:
        tensor: Any shape, the same on every rank. Input and output.
        op: The reduction.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [tensor], prof)
    work: Work | None = dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    return work


def inference_all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: object = None,
) -> Work | None:
    """Reduce ``tensor`` over the group in place on every rank.

    Args:
        tensor: Any shape, the same on every rank. Input and output.
        op: The reduction.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    return all_reduce(tensor, op, group, async_op, prof, log_name)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: object = None,
) -> _CoalescingManager | None:
    """Reduce each of ``tensors`` over the group in place on every rank, as one operation.

    Args:
        tensors: One tensor or more, on one device. Input and output.
        op: The reduction.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        An object with ``wait()`` with ``async_op=True``, else None.

    Raises:
        ArgumentError: There is no tensor.
    """
    if not tensors:
        raise ArgumentError("all_reduce_coalesced: no tensors; expected one or more")
    counters.count(log_name, tensors, prof)
    with _coalescing_manager(group, tensors[0].device, async_ops=async_op) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    return manager if async_op else None
