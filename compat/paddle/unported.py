"""The error of a name that upstream has and this dialect lacks."""

from collections.abc import Iterable
from difflib import get_close_matches

from commlib.compat.paddle.names import NOT_PORTED

_REASONS = {
    **NOT_PORTED,
    "launch": "start programs with torchrun or Paddle's launcher",
    "spawn": "start programs with torchrun or Paddle's launcher",
    "shard_tensor": "use torch.distributed.tensor",
    "reshard": "use torch.distributed.tensor",
    "ProcessMesh": "use torch.distributed.device_mesh",
    "DataParallel": "call fleet.distributed_model and fleet.distributed_optimizer",
    "TensorParallel": "call fleet.distributed_model, which returns the model itself",
    "ShardingParallel": "call fleet.distributed_model, which returns the model itself",
    "PipelineParallel": "train a PipelineLayer, or exchange between stages by pp_utils.P2pHelper",
    "DygraphShardingOptimizerV2": "use DygraphShardingOptimizer, or FSDP2 of torch",
    "group_sharded_parallel": "use FSDP2 of torch, or a sharding_degree for states alone",
    "sharding": "use FSDP2 of torch, or a sharding_degree for states alone",
    "alltoall_single": "call commlib.compat.paddle.distributed.alltoall_single",
    "utils": "use commlib.compat.paddle.distributed.moe_utils, and torch.utils.checkpoint",
    "recompute": "use torch.utils.checkpoint",
    "PaddleCloudRoleMaker": "call fleet.init(is_collective=True)",
    "UserDefinedRoleMaker": "parameter servers are out of scope",
    "InMemoryDataset": "parameter servers are out of scope",
    "QueueDataset": "parameter servers are out of scope",
    "gloo_init_parallel_env": "call init_parallel_env",
    "gloo_barrier": "call barrier",
    "gloo_release": "call destroy_process_group",
    "init_server": "parameter servers are out of scope",
    "run_server": "parameter servers are out of scope",
    "init_worker": "parameter servers are out of scope",
    "stop_worker": "parameter servers are out of scope",
}


def unported(module: str, names: Iterable[str], name: str) -> AttributeError:
    """Return the error of an unknown name: why it is missing, or the nearest name that exists.

    Args:
        module: The module's name.
        names: What the module offers.
        name: What was asked for.
    """
    reason = _REASONS.get(name)
    if reason is None:
        near = get_close_matches(name, names, 1, 0.6)
        reason = f"did you mean {near[0]!r}?" if near else "see docs/paddle_differences.md"
    return AttributeError(f"module {module!r} has no attribute {name!r}; {reason}", name=name)
