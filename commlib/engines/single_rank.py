"""The engine of a ring of one rank: every collective is the identity."""

from typing import Any

import torch

from commlib.deadlines import Deadline
from commlib.engines.base import Engine
from commlib.engines.local import copy, multiplied
from commlib.engines.reductions import Reducer, ReductionSpec, factor_of
from commlib.p2p.routes import Routes
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import Health, RingIdentity
from commlib.rendezvous.roll_call import Meeting

Tensor = torch.Tensor


class SingleRankEngine(Engine):
    """Copies on the current stream; accepts and refuses what the program's engine does."""

    name = "single rank"

    def __init__(
        self, identity: RingIdentity, hosts: HostExchange, health: Health, reducer: Reducer
    ) -> None:
        super().__init__(identity, hosts, health)
        self.reducer = reducer  # type: ignore[misc]  # of the engine that it replaces

    def all_reduce(self, out: Tensor, x: Tensor, reduction: ReductionSpec) -> None:
        """Copy, or apply the factor of premul_sum."""
        _reduced(out, x, reduction)

    def all_gather(self, out: Tensor, x: Tensor) -> None:
        """Copy."""
        copy(out, x)

    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: ReductionSpec) -> None:
        """Copy, or apply the factor of premul_sum."""
        _reduced(out, x, reduction)

    def broadcast(self, out: Tensor | None, x: Tensor | None, root: int) -> None:
        """Copy."""
        copy(out, x)

    def reduce(self, out: Tensor | None, x: Tensor, root: int, reduction: ReductionSpec) -> None:
        """Copy, or apply the factor of premul_sum."""
        _reduced(out, x, reduction)

    def gather(self, out: Tensor | None, x: Tensor, root: int) -> None:
        """Copy."""
        copy(out, x)

    def scatter(self, out: Tensor, x: Tensor | None, root: int) -> None:
        """Copy."""
        copy(out, x)

    def all_to_all(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> None:
        """Copy."""
        copy(out, x)

    def exchange_rows(self, out: Tensor, x: Tensor, routes: Routes) -> None:
        """Copy each row to its place."""
        self.own_rows(out, x, routes)

    def send(self, out: None, x: Tensor, peer: int) -> Any:
        """Raise: validation refuses a peer of a ring of one."""
        raise AssertionError("a ring of one rank has no peer")

    def recv(self, out: Tensor, x: None, peer: int) -> Any:
        """Raise: validation refuses a peer of a ring of one."""
        raise AssertionError("a ring of one rank has no peer")

    def barrier(self, out: None, x: None) -> None:
        """Do nothing: no other rank exists."""
        return

    @property
    def connected(self) -> bool:
        """Return False: a ring of one rank has no communicator."""
        return False

    def open(self, meeting: Meeting, deadline: Deadline) -> None:
        """Do nothing."""

    def close(self, deadline: Deadline) -> None:
        """Do nothing."""

    def abort(self) -> None:
        """Do nothing."""


def _reduced(out: Tensor | None, x: Tensor, reduction: ReductionSpec) -> None:
    factor = factor_of(reduction)
    if factor is None:
        copy(out, x)
    else:
        multiplied(out, x, factor)
