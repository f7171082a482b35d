"""Collective operators, one per file: the same call works eager, compiled and on every engine."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commlib.ops.collectives._all_gather import all_gather
from commlib.ops.collectives._all_reduce import all_reduce, all_reduce_
from commlib.ops.collectives._all_to_all import all_to_all
from commlib.ops.collectives._barrier import barrier
from commlib.ops.collectives._broadcast import broadcast, broadcast_
from commlib.ops.collectives._gather import gather
from commlib.ops.collectives._recv import recv
from commlib.ops.collectives._reduce import reduce, reduce_
from commlib.ops.collectives._reduce_scatter import reduce_scatter
from commlib.ops.collectives._scatter import scatter
from commlib.ops.collectives._send import send
from commlib.ops.pipeline_parallel._partial_all_gather import partial_all_gather
from commlib.ops.pipeline_parallel._partial_recv import partial_recv
from commlib.ops.pipeline_parallel._partial_send import partial_send
from commlib.ops.registered import late
from commlib.ops.tensor_parallel._all_reduce_residual_norm import all_reduce_residual_norm
from commlib.ops.tensor_parallel._concat import concat
from commlib.ops.tensor_parallel._fused_attention import fused_attention
from commlib.ops.tensor_parallel._fused_feedforward import fused_feedforward
from commlib.ops.tensor_parallel._identity import identity
from commlib.ops.tensor_parallel._split import split
from commlib.ops.tensor_parallel._vocab_parallel_embedding import vocab_parallel_embedding

if TYPE_CHECKING:
    from commlib.ops.classification._class_center_sample import class_center_sample
    from commlib.ops.classification._margin_cross_entropy import margin_cross_entropy
    from commlib.ops.classification._softmax_with_cross_entropy import softmax_with_cross_entropy
    from commlib.ops.expert_parallel._assign_pos import assign_pos
    from commlib.ops.expert_parallel._expert_combine import expert_combine
    from commlib.ops.expert_parallel._expert_dispatch import expert_dispatch
    from commlib.ops.expert_parallel._global_gather import global_gather
    from commlib.ops.expert_parallel._global_scatter import global_scatter
    from commlib.ops.expert_parallel._limit_by_capacity import limit_by_capacity
    from commlib.ops.expert_parallel._number_count import number_count
    from commlib.ops.expert_parallel._prune_gate_by_capacity import prune_gate_by_capacity
    from commlib.ops.expert_parallel._random_routing import random_routing
    from commlib.ops.inference._fused_multi_transformer import fused_multi_transformer
    from commlib.ops.lamb.optimizer import DistributedFusedLamb
    from commlib.ops.normalisation._data_norm import data_norm

__all__ = [
    "DistributedFusedLamb",
    "all_gather",
    "all_reduce",
    "all_reduce_",
    "all_reduce_residual_norm",
    "all_to_all",
    "assign_pos",
    "barrier",
    "broadcast",
    "broadcast_",
    "class_center_sample",
    "concat",
    "data_norm",
    "expert_combine",
    "expert_dispatch",
    "fused_attention",
    "fused_feedforward",
    "fused_multi_transformer",
    "gather",
    "global_gather",
    "global_scatter",
    "identity",
    "limit_by_capacity",
    "margin_cross_entropy",
    "number_count",
    "partial_all_gather",
    "partial_recv",
    "partial_send",
    "prune_gate_by_capacity",
    "random_routing",
    "recv",
    "reduce",
    "reduce_",
    "reduce_scatter",
    "scatter",
    "send",
    "softmax_with_cross_entropy",
    "split",
    "vocab_parallel_embedding",
]


def __dir__() -> list[str]:
    """List the operators, also those that are imported when they are first used."""
    return [*__all__]


if not TYPE_CHECKING:  # a checker would accept any name

    def __getattr__(name: str) -> Any:
        """Import an operator of `late.OPERATORS` when it is first used."""
        if name not in late.OPERATORS:
            raise AttributeError(f"module 'commlib.ops' has no attribute {name!r}")
        operator = getattr(import_module(late.OPERATORS[name]), name)
        globals()[name] = operator
        return operator
