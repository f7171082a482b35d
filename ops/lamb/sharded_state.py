"""The buffers of all parameters, with this rank's shard of the state, and its update."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commlib.ops.lamb import checkpoint
from commlib.ops.lamb.gradients import Gradients
from commlib.ops.lamb.lamb_rings import LambRings
from commlib.ops.lamb.part import make_parts
from commlib.ops.lamb.settings import Settings
from commlib.ops.lamb.update import Rule, trust_ratios, update_moments, update_weights

Tensor = torch.Tensor
Groups = Sequence[dict[str, Any]]
Moments = tuple[tuple[float, float], float]


class ShardedState:
    """Flat buffers of all parameters, and this rank's shard of moments and master weights.

    Attributes:
        parts: Buffers per dtype.
        gradients: Collects and reduces the gradients.
        order: Position among the parameters of the program, per parameter of all parts.
        steps: [1] int64 number of updates.
        skipped: [1] bool; True if the last update changed nothing.

    Args:
        groups: Parameter groups of the optimizer.
        with_decay: Per parameter, whether weight decay applies to it.
        rings: The rings; the parameters of rank 0 are sent to all.
        settings: Settings of all parameters.
    """

    def __init__(
        self, groups: Groups, with_decay: Sequence[bool], rings: LambRings, settings: Settings
    ) -> None:
        self._rings, self._settings = rings, settings
        device = rings.ring.device
        self.order, self.parts = make_parts(
            [p for group in groups for p in group["params"]],
            shards=rings.shard.size,
            rank=rings.shard.rank,
            accumulates=settings.accumulation_steps > 1,
            in_float32=settings.use_master_acc_grad,
        )
        for part in self.parts:
            rings.ring.broadcast(part.values, part.values, root=0)
            part.refresh_weights()
        owners = [number for number, group in enumerate(groups) for _ in group["params"]]
        self._group_of = torch.tensor([owners[n] for n in self.order], device=device)
        flags = [float(with_decay[n]) for n in self.order]
        self._with_decay = torch.tensor(flags, dtype=torch.float32, device=device)
        self.steps = torch.zeros(1, dtype=torch.int64, device=device)
        self.skipped = torch.zeros(1, dtype=torch.bool, device=device)
        self.gradients = Gradients(self.parts, rings, settings)

    def accumulate(self) -> None:
        """Add the gradients of a microbatch to the sum."""
        self.gradients.collect()
        for part in self.parts:
            assert part.accumulated is not None
            part.accumulated.add_(part.gradients)

    def update(
        self, groups: Groups, moments: Moments, scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """Update the parameters of all ranks by the gradients or, with accumulation, their sum.

        Args:
            groups: Parameter groups with their rates and weight decay.
            moments: Betas and eps.
            scale: Factor of the gradients, as ``Gradients.reduce`` takes it.
            found_inf: Above 0 if this rank knows of a gradient that is not finite.
        """
        betas, eps = moments
        if self._settings.accumulation_steps == 1:
            self.gradients.collect()
        else:
            self.gradients.take_sum()
        reduced = self.gradients.reduce(scale, found_inf)
        self.skipped.copy_(reduced.skip)
        steps = (self.steps + 1).double()
        corrections = [(1 - torch.pow(beta, steps)).float() for beta in betas]
        factors = torch.cat([reduced.factor, *corrections])
        rates = self._per_parameter(groups, "lr")
        decays = self._per_parameter(groups, "weight_decay") * self._with_decay
        master_norm = self._settings.use_master_param_norm
        rule = Rule(betas, eps, master_norm, factors, rates, decays, self.skipped)
        norms = factors.new_empty((len(rates), 2))
        for part, shard in zip(self.parts, reduced.shards, strict=True):
            update_moments(part, shard, rule, norms)
        ratios = trust_ratios(self._rings.total(norms), rates)
        for part in self.parts:
            update_weights(part, rule, ratios)
            self._rings.gather(part.values, part.layout.shard(part.rank))
            torch.autograd.graph.increment_version(part.params)
        self.steps.add_(~self.skipped)

    def _per_parameter(self, groups: Groups, name: str) -> Tensor:
        """Return a setting of the parameter groups, one float32 per parameter of all parts."""
        values = self._with_decay.new_empty(len(groups))
        for place, group in enumerate(groups):
            given = group[name]
            if isinstance(given, Tensor):
                values[place].copy_(given.view(()))
            else:
                values[place].fill_(given)
        return values[self._group_of]

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shards of the moments and of the master weights."""
        return [shard for part in self.parts for shard in checkpoint.names(part).values()]

    def gathered(self) -> checkpoint.State:
        """Return the whole state in CPU memory; every member of the shard ring calls it."""
        return checkpoint.gathered(self.parts, self._rings, self.order, self.steps)

    def check(self, groups: Groups, given: Mapping[str, Any]) -> None:
        """Raise ``ArgumentError`` if ``given`` is not a state of these parameters."""
        checkpoint.check(self._rings.ring, self.parts, self.order, groups, given)

    def load(self, state: Mapping[int, Any]) -> None:
        """Take this rank's shards from the whole state."""
        checkpoint.load(self.parts, self.order, state)
        self.steps.copy_(state[0][checkpoint.STEP])
