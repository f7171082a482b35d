"""Optimizers of hybrid-parallel programs, as ``fleet.meta_optimizers`` has them."""

from typing import TYPE_CHECKING, Any

from commlib.compat.paddle.distributed.fleet.sharding import DygraphShardingOptimizer
from commlib.compat.paddle.distributed.fleet.training import HybridParallelOptimizer
from commlib.compat.paddle.unported import unported

__all__ = ["DygraphShardingOptimizer", "HybridParallelOptimizer"]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Refuse an unknown name, with the nearest one or the reason why it is missing."""
        raise unported(__name__, __all__, name)
