"""The collectives of ``deepspeed.comm`` that move data without a reduction."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import Work
from torch.distributed.distributed_c10d import _coalescing_manager, _CoalescingManager

from commlib.compat import torch_distributed as dist
from commlib.compat.deepspeed.comm.counters import counters
from commlib.errors import ArgumentError

Tensor = torch.Tensor
Group = dist.ProcessGroup | None


def broadcast(
    tensor: Tensor,
    src: int,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "broadcast",
    debug: object = None,
) -> Work | None:
    """Send ``tensor`` of rank ``src`` to every rank of the group.

    Args:
        tensor: Any shape, the same on every rank. Input on ``src``, output elsewhere.
        src: Rank of the sender.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [tensor], prof)
    work: Work | None = dist.broadcast(tensor, src, group=group, async_op=async_op)
    return work


def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Group = None,
    device: torch.device | None = None,
) -> None:
    """Send pickled objects of rank ``src`` to every rank of the group.

    Args:
        object_list: Objects on ``src``; on other ranks a list of as many entries, which are
            replaced.
        src: Rank of the sender.
        group: See ``deepspeed.comm``.
        device: Device of the pickled bytes. Default: that of the group.
    """
    dist.broadcast_object_list(object_list, src=src, group=group, device=device)


def all_gather_object(
    object_list: list[Any],
    obj: Any,
    group: Group = None,
    prof: bool = False,
    log_name: str = "all_gather_object",
    debug: object = None,
) -> None:
    """Fill ``object_list`` with the pickled ``obj`` of each rank.

    Args:
        object_list: The output, one entry per rank.
        obj: An object that can be pickled. Its bytes are not counted.
        group, prof, log_name, debug: See ``deepspeed.comm``.
    """
    counters.count(log_name, [], prof)
    dist.all_gather_object(object_list, obj, group=group)


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: object = None,
) -> Work | None:
    """Fill ``tensor_list`` with ``tensor`` of each rank.

    Args:
        tensor_list: The output, one tensor per rank.
        tensor: The input of this rank.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, tensor_list, prof)
    work: Work | None = dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)
    return work


def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: object = None,
) -> Work | None:
    """Fill ``output_tensor`` with ``tensor`` of each rank.

    Args:
        output_tensor: The output, with the elements of all inputs in rank order.
        tensor: Any shape, the same on every rank.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [output_tensor], prof)
    work: Work | None = dist.all_gather_into_tensor(
        output_tensor, tensor, group=group, async_op=async_op
    )
    return work


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    debug: object = None,
) -> Work | None:
    """Fill ``output_tensor`` with ``input_tensor`` of each rank.

    Args:
        output_tensor: The output, with the elements of all inputs in rank order.
        input_tensor: Any shape, the same on every rank.
        group, async_op, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> _CoalescingManager | None:
    """Fill each output with its input of each rank, as one operation.

    Args:
        output_tensors: One output per input, as in ``all_gather_into_tensor``.
        input_tensors: One input or more, on one device.
        group, async_op: See ``deepspeed.comm``.

    Returns:
        An object with ``wait()`` with ``async_op=True``, else None.

    Raises:
        ArgumentError: There is no input, or not one output per input.
    """
    if len(output_tensors) != len(input_tensors) or not output_tensors:
        raise ArgumentError(
            f"all_gather_coalesced: {len(output_tensors)} outputs for {len(input_tensors)} inputs; "
            f"expected one output per input, and one input or more"
        )
    counters.count("all_gather_coalesced", output_tensors, False)
    device = output_tensors[0].device
    with _coalescing_manager(group, device, async_ops=async_op) as manager:
        for out, x in zip(output_tensors, input_tensors, strict=True):
            dist.all_gather_into_tensor(out, x, group=group, async_op=async_op)
    return manager if async_op else None


def all_to_all_single(
    output: Tensor,
    tensor: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_to_all_single",
    debug: object = None,
) -> Work | None:
    """Send part j of ``tensor`` to rank j, and receive one part of each rank in ``output``.

    Args:
        output: The output, rows along dim 0.
        tensor: The input, rows along dim 0.
        output_split_sizes: Rows from each rank. Default: equal parts.
        input_split_sizes: Rows to each rank. Default: equal parts.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [tensor], prof)
    splits = (output_split_sizes, input_split_sizes)
    work: Work | None = dist.all_to_all_single(
        output, tensor, *splits, group=group, async_op=async_op
    )
    return work


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Work | None:
    """Send tensor j of the inputs to rank j, and receive one of each rank in the outputs.

    Args:
        output_tensor_list: The output, one tensor per rank.
        input_tensor_list: The input, one tensor per rank.
        group, async_op: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count("all_to_all", input_tensor_list, False)
    work: Work | None = dist.all_to_all(
        output_tensor_list, input_tensor_list, group=group, async_op=async_op
    )
    return work


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: object = None,
) -> Work | None:
    """Fill ``gather_list`` on rank ``dst`` with ``tensor`` of each rank.

    Args:
        tensor: Any shape, the same on every rank.
        gather_list: The output on ``dst``, one tensor per rank; None elsewhere.
        dst: Rank of the receiver.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [tensor], prof)
    work: Work | None = dist.gather(tensor, gather_list, dst=dst, group=group, async_op=async_op)
    return work


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: object = None,
) -> Work | None:
    """Send tensor r of ``scatter_list`` of rank ``src`` to ``tensor`` on rank r.

    Args:
        tensor: The output.
        scatter_list: The input on ``src``, one tensor per rank; None elsewhere.
        src: Rank of the sender.
        group, async_op, prof, log_name, debug: See ``deepspeed.comm``.

    Returns:
        The work with ``async_op=True``, else None.
    """
    counters.count(log_name, [tensor], prof)
    work: Work | None = dist.scatter(tensor, scatter_list, src=src, group=group, async_op=async_op)
    return work
