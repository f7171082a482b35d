"""Models and optimizers of a hybrid-parallel program."""

from typing import Any, TypeVar

import torch

from commlib.compat.paddle.distributed.hybrid_group import hybrid_group
from commlib.core.context import CommContext

Model = TypeVar("Model", bound=torch.nn.Module)


def distributed_model(model: Model) -> Model:
    """Give every rank the weights of the first rank of its groups, and return ``model``.

    Weights that are split over the tensor-parallel group stay as they are within it.

    Args:
        model: The same on every rank but for split weights. Parameters and buffers are written.

    Raises:
        ArgumentError: ``fleet.init`` was not called.
    """
    hybrid = hybrid_group()
    tensors = [*model.parameters(), *model.buffers()]
    # Not by is_distributed, which is a method of every tensor that is not split.
    whole = [one for one in tensors if not hasattr(one, "split_axis")]
    _broadcast(hybrid.get_model_parallel_group().ring, whole)
    for group in hybrid.replica_groups():
        _broadcast(group.ring, tensors)
    return model


class HybridParallelOptimizer:
    """An optimizer that averages gradients over the ranks with the same weights before a step.

    Everything else is the optimizer's own.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients and take a step."""
        groups = self._optimizer.param_groups
        parameters = [one for group in groups for one in group["params"] if one.grad is not None]
        for replicas in hybrid_group().replica_groups():
            with replicas.ring.group():
                for one in parameters:
                    replicas.ring.all_reduce(one.grad, one.grad, op="avg")
        self._optimizer.step()

    def clear_grad(self, set_to_zero: bool = False) -> None:
        """Drop the gradients, or set them to zero."""
        self._optimizer.zero_grad(set_to_none=not set_to_zero)


def distributed_optimizer(
    optimizer: torch.optim.Optimizer, strategy: object = None
) -> HybridParallelOptimizer:
    """Return ``optimizer`` with an average of the gradients before every step.

    Args:
        optimizer: Any optimizer of torch.
        strategy: Ignored: ``fleet.init`` has it.

    Raises:
        ArgumentError: ``fleet.init`` was not called.
    """
    hybrid_group()
    return HybridParallelOptimizer(optimizer)


def _broadcast(ring: CommContext, tensors: list[torch.Tensor]) -> None:
    if not tensors or ring.size == 1:
        return
    with ring.group():
        for one in tensors:
            ring.broadcast(one.detach(), one.detach(), root=0)
