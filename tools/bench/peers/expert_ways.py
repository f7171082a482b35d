"""The peers that bring tokens to experts: set up and checked, or left out with a reason."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from commlib import CommContext
from commlib.tools.bench.peers.flashinfer_experts import Tokens
from commlib.tools.bench.peers.folder import load
from commlib.tools.bench.peers.memory import GpuMemory
from commlib.tools.bench.peers.watch import Watch
from commlib.tools.bench.peers.way import ROUNDING, Near

Tensor = torch.Tensor
Ways = dict[str, Callable[[], object]]


class ExpertPeers:
    """The ways of every library to dispatch tokens and to combine them, each right once."""

    def __init__(
        self,
        ring: CommContext,
        tokens: Tokens,
        receivers: Tensor,
        watch: Watch,
        libraries: Mapping[str, str],
    ) -> None:
        """Set up and check together with the other ranks of ``ring``, which are those of ``dist``.

        Args:
            ring: Its ranks hold the experts in order, each the same number of them.
            tokens: The tokens of this rank.
            receivers: 1 where a token has an expert on a rank, else 0: [from, token, to].
            watch: The guard of each step.
            libraries: Paths by file name.
        """
        self._ring, self._tokens, self._receivers, self._watch = ring, tokens, receivers, watch
        self._where = f"{len(tokens.x)} tokens"
        self.dispatches, self.combines = Ways(), Ways()
        for name, path in libraries.items():
            family = self._attempt(name, "set-up", partial(self._load, path))
            if family is not None:
                self._check(family)

    def _load(self, path: str) -> Any:
        return load(path, GpuMemory(self._ring), self._tokens)

    def _check(self, family: Any) -> None:
        """Keep the ways of ``family`` that are right; it can't combine what it did not dispatch."""
        expected = self._expected()
        for name, call in family.dispatches().items():
            trial = partial(check_dispatch, name, call, family.received, expected)
            if not self._attempt(name, "dispatch", trial):
                return
            self.dispatches[name] = call
        copies = self._receivers[self._ring.rank].sum(1).to(self._tokens.x.device)
        for name, call in family.combines().items():
            trial = partial(check_combine, name, call, self._near(copies))
            if self._attempt(name, "combine", trial):
                self.combines[name] = call

    def _attempt(self, name: str, step: str, trial: Callable[[], Any]) -> Any:
        if name in self._watch.lost:
            return None
        return self._watch.attempt(name, f"{self._where}, {step}", trial)

    def _expected(self) -> list[Tensor]:
        """Return the tokens of each rank that have an expert here."""
        parts = [torch.empty_like(self._tokens.x) for _ in range(self._ring.size)]
        dist.all_gather(parts, self._tokens.x)
        wanted = self._receivers[:, :, self._ring.rank].bool().to(self._tokens.x.device)
        return [part[mask] for part, mask in zip(parts, wanted, strict=True)]

    def _near(self, copies: Tensor) -> Near:
        """Return the sum of ``copies`` of each token: every rank returns what it got."""
        exact = self._tokens.x.double() * copies[:, None]
        return Near(exact, exact.abs() * ROUNDING)


def check_dispatch(
    name: str,
    call: Callable[[], object],
    received: Callable[[], Sequence[Tensor]],
    expected: Sequence[Tensor],
) -> bool:
    """Dispatch once; return True, or raise if other tokens than those of ``expected`` are here."""
    call()
    for rank, (actual, right) in enumerate(zip(received(), expected, strict=True)):
        if not same_rows(actual, right):
            raise AssertionError(f"{name}: wrong tokens from rank {rank}")
    return True


def check_combine(name: str, call: Callable[[], Any], near: Near) -> bool:
    """Combine once; return True, or raise at a wrong sum."""
    if not near.holds(call()):
        raise AssertionError(f"{name}: wrong sums of {len(near.exact)} tokens")
    return True


def same_rows(found: Tensor, expected: Tensor) -> bool:
    """Return True if two matrices have the same rows, bit by bit, in any order."""
    if found.shape != expected.shape:
        return False
    return torch.equal(_ordered(found), _ordered(expected))


def _ordered(rows: Tensor) -> Tensor:
    """Return the bits of the rows in an order that depends on them alone."""
    bits = rows.contiguous().view(torch.int16)
    same = torch.Generator().manual_seed(0)
    factors = torch.randint(2**31, (bits.shape[1],), generator=same).to(bits.device)
    return bits[(bits * factors).sum(1).argsort()]
