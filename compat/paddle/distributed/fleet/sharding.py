"""Optimizer states that are divided over the sharding ring: ``DygraphShardingOptimizer``."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from commlib.compat.paddle.distributed.hybrid_group import HybridCommunicateGroup
from commlib.errors import ArgumentError

Tensor = torch.Tensor


class DygraphShardingOptimizer:
    """An optimizer whose states each rank of the sharding ring keeps for its own parameters.

    The largest parameter goes first, to the rank that has the fewest elements, as upstream does.
    ``reduce_gradients`` gives the owner the mean gradient. ``step`` updates the owner's parameters
    and sends them to the other ranks. All ranks of the ring make these calls.

    Everything else is the optimizer's own, ``param_groups`` with all parameters included.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, hcg: HybridCommunicateGroup) -> None:
        """Divide the parameters.

        Args:
            optimizer: Any optimizer of torch that skips parameters without a gradient. It has the
                same parameters, in one order, on all ranks of the ring. Parameters that
                are added later are divided at the next call.
            hcg: Its sharding axis has the ring.

        Raises:
            ArgumentError: ``hcg`` has no sharding axis.
        """
        self._inner_opt, self._ring = optimizer, hcg.get_sharding_parallel_group().ring
        self._owners: dict[Tensor, int] = {}
        self._elements = [0] * self._ring.size
        self._divide()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner_opt, name)

    def _divide(self) -> list[Tensor]:
        """Give each parameter without an owner one; return all parameters."""
        every = [one for group in self._inner_opt.param_groups for one in group["params"]]
        unowned = [one for one in every if one not in self._owners]
        for one in sorted(unowned, key=torch.numel, reverse=True):
            owner = self._elements.index(min(self._elements))
            self._owners[one] = owner
            self._elements[owner] += one.numel()
        return every

    def filter_parameters(
        self, parameter_list: Iterable[Tensor], hcg: HybridCommunicateGroup | None = None
    ) -> list[Tensor]:
        """Return the parameters of the list that this rank owns.

        Args:
            parameter_list: Parameters of the optimizer.
            hcg: Ignored: the constructor has it.
        """
        self._divide()
        return [one for one in parameter_list if self._owners[one] == self._ring.rank]

    @torch.no_grad()
    def reduce_gradients(
        self, parameter_list: Iterable[Tensor], hcg: HybridCommunicateGroup | None = None
    ) -> None:
        """Give the owner of each parameter the mean gradient; other ranks keep their own gradient.

        Args:
            parameter_list: The same on every rank. Parameters without a gradient are skipped, as
                upstream does.
            hcg: Ignored: the constructor has it.
        """
        self._divide()
        with self._ring.group():
            for one in parameter_list:
                if one.grad is not None:
                    owner = self._owners[one]
                    self._ring.reduce(one.grad, one.grad, root=owner, op="avg")

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that this rank owns, and get the others from their owners."""
        trained = [one for one in self._divide() if one.grad is not None]
        with self._without_gradients_of_others(trained):
            self._inner_opt.step()
        with self._ring.group():
            for one in trained:
                self._ring.broadcast(one.detach(), one.detach(), root=self._owners[one])

    @contextmanager
    def _without_gradients_of_others(self, trained: list[Tensor]) -> Iterator[None]:
        """Hide the gradients of parameters of other ranks: optimizers skip these parameters."""
        others = [(one, one.grad) for one in trained if self._owners[one] != self._ring.rank]
        try:
            for one, _ in others:
                one.grad = None
            yield
        finally:
            for one, gradient in others:
                one.grad = gradient

    def clear_grad(self, set_to_zero: bool = True) -> None:
        """Set the gradients of all parameters to zero, or drop them.

        Args:
            set_to_zero: False drops the gradients.
        """
        self._inner_opt.zero_grad(set_to_none=not set_to_zero)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state dict with the states of this rank's parameters alone.

        The entries "state" of all ranks together are those of the optimizer on one rank.
        """
        return self._inner_opt.state_dict()

    def set_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's states.

        Args:
            state_dict: Of this rank, of the whole optimizer, or one with the entries "state" of all
                ranks, whose number may have been another. It is not changed.

        Raises:
            ArgumentError: It has states, but none of a parameter that this rank trains.
            ValueError: From torch: it has other groups of parameters.
        """
        every, states = self._divide(), state_dict["state"]
        owned = [i for i, one in enumerate(every) if self._owners[one] == self._ring.rank]
        missing = [i for i in owned if every[i].requires_grad and i not in states]
        if states and missing:
            raise ArgumentError(
                f"{self._ring._describe('set_state_dict')}: the states are those of parameters "
                f"{sorted(states)}; expected {owned}, the parameters of this rank, without "
                f"{missing}; load the states of all ranks, joined in one dict, or add an empty "
                f"dict for a parameter that has had no step"
            )
        selected = {i: states[i] for i in owned if i in states}
        self._inner_opt.load_state_dict({**state_dict, "state": selected})

    load_state_dict = set_state_dict
