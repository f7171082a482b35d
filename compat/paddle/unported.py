"""The error of a name that upstream has and this dialect lacks."""

from collections.abc import Iterable
from difflib import get_close_matches

from commlib.compat.paddle.names import NOT_PORTED

_SERVERS = "parameter servers are out of scope"
_DISTRIBUTED_TENSOR = "use torch.distributed.tensor"
_OF_DISTRIBUTED_TENSOR = (
    *("DistAttr", "Partial", "Placement", "ReduceType", "Replicate", "Shard", "dtensor_from_fn"),
    *("get_mesh", "local_map", "reshard", "set_mesh", "shard_tensor", "unshard_dtensor"),
    *("LocalLayer", "ShardingStage1", "ShardingStage2", "ShardingStage3", "auto_parallel"),
)
_PARALLELIZE = "use torch.distributed.tensor.parallel"
_OF_PARALLELIZE = (
    *("ColWiseParallel", "PrepareLayerInput", "PrepareLayerOutput", "RowWiseParallel"),
    *("SequenceParallelBegin", "SequenceParallelDisable", "SequenceParallelEnable"),
    *("SequenceParallelEnd", "parallelize", "to_distributed"),
)
_OF_SERVERS = (
    *("CountFilterEntry", "InMemoryDataset", "ProbabilityEntry", "QueueDataset", "ShowClickEntry"),
    *("UserDefinedRoleMaker", "init_server", "init_worker", "is_server", "run_server"),
    *("server_endpoints", "server_index", "server_num", "stop_worker"),
)
_LOCAL_RANK = "read ParallelEnv().device_id of paddle.distributed"

REASONS = {
    **NOT_PORTED,
    **dict.fromkeys(_OF_DISTRIBUTED_TENSOR, _DISTRIBUTED_TENSOR),
    **dict.fromkeys(_OF_PARALLELIZE, _PARALLELIZE),
    **dict.fromkeys(_OF_SERVERS, _SERVERS),
    "send_object_list": "call send for each tensor, or broadcast_object_list for Python objects",
    "recv_object_list": "call recv for each tensor, or broadcast_object_list for Python objects",
    "shutdown_process_group": "call destroy_process_group, or group.ring.suspend() to keep it",
    "restart_process_group": "call group.ring.resume(), after group.ring.suspend()",
    "rank": "call worker_index of fleet, or get_rank of paddle.distributed",
    "nranks": "call worker_num of fleet, or get_world_size of paddle.distributed",
    "world_size": "call worker_num of fleet, or get_world_size of paddle.distributed",
    "local_rank": _LOCAL_RANK,
    "rank_in_node": _LOCAL_RANK,
    "local_device_ids": _LOCAL_RANK,
    "node_num": "divide worker_num() by LOCAL_WORLD_SIZE, or PADDLE_LOCAL_SIZE, of the environment",
    "is_worker": "every process is a worker; leave it away",
    "util": "call all_reduce, all_gather_object or barrier of paddle.distributed",
    "UtilBase": "call all_reduce, all_gather_object or barrier of paddle.distributed",
    "Fleet": "call the functions of the module fleet",
    "distributed_scaler": "use torch.amp.GradScaler",
    "minimize": "call fleet.distributed_optimizer, then backward() and step()",
    "launch": "start programs with torchrun or Paddle's launcher",
    "spawn": "start programs with torchrun or Paddle's launcher",
    "ProcessMesh": "use torch.distributed.device_mesh",
    "DataParallel": "call fleet.distributed_model and fleet.distributed_optimizer",
    "TensorParallel": "call fleet.distributed_model, which returns the model itself",
    "ShardingParallel": "call fleet.distributed_model, which returns the model itself",
    "PipelineParallel": "train a PipelineLayer, or exchange between stages by pp_utils.P2pHelper",
    "DygraphShardingOptimizerV2": "use DygraphShardingOptimizer, or FSDP2 of torch",
    "group_sharded_parallel": "use FSDP2 of torch, or a sharding_degree for states alone",
    "sharding": "use FSDP2 of torch, or a sharding_degree for states alone",
    "utils": "use commlib.compat.paddle.distributed.utils.moe_utils, and torch.utils.checkpoint",
    "recompute": "use torch.utils.checkpoint",
    "PaddleCloudRoleMaker": "call fleet.init(is_collective=True)",
    "gloo_init_parallel_env": "call init_parallel_env",
    "gloo_barrier": "call barrier",
    "gloo_release": "call destroy_process_group",
    "rpc": "use torch.distributed.rpc, or a library for remote calls",
    "nop": "it keeps a variable alive in Paddle's executor; leave it away",
    "save_state_dict": "use torch.distributed.checkpoint.save",
    "load_state_dict": "use torch.distributed.checkpoint.load",
    "sharding_stage": "use FSDP2 of torch",
    "to_static": "use torch.compile or commlib.graph.capture",
    "depend": "torch keeps the order of calls; leave it away",
}
# The beginning of a name, and the reason for all names that begin so.
FAMILIES = {
    "dgc": "gradient compression is not ported; call all_reduce in torch.bfloat16",
    "fused_": "it does not communicate; use torch, whose compiler fuses operators",
    "rpc_": "use torch.distributed.rpc, or a library for remote calls",
    "shard_": "use torch.distributed.tensor",
    "pull_": NOT_PORTED["pull_sparse"],
    "push_": NOT_PORTED["push_dense"],
}
_GRADIENT = "gradients come from autograd: call backward() of a result"
_ELSE = (
    "it is not an operator of communication that commlib has; docs/paddle.md lists those, and "
    "torch has the operators that do not communicate"
)
_ELSE_OF_DISTRIBUTED = "commlib does not have it; docs/paddle.md lists the names that exist"
_NEAR = 0.8  # how alike two names are, from 0 to 1, before one is suggested for the other


def unported(module: str, names: Iterable[str], name: str) -> AttributeError:
    """Return the error of an unknown name: why it is missing, or the nearest name that exists.

    Args:
        module: The module's name.
        names: What the module offers.
        name: What was asked for.
    """
    near = get_close_matches(name, names, 1, _NEAR)
    reason = REASONS.get(name)
    if reason is None and name.endswith(("_grad", "_grad_")):
        reason = _GRADIENT
    elif reason is None and near:
        reason = f"did you mean {near[0]!r}?"
    elif reason is None:
        other = _ELSE_OF_DISTRIBUTED if ".distributed" in module else _ELSE
        reason = next((why for start, why in FAMILIES.items() if name.startswith(start)), other)
    return AttributeError(f"module {module!r} has no attribute {name!r}; {reason}", name=name)
