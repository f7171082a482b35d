"""The parallel layers and the tracked generator states, as ``fleet.meta_parallel`` has them."""

from commlib.compat.paddle.distributed.layers import (
    ColumnParallelLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from commlib.compat.paddle.distributed.rng_states import (
    RNGStatesTracker,
    get_rng_state_tracker,
    model_parallel_random_seed,
)

__all__ = [
    "ColumnParallelLinear",
    "ParallelCrossEntropy",
    "RNGStatesTracker",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
]
