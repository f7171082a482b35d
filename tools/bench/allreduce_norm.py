"""A sum over the ranks, a residual and a norm: one operator, or an all-reduce and a kernel."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from commlib import ops
from commlib.tools.bench.peers.way import ROUNDING, Near, Way, expect_sum
from commlib.tools.bench.peers.ways import OURS, Ways

OPERATOR = "all_reduce_residual_norm"
OURS_NORM = f"ops.{OPERATOR}"
WIDTH, EPS = 8192, 1e-6

Tensor = torch.Tensor


def available() -> bool:
    """Return True if this commlib has the operator."""
    return hasattr(ops, OPERATOR)


def peer(way: str) -> str:
    """Name the peer that adds up by ``way``."""
    return f"{way} + compiled norm"


class NormWays:
    """The ways of one rank to add up, add a residual, and normalise."""

    def __init__(self, ways: Ways, tokens: int) -> None:
        """Draw a residual and a weight, the same on every rank, as a model has them."""
        device = ways.ring.device
        same = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, device=device, generator=same)
        self.plain, self.families = ways.of(tokens, WIDTH), ways.families
        self.residual = draw(tokens, WIDTH).to(self.plain[OURS].x.dtype)
        self.weight = (1 + 0.1 * draw(WIDTH)).to(self.residual.dtype)
        # For each number of tokens by itself: what suits the peers best.
        self._norm = torch.compile(normalised, fullgraph=True, dynamic=False)

    def all(self) -> dict[str, Way]:
        """Return our operator, one peer for each other way to add up, and the peers' operators."""
        x = self.plain[OURS].x
        peers = {name: way for name, way in self.plain.items() if name != OURS}
        ways = {OURS_NORM: Way(x, self._ours(x))} | {
            peer(name): Way(way.x, self._two_steps(way)) for name, way in peers.items()
        }
        for family in self.families.values():
            if hasattr(family, "norms"):
                ways |= family.norms(self.residual, self.weight, EPS)
        return ways

    def _ours(self, x: Tensor) -> Callable[[], Any]:
        fused = getattr(ops, OPERATOR)
        return lambda: fused(x, self.residual, self.weight, eps=EPS)

    def _two_steps(self, way: Way) -> Callable[[], Any]:
        return lambda: self._norm(way.call(), self.residual, self.weight)

    def expect(self, x: Tensor) -> tuple[Near, Near]:
        """Return what every rank's ``x`` must give."""
        (added,) = expect_sum(x)
        return exact_norm(added, self.residual, self.weight)


def exact_norm(added: Near, residual: Tensor, weight: Tensor) -> tuple[Near, Near]:
    """Return the normalised rows, and the rows before: the sum ``added`` with the residual."""
    total = added.exact + residual
    slack = added.slack + ROUNDING * total.abs()
    scale = (total.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    return Near(total * scale, 2 * slack * scale.abs()), Near(total, slack)


def normalised(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the same from an ``x`` that is added up already: the peers' second step."""
    total = x + residual
    return torch.nn.functional.rms_norm(total, total.shape[-1:], weight, EPS), total
