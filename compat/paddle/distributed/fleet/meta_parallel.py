"""Parallel and pipeline layers and generator states, as ``fleet.meta_parallel`` has them."""

from typing import TYPE_CHECKING, Any

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
from commlib.compat.paddle.unported import unported

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


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Refuse an unknown name, with the nearest one or the reason why it is missing."""
        raise unported(__name__, __all__, name)
