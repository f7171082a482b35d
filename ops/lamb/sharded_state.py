"""The buffers of all parameters, with this rank's shard of the state, and its update."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from commlib.errors import ArgumentError
from commlib.ops.agreement import Fact
from commlib.ops.lamb import checkpoint, state_checks, step_checks
from commlib.ops.lamb.gradients import Gradients
from commlib.ops.lamb.lamb_rings import NAME, LambRings
from commlib.ops.lamb.part import make_parts
from commlib.ops.lamb.settings import Settings, common_moments
from commlib.ops.lamb.update import Rule, trust_ratios, update_moments, update_weights

Tensor = torch.Tensor
Groups = Sequence[dict[str, Any]]


class _Numbers(NamedTuple):
    """The numbers of one step: [parameters] rates and decays, moments, and [1] a reason to skip."""

    rates: Tensor
    decays: Tensor
    betas: tuple[float, float]
    eps: float
    suspect: Tensor | None


class ShardedState:
    """Flat buffers of all parameters, and this rank's shard of moments and master weights.

    Attributes:
        parts: Buffers per dtype.
        gradients: Collects and reduces the gradients.
        order: Position among the parameters of the program, per parameter of all parts.
        steps: [1] int64 number of updates.
        skipped: [1] bool; True if the last update changed nothing.
        zeros: [parameters] float32.

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
        self._listed = [p for group in groups for p in group["params"]]
        device = rings.ring.device
        self.order, self.parts = make_parts(
            self._listed,
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
        self.zeros = torch.zeros_like(self._with_decay)
        self.skipped = torch.zeros(1, dtype=torch.bool, device=device)
        self.gradients = Gradients(self.parts, rings, settings)

    def accumulate(self) -> None:
        """Add the gradients of a microbatch to the sum."""
        self.settle()
        self.gradients.collect()
        for part in self.parts:
            assert part.accumulated is not None
            part.accumulated.add_(part.gradients)

    def update(self, groups: Groups, scale: Any, found_inf: Any) -> None:
        """Update the parameters of all ranks by the gradients or, with accumulation, their sum.

        A rank with an error takes part in the reduction, so that no other rank waits for it. All
        ranks skip the step, and this rank raises the error.

        Args:
            groups: Parameter groups with their rates and weight decay.
            scale: Factor of the gradients, as ``Gradients.reduce`` takes it, or a number.
            found_inf: Above 0 if this rank knows of a gradient that is not finite.
        """
        error = self._prepare(groups, scale, found_inf)
        if error is None:
            self._step(self._numbers(groups, found_inf), self._one_number(scale))
            return
        if self._rings.ring.size > 1:
            numbers = _Numbers(self.zeros, self.zeros, (0.0, 0.0), 1.0, self.gradients.one)
            self._step(numbers, None if scale is None else self.gradients.one)
        raise error

    def settle(self) -> None:
        """Put parameters back that have left the buffers; raises where they do not fit."""
        step_checks.settle(self._rings.ring, self.parts, self.order)

    def _prepare(self, groups: Groups, scale: Any, found_inf: Any) -> ArgumentError | None:
        """Check the step and collect the gradients; return the error of this rank."""
        accumulates, ring = self._settings.accumulation_steps > 1, self._rings.ring
        try:
            step_checks.check_groups(ring, groups, self._listed)
            step_checks.check_scale(ring, "grad_scale", scale)
            step_checks.check_scale(ring, "found_inf", found_inf)
            self.settle()
            if not accumulates:
                self.gradients.collect()
        except ArgumentError as error:
            return error
        finally:
            if accumulates:
                self.gradients.take_sum()
        return None

    def _numbers(self, groups: Groups, found_inf: Any) -> "_Numbers":
        """Return rates and moments of a step, and [1] above 0 if a rate in a tensor is invalid."""
        rates = {name: self._per_parameter(groups, name) for name in ("lr", "weight_decay")}
        suspect = self._one_number(found_inf)
        for name, values in rates.items():
            if any(isinstance(group[name], Tensor) for group in groups):
                bad = ~((values >= 0) & values.isfinite()).all()
                suspect = bad.float().view(1) if suspect is None else suspect + bad
        decays = rates["weight_decay"] * self._with_decay
        betas, eps = common_moments(NAME, groups)
        return _Numbers(rates["lr"], decays, betas, eps, suspect)

    def _one_number(self, value: Any) -> Tensor | None:
        """Return [1] float32 on the device."""
        if value is None:
            return None
        if isinstance(value, Tensor):
            return value.detach().to(self.zeros.device, torch.float32).view(1)
        return self.gradients.one * float(value)

    def _step(self, numbers: "_Numbers", scale: Tensor | None) -> None:
        reduced = self.gradients.reduce(scale, numbers.suspect)
        self.skipped.copy_(reduced.skip)
        steps = (self.steps + 1).double()
        corrections = [(1 - torch.pow(beta, steps)).float() for beta in numbers.betas]
        factors = torch.cat([reduced.factor, *corrections])
        rule = Rule(
            numbers.betas,
            numbers.eps,
            self._settings.use_master_param_norm,
            factors,
            numbers.rates,
            numbers.decays,
            self.skipped,
        )
        norms = factors.new_empty((len(numbers.rates), 2))
        for part, shard in zip(self.parts, reduced.shards, strict=True):
            update_moments(part, shard, rule, norms)
        ratios = trust_ratios(self._rings.total(norms), numbers.rates)
        for part in self.parts:
            update_weights(part, rule, ratios)
            self._rings.gather(part.values, part.layout.shard(part.rank))
            torch.autograd.graph.increment_version(part.params)
        self.steps.add_(~self.skipped)

    def _per_parameter(self, groups: Groups, name: str) -> Tensor:
        """Return a setting of the parameter groups, one float32 per parameter of all parts."""
        values = self._with_decay.new_empty(len(groups))
        for index, group in enumerate(groups):
            value = group[name]
            if isinstance(value, Tensor):
                values[index].copy_(value.view(()))
            else:
                values[index].fill_(value)
        return values[self._group_of]

    @property
    def shards(self) -> list[Tensor]:
        """This rank's shards of the moments and of the master weights."""
        return [shard for part in self.parts for shard in checkpoint.names(part).values()]

    def gathered(self) -> checkpoint.State:
        """Return the whole state in CPU memory; every member of the shard ring calls it."""
        return checkpoint.gathered(self.parts, self._rings, self.order, self.steps)

    def check(self, groups: Groups, given: Mapping[str, Any]) -> list[Fact]:
        """Return what the ranks compare; raise ``ArgumentError`` for a state of something else."""
        return state_checks.check(self._rings.ring, self.parts, self.order, groups, given)

    def load(self, state: Mapping[int, Any]) -> None:
        """Take this rank's shards from the whole state."""
        checkpoint.load(self.parts, self.order, state)
        self.steps.copy_(state[0][checkpoint.STEP])
        for part in self.parts:
            if part.accumulated is not None:
                part.accumulated.zero_()
