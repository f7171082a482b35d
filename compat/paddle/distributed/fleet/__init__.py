"""Hybrid parallelism: ``import commlib.compat.paddle.distributed.fleet as fleet``.

``fleet.init(is_collective=True, strategy=strategy)`` creates the rings of every axis. The parallel
layers are in ``fleet.meta_parallel``, the optimizers in ``fleet.meta_optimizers``.
"""

from typing import TYPE_CHECKING, Any

from commlib.compat.paddle.distributed.fleet import meta_optimizers, meta_parallel
from commlib.compat.paddle.distributed.fleet.program import (
    barrier_worker,
    get_hybrid_communicate_group,
    init,
    is_first_worker,
    worker_endpoints,
    worker_index,
    worker_num,
)
from commlib.compat.paddle.distributed.fleet.strategy import DistributedStrategy
from commlib.compat.paddle.distributed.fleet.training import (
    distributed_model,
    distributed_optimizer,
)
from commlib.compat.paddle.distributed.hybrid_group import HybridCommunicateGroup
from commlib.compat.paddle.distributed.topology import CommunicateTopology
from commlib.compat.paddle.unported import unported

__all__ = [
    "CommunicateTopology",
    "DistributedStrategy",
    "HybridCommunicateGroup",
    "barrier_worker",
    "distributed_model",
    "distributed_optimizer",
    "get_hybrid_communicate_group",
    "init",
    "is_first_worker",
    "meta_optimizers",
    "meta_parallel",
    "worker_endpoints",
    "worker_index",
    "worker_num",
]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Refuse an unknown name, with the nearest one or the reason why it is missing."""
        raise unported(__name__, __all__, name)
