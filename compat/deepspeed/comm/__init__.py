"""``deepspeed.comm`` on rings: ``import commlib.compat.deepspeed.comm as dist``.

Names, arguments and defaults are those of DeepSpeed. ``prof``, ``log_name`` and ``debug`` are
accepted everywhere: DeepSpeed times such calls and waits for the device around each; here calls and
bytes are counted, and nothing waits. ``configure`` switches the counters on, ``log_summary`` prints
them.

``group`` is a process group, None that of all ranks; ``src`` and ``dst`` are global ranks. A call
with ``async_op=True`` returns a ``Work`` to wait for. On GPUs other calls are in the order of the
current stream, on CPUs they block the host. Errors are those of ``torch.distributed`` and of rings.
"""

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import ReduceOp

from commlib.compat.deepspeed.comm.bring_up import (
    ProcessGroup,
    cdb,
    comms_logger,
    has_allgather_base,
    has_reduce_scatter_base,
    in_aml,
    in_aws_sm,
    in_dlts,
    init_deepspeed_backend,
    mpi_discovery,
    set_backend,
    timed_op,
)
from commlib.compat.deepspeed.comm.collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_gather_object,
    all_to_all,
    all_to_all_single,
    allgather_fn,
    broadcast,
    broadcast_object_list,
    gather,
    scatter,
)
from commlib.compat.deepspeed.comm.counters import (
    configure,
    get_comm_operation_count,
    get_logged_comm_ops,
    has_comm_data,
    log_summary,
    reset_log,
)
from commlib.compat.deepspeed.comm.groups import (
    default_pg_timeout,
    destroy_process_group,
    get_all_ranks_from_group,
    get_global_rank,
    get_local_rank,
    get_rank,
    get_world_group,
    get_world_size,
    has_all_gather_into_tensor,
    has_all_reduce_coalesced,
    has_coalescing_manager,
    has_reduce_scatter_tensor,
    init_distributed,
    initialize_mesh_device,
    is_available,
    is_initialized,
    new_group,
)
from commlib.compat.deepspeed.comm.point_to_point import (
    barrier,
    irecv,
    isend,
    monitored_barrier,
    recv,
    send,
)
from commlib.compat.deepspeed.comm.reductions import (
    all_reduce,
    all_reduce_coalesced,
    inference_all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_fn,
    reduce_scatter_tensor,
)

__all__ = [
    "ProcessGroup",
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "cdb",
    "comms_logger",
    "configure",
    "default_pg_timeout",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_comm_operation_count",
    "get_global_rank",
    "get_local_rank",
    "get_logged_comm_ops",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_allgather_base",
    "has_coalescing_manager",
    "has_comm_data",
    "has_reduce_scatter_base",
    "has_reduce_scatter_tensor",
    "in_aml",
    "in_aws_sm",
    "in_dlts",
    "inference_all_reduce",
    "init_deepspeed_backend",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "mpi_discovery",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "reset_log",
    "scatter",
    "send",
    "set_backend",
    "timed_op",
]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


_REASONS = {
    "enable_symm_mem_for_group": "leave it away: push kernels of rings map the memory of peers by "
    "themselves; operators of torch.ops.symm_mem need a group of torch's nccl, which "
    "torch.distributed._symmetric_memory.enable_symm_mem_for_group prepares",
    "get_backend": "call torch.distributed.get_backend; groups of rings have 'commlib'",
}

if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Refuse an unknown name, with the nearest one or the way round."""
        reason = _REASONS.get(name)
        near = get_close_matches(name, __all__, 1, 0.8)
        if reason is not None:
            pass
        elif near:
            reason = f"did you mean {near[0]!r}?"
        elif hasattr(torch.distributed, name):
            reason = f"call torch.distributed.{name}"
        else:
            reason = "commlib does not have it, nor has torch.distributed"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {reason}", name=name)
