"""Parallel and pipeline layers and generator states, as ``fleet.meta_parallel`` has them."""

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
from commlib.compat.paddle.pipeline import LayerDesc, PipelineLayer, SharedLayerDesc

__all__ = [
    "ColumnParallelLinear",
    "LayerDesc",
    "ParallelCrossEntropy",
    "PipelineLayer",
    "RNGStatesTracker",
    "RowParallelLinear",
    "SharedLayerDesc",
    "VocabParallelEmbedding",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
]
