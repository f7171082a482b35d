"""Models and optimizers of a hybrid-parallel program."""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from commlib.compat.paddle.distributed.fleet.sharding import DygraphShardingOptimizer
from commlib.compat.paddle.distributed.hybrid_group import (
    HybridCommunicateGroup,
    hybrid_group,
)
from commlib.compat.paddle.distributed.layers import split_parameters
from commlib.core.context import CommContext
from commlib.core.memory import Uses

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
    replicated = [one for one in tensors if id(one) not in split]
    _broadcast(hybrid.get_model_parallel_group().ring, replicated)
    for group in hybrid.replica_groups():
        _broadcast(group.ring, tensors)
    return model


class HybridParallelOptimizer:
    """An optimizer that averages gradients over the ranks with the same weights before a step.

    With a sharding axis of two ranks or more, the optimizer is a ``DygraphShardingOptimizer``: its
    states are divided over that axis. Everything else is the optimizer's own.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        hcg: HybridCommunicateGroup | None = None,
        strategy: object = None,
    ) -> None:
        """Keep the optimizer, and divide its states over the sharding axis.

        Args:
            optimizer: Any optimizer of torch.
            hcg: Has the groups of the ranks. Default: those of ``fleet.init``.
            strategy: Ignored: ``hcg`` has the degrees.

        Raises:
            ArgumentError: ``hcg`` is None, and ``fleet.init`` was not called.
        """
        self._hybrid = hybrid_group() if hcg is None else hcg
        self._sharded: DygraphShardingOptimizer | None = None
        if self._hybrid.get_sharding_parallel_world_size() > 1:
            self._sharded = DygraphShardingOptimizer(optimizer, self._hybrid)
        self._inner_opt: Any = self._sharded or optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner_opt, name)

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients and take a step.

        On two replicas or more, a parameter that requires grad and has no gradient here takes part
        with zeros, since another rank may have one. It then has a gradient on every rank. With a
        sharding axis the mean gradient is on the rank that owns the parameter.
        """
        groups = self._hybrid.replica_groups()
        trained = self._trained() if groups else []
        if self._sharded is not None:
            self._sharded.reduce_gradients(trained)
            trained = self._sharded.filter_parameters(trained)
            groups.remove(self._hybrid.get_sharding_parallel_group())
        for replicas in groups:
            with replicas.ring.group():
                for gradient in (one.grad for one in trained):
                    replicas.ring.all_reduce(gradient, gradient, op="avg")
        self._inner_opt.step()

    def _trained(self) -> list[Any]:
        """Return the parameters that require grad, each with a gradient on every replica."""
        every = [one for group in self.param_groups for one in group["params"]]
        trained = [one for one in every if one.requires_grad]
        for one in trained:
            if one.grad is None:
                one.grad = torch.zeros_like(one)
        return trained

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients to zero, or drop them.

        Args:
            set_to_zero: False drops the gradients.
        """
        self._inner_opt.zero_grad(set_to_none=not set_to_zero)

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a state dict, as the optimizer's ``load_state_dict`` does."""
        self._inner_opt.load_state_dict(state_dict)


def distributed_optimizer(
    optimizer: torch.optim.Optimizer, strategy: object = None
) -> HybridParallelOptimizer:
    """Return ``optimizer`` with an average of the gradients before every step.

    With a ``sharding_degree`` above 1 its states are divided; see ``HybridParallelOptimizer``.

    Args:
        optimizer: Any optimizer of torch.
        strategy: Ignored: ``fleet.init`` has it.

    Raises:
        ArgumentError: ``fleet.init`` was not called.
    """
    return HybridParallelOptimizer(optimizer)


def _broadcast(ring: CommContext, tensors: list[torch.Tensor]) -> None:
    if not tensors or ring.size == 1:
        return
    uses, shared = Uses(), []  # a model may tie weights by their memory
    with ring.group():
        for one in tensors:
            if uses.clash(one, writes=True) is None:
                ring.broadcast(one.detach(), one.detach(), root=0)
                uses.add(one, writes=True)
            else:
                shared.append(one)
    for one in shared:
        ring.broadcast(one.detach(), one.detach(), root=0)
