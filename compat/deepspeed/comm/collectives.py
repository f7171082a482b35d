"""The collectives of ``deepspeed.comm``."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

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
) -> Any:
    """Send ``tensor`` of rank ``src`` to every rank of the group."""
    counters.count(log_name, [tensor], prof)
    return dist.broadcast(tensor, src, group=group, async_op=async_op)


def broadcast_object_list(
    object_list: list[Any],
    src: int,
    group: Group = None,
    device: torch.device | None = None,
) -> None:
    """Send pickled objects of rank ``src`` to every rank of the group."""
    dist.broadcast_object_list(object_list, src=src, group=group, device=device)


def all_gather_object(object_list: list[Any], obj: Any, group: Group = None) -> None:
    """Fill ``object_list`` with the pickled ``obj`` of each rank."""
    dist.all_gather_object(object_list, obj, group=group)


def all_gather(
    tensor_list: list[Tensor],
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather",
    debug: object = None,
) -> Any:
    """Fill ``tensor_list`` with ``tensor`` of each rank."""
    counters.count(log_name, tensor_list, prof)
    return dist.all_gather(tensor_list, tensor, group=group, async_op=async_op)


def all_gather_into_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_gather_into_tensor",
    debug: object = None,
) -> Any:
    """Fill ``output_tensor`` with ``tensor`` of each rank."""
    counters.count(log_name, [output_tensor], prof)
    return dist.all_gather_into_tensor(output_tensor, tensor, group=group, async_op=async_op)


def allgather_fn(
    output_tensor: Tensor,
    input_tensor: Tensor,
    group: Group = None,
    async_op: bool = False,
    debug: object = None,
) -> Any:
    """Fill ``output_tensor`` with ``input_tensor`` of each rank."""
    return all_gather_into_tensor(output_tensor, input_tensor, group, async_op)


def all_gather_coalesced(
    output_tensors: Sequence[Tensor],
    input_tensors: Sequence[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Fill each output with its input of each rank, as one operation."""
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


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter",
    debug: object = None,
) -> Any:
    """Reduce tensor r of the lists to ``output`` on rank r."""
    counters.count(log_name, input_list, prof)
    return dist.reduce_scatter(output, input_list, op=op, group=group, async_op=async_op)


def reduce_scatter_tensor(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce_scatter_tensor",
    debug: object = None,
) -> Any:
    """Reduce part r of ``tensor`` to ``output_tensor`` on rank r."""
    counters.count(log_name, [tensor], prof)
    return dist.reduce_scatter_tensor(output_tensor, tensor, op=op, group=group, async_op=async_op)


def reduce_scatter_fn(
    output_tensor: Tensor,
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    debug: object = None,
) -> Any:
    """Reduce part r of ``tensor`` to ``output_tensor`` on rank r."""
    return reduce_scatter_tensor(output_tensor, tensor, op, group, async_op, prof)


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
) -> Any:
    """Send part j of ``tensor`` to rank j, and receive one part of each rank in ``output``."""
    counters.count(log_name, [tensor], prof)
    splits = (output_split_sizes, input_split_sizes)
    return dist.all_to_all_single(output, tensor, *splits, group=group, async_op=async_op)


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
) -> Any:
    """Send tensor j of the inputs to rank j, and receive one of each rank in the outputs."""
    counters.count("all_to_all", input_tensor_list, False)
    return dist.all_to_all(output_tensor_list, input_tensor_list, group=group, async_op=async_op)


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int = 0,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "gather",
    debug: object = None,
) -> Any:
    """Fill ``gather_list`` on rank ``dst`` with ``tensor`` of each rank."""
    counters.count(log_name, [tensor], prof)
    return dist.gather(tensor, gather_list, dst=dst, group=group, async_op=async_op)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int = 0,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "scatter",
    debug: object = None,
) -> Any:
    """Send tensor r of ``scatter_list`` of rank ``src`` to ``tensor`` on rank r."""
    counters.count(log_name, [tensor], prof)
    return dist.scatter(tensor, scatter_list, src=src, group=group, async_op=async_op)


def reduce(
    tensor: Tensor,
    dst: int,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "reduce",
    debug: object = None,
) -> Any:
    """Reduce ``tensor`` over the group in place on rank ``dst``."""
    counters.count(log_name, [tensor], prof)
    return dist.reduce(tensor, dst, op=op, group=group, async_op=async_op)


def all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: object = None,
) -> Any:
    """Reduce ``tensor`` over the group in place on every rank."""
    counters.count(log_name, [tensor], prof)
    return dist.all_reduce(tensor, op=op, group=group, async_op=async_op)


def inference_all_reduce(
    tensor: Tensor,
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: object = None,
) -> Any:
    """Reduce ``tensor`` over the group in place on every rank."""
    return all_reduce(tensor, op, group, async_op, prof, log_name)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Any = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    prof: bool = False,
    log_name: str = "all_reduce",
    debug: object = None,
) -> Any:
    """Reduce each of ``tensors`` over the group in place on every rank, as one operation."""
    if not tensors:
        raise ArgumentError("all_reduce_coalesced: no tensors; expected one or more")
    counters.count(log_name, tensors, prof)
    with _coalescing_manager(group, tensors[0].device, async_ops=async_op) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, op=op, group=group, async_op=async_op)
    return manager if async_op else None
