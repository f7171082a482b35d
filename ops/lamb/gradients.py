"""The gradients of one update: collected, scaled, clipped, summed over the ranks, and checked."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from commlib.errors import ArgumentError
from commlib.ops.lamb.lamb_rings import NAME, LambRings
from commlib.ops.lamb.part import Part
from commlib.ops.lamb.settings import Settings

Tensor = torch.Tensor

_TINY = 1e-6  # summand of a norm that is a divisor


class Reduced(NamedTuple):
    """Summed gradients of this rank's shards.

    Attributes:
        shards: [shard] per part.
        factor: [1] float32 factor that the gradients still need.
        skip: [1] bool; True if one of them is not finite on any rank.
    """

    shards: list[Tensor]
    factor: Tensor
    skip: Tensor


class Gradients:
    """Collects and reduces the gradients of all parts; nothing is read by the host.

    Attributes:
        one: [1] float32.
        zero: [1] float32.
    """

    def __init__(self, parts: Sequence[Part], rings: LambRings, settings: Settings) -> None:
        self._parts, self._rings, self._settings = parts, rings, settings
        self.one = torch.ones(1, dtype=torch.float32, device=rings.ring.device)
        self.zero = torch.zeros_like(self.one)

    def collect(self) -> None:
        """Bring all gradients into the flat buffers.

        Raises:
            ArgumentError: No parameter has a gradient, or one is sparse.
        """
        grads = [p.grad for part in self._parts for p in part.params if p.grad is not None]
        prefix = self._rings.ring._describe(NAME)
        if not grads:
            raise ArgumentError(
                f"{prefix}: no parameter has a gradient; expected one or more; call "
                f"loss.backward() first"
            )
        for grad in grads:
            if grad.layout is not torch.strided:
                raise ArgumentError(
                    f"{prefix}: a gradient of shape {tuple(grad.shape)} has {grad.layout}; "
                    f"expected torch.strided; pass sparse=False to the embedding"
                )
        for part in self._parts:
            part.collect_gradients()

    def take_sum(self) -> None:
        """Move the accumulated sum into the gradients, and start a new sum."""
        for part in self._parts:
            assert part.accumulated is not None
            part.gradients.copy_(part.accumulated)
            part.accumulated.zero_()

    def reduce(self, scale: Tensor | None, suspect: Tensor | None) -> Reduced:
        """Sum the gradients over the ranks.

        Args:
            scale: Factor that this rank's loss was multiplied by; None for 1. All ranks skip the
                step if one is not a finite number above 0.
            suspect: [1] above 0 if this rank knows why the step must be skipped.
        """
        rings, settings = self._rings, self._settings
        invalid = self.zero if suspect is None else suspect
        if scale is not None:
            valid = (scale > 0) & scale.isfinite()
            invalid, scale = invalid + ~valid, torch.where(valid, scale, self.one)
        scale = self._common_scale(scale)
        clips = settings.max_grad_norm > 0
        if clips and not settings.clip_after_allreduce:
            self._clip_own(scale)
        shards = [
            rings.reduce(part.gradients, part.layout.shard(part.rank)) for part in self._parts
        ]
        clips = clips and settings.clip_after_allreduce
        square = _square(shards) if clips else _not_finite(shards)
        square, invalid = rings.total(torch.cat([square, rings.any(invalid)])).split(1)
        factor = 1 / scale
        if not settings.is_grad_scaled_by_nranks:
            factor = factor / rings.ring.size
        if clips:
            limit = settings.max_grad_norm / (square.sqrt() * factor + _TINY)
            factor = factor * limit.clamp(max=1)
        return Reduced(shards, factor, ~(square + invalid).isfinite() | (invalid > 0))

    def _common_scale(self, scale: Tensor | None) -> Tensor:
        """Bring this rank's gradients to the smallest scale of all ranks, over their number.

        A GradScaler sees the gradients of one rank only. So the scales of ranks differ after one of
        them has had an overflow. And the sum must not overflow where no summand does, because no
        scaler would lower its scale.

        Returns:
            [1] the scale that the gradients have now.
        """
        if scale is None:
            return self.one
        ranks = self._rings.ring.size
        if ranks == 1:
            return scale
        common = self._rings.least(scale) / ranks
        self._multiply(common / scale)
        return common

    def _clip_own(self, scale: Tensor) -> None:
        """Limit the norm of this rank's gradients, in place; leave gradients that are not finite.

        The norm of a loss that was divided by the number of ranks is multiplied by it.
        """
        norm = _square([part.gradients for part in self._parts]).sqrt()
        if self._settings.is_grad_scaled_by_nranks:
            norm = norm * self._rings.ring.size
        factor = scale * self._settings.max_grad_norm / (norm + _TINY)
        self._multiply(torch.where(factor < 1, factor, self.one))

    def _multiply(self, factor: Tensor) -> None:
        for part in self._parts:
            part.gradients.mul_(factor.view(()))


def _square(flats: Sequence[Tensor]) -> Tensor:
    """Return [1] the sum of the squares in float32."""
    norms = [torch.linalg.vector_norm(flat, dtype=torch.float32) for flat in flats]
    return torch.stack(norms).square().sum(0, keepdim=True)


def _not_finite(flats: Sequence[Tensor]) -> Tensor:
    """Return [1] infinity if an element is not finite, else 0."""
    largest = [torch.linalg.vector_norm(flat, torch.inf, dtype=torch.float32) for flat in flats]
    bad = ~torch.stack(largest).isfinite().all(0, keepdim=True)
    return torch.zeros_like(largest[0]).view(1).masked_fill(bad, torch.inf)
