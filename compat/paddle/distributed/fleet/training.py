"""Models and optimizers of a hybrid-parallel program."""

from typing import Any, TypeVar

import torch

from commlib.compat.paddle.distributed.hybrid_group import hybrid_group
from commlib.compat.paddle.distributed.layers import split_parameters
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
    split = {id(one) for one in split_parameters(model)}
    whole = [one for one in tensors if id(one) not in split]
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
        """Average the gradients and take a step.

        On two replicas or more, a parameter that requires grad and has no gradient here takes part
        with zeros, since another rank may have one. It then has a gradient on every rank.
        """
        groups = hybrid_group().replica_groups()
        gradients = self._gradients() if groups else []
        for replicas in groups:
            with replicas.ring.group():
                for one in gradients:
                    replicas.ring.all_reduce(one, one, op="avg")
        self._optimizer.step()

    def _gradients(self) -> list[Any]:
        """Return a gradient per parameter that requires grad, so as many on every replica."""
        every = [one for group in self._optimizer.param_groups for one in group["params"]]
        trained = [one for one in every if one.requires_grad]
        for one in trained:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        return [one.grad for one in trained]

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
