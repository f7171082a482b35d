"""``deepspeed.comm`` on rings: ``import commlib.compat.deepspeed.comm as dist``.

Names, arguments and defaults are those of DeepSpeed. ``prof``, ``log_name`` and ``debug`` are
accepted everywhere: DeepSpeed times such calls and waits for the device around each; here calls and
bytes are counted, and nothing waits. ``configure`` switches the counters on, ``log_summary`` prints
them.
"""

from torch.distributed import ReduceOp

from commlib.compat.deepspeed.comm.collectives import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    allgather_fn,
    broadcast,
    broadcast_object_list,
    gather,
    inference_all_reduce,
    reduce,
    reduce_scatter,
    reduce_scatter_fn,
    reduce_scatter_tensor,
    scatter,
)
from commlib.compat.deepspeed.comm.counters import (
    configure,
    log_summary,
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

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "allgather_fn",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "configure",
    "default_pg_timeout",
    "destroy_process_group",
    "gather",
    "get_all_ranks_from_group",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "has_all_gather_into_tensor",
    "has_all_reduce_coalesced",
    "has_coalescing_manager",
    "has_reduce_scatter_tensor",
    "inference_all_reduce",
    "init_distributed",
    "initialize_mesh_device",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_fn",
    "reduce_scatter_tensor",
    "scatter",
    "send",
]
