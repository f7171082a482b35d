"""The collective operators: one a file, the same call eager, compiled and on every engine."""

from commlib.ops._all_gather import all_gather
from commlib.ops._all_reduce import all_reduce
from commlib.ops._all_to_all import all_to_all
from commlib.ops._barrier import barrier
from commlib.ops._broadcast import broadcast
from commlib.ops._concat import concat
from commlib.ops._gather import gather
from commlib.ops._identity import identity
from commlib.ops._recv import recv
from commlib.ops._reduce import reduce
from commlib.ops._reduce_scatter import reduce_scatter
from commlib.ops._scatter import scatter
from commlib.ops._send import send
from commlib.ops._split import split
from commlib.ops._vocab_parallel_embedding import vocab_parallel_embedding

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "concat",
    "gather",
    "identity",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
    "split",
    "vocab_parallel_embedding",
]
