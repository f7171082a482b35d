"""The error of a name that upstream has and this dialect lacks."""

from collections.abc import Iterable
from difflib import get_close_matches

from commlib.compat.paddle.names import NOT_PORTED

REASONS = {
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
    "utils": "use commlib.compat.paddle.distributed.utils.moe_utils, and torch.utils.checkpoint",
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
    "rpc": "use torch.distributed.rpc, or a library for remote calls",
    "nop": "it keeps a variable alive in Paddle's executor; leave it away",
    "save_state_dict": "use torch.distributed.checkpoint.save",
    "load_state_dict": "use torch.distributed.checkpoint.load",
    "sharding_stage": "use FSDP2 of torch",
    "auto_parallel": "use torch.distributed.tensor",
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
        reason = next((why for start, why in FAMILIES.items() if name.startswith(start)), _ELSE)
    return AttributeError(f"module {module!r} has no attribute {name!r}; {reason}", name=name)
