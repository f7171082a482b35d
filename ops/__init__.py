"""The collective operators: one a file, the same call eager, compiled and on every engine."""

from commlib.ops._all_gather import all_gather
from commlib.ops._all_reduce import all_reduce
from commlib.ops._all_reduce_residual_norm import all_reduce_residual_norm
from commlib.ops._all_to_all import all_to_all
from commlib.ops._assign_pos import assign_pos
from commlib.ops._barrier import barrier
from commlib.ops._broadcast import broadcast
from commlib.ops._class_center_sample import class_center_sample
from commlib.ops._concat import concat
from commlib.ops._data_norm import data_norm
from commlib.ops._gather import gather
from commlib.ops._global_gather import global_gather
from commlib.ops._global_scatter import global_scatter
from commlib.ops._identity import identity
from commlib.ops._limit_by_capacity import limit_by_capacity
from commlib.ops._margin_cross_entropy import margin_cross_entropy
from commlib.ops._number_count import number_count
from commlib.ops._partial_all_gather import partial_all_gather
from commlib.ops._partial_recv import partial_recv
from commlib.ops._partial_send import partial_send
from commlib.ops._prune_gate_by_capacity import prune_gate_by_capacity
from commlib.ops._random_routing import random_routing
from commlib.ops._recv import recv
from commlib.ops._reduce import reduce
from commlib.ops._reduce_scatter import reduce_scatter
from commlib.ops._scatter import scatter
from commlib.ops._send import send
from commlib.ops._softmax_with_cross_entropy import softmax_with_cross_entropy
from commlib.ops._split import split
from commlib.ops._vocab_parallel_embedding import vocab_parallel_embedding

__all__ = [
    "all_gather",
    "all_reduce",
    "all_reduce_residual_norm",
    "all_to_all",
    "assign_pos",
    "barrier",
    "broadcast",
    "class_center_sample",
    "concat",
    "data_norm",
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
    "reduce_scatter",
    "scatter",
    "send",
    "softmax_with_cross_entropy",
    "split",
    "vocab_parallel_embedding",
]
