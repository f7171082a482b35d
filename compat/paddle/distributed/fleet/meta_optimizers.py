"""Optimizers of hybrid-parallel programs, as ``fleet.meta_optimizers`` has them."""

from commlib.compat.paddle.distributed.fleet.sharding import DygraphShardingOptimizer
from commlib.compat.paddle.distributed.fleet.training import HybridParallelOptimizer

__all__ = ["DygraphShardingOptimizer", "HybridParallelOptimizer"]
