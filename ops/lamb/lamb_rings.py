"""The rings of a sharded optimizer: all ranks, the ranks of one copy of the state, and across."""

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.errors import ArgumentError
from commlib.ops.arguments import Ring, ring_number

NAME = "DistributedFusedLamb"
Tensor = torch.Tensor


class LambRings:
    """The rings that gradients are summed over and that state is divided over.

    Attributes:
        ring: All ranks.
        shard: The ranks that divide one copy of the state; the ring itself by default.
        cross: The ranks with the same shard, if the sum is done in two stages, else None.
    """

    def __init__(self, ring: CommContext, shard_ring: Ring | None, cross_ring: Ring | None) -> None:
        self.ring = ring
        self.shard = ring if shard_ring is None else _ring("shard_ring", shard_ring)
        self.cross = None if cross_ring is None else _ring("cross_ring", cross_ring)

    def check(self) -> None:
        """Raise ``ArgumentError`` if the rings do not divide the ranks of ``ring``."""
        ring, shard, cross = self.ring, self.shard, self.cross
        prefix = ring._describe(NAME)
        for role, other in (("shard_ring", shard), ("cross_ring", cross)):
            if other is not None and not {*other.ranks} <= {*ring.ranks}:
                raise ArgumentError(
                    f"{prefix}: {role} is ring {other.ring_id} of ranks {list(other.ranks)}; "
                    f"expected ranks of {list(ring.ranks)}; pass a ring of some of these"
                )
        if ring.size % shard.size:
            raise ArgumentError(
                f"{prefix}: shard_ring is ring {shard.ring_id} of size {shard.size}; expected a "
                f"divisor of {ring.size}; pass rings of one size"
            )
        if cross is not None and cross.size * shard.size != ring.size:
            raise ArgumentError(
                f"{prefix}: cross_ring is ring {cross.ring_id} of size {cross.size} and shard_ring "
                f"has size {shard.size}; expected sizes whose product is {ring.size}; pass "
                f"shard_ring= too, and one cross_ring per position in it"
            )

    def check_positions(self, positions: list[int]) -> None:
        """Raise ``ArgumentError`` if members of ``cross`` own different shards.

        Args:
            positions: Position in its shard ring of every rank of ``ring``.
        """
        if self.cross is None:
            return
        shards = [positions[self.ring.ranks.index(member)] for member in self.cross.ranks]
        if len({*shards}) > 1:
            raise ArgumentError(
                f"{self.ring._describe(NAME)}: cross_ring is ring {self.cross.ring_id} of ranks "
                f"{list(self.cross.ranks)}, whose positions in their shard rings are {shards}; "
                f"expected one position; pass a ring of the ranks with the same position"
            )

    def reduce(self, flat: Tensor, shard: slice) -> Tensor:
        """Return this rank's slice of the sum of ``flat`` over all ranks.

        With ``shard_ring`` and without ``cross_ring``, ``flat`` becomes the sum.
        """
        if self.ring.size == 1:
            return flat
        if self.shard.size < self.ring.size and self.cross is None:
            self.ring.all_reduce(flat, flat)
            return flat[shard]
        out = flat.new_empty(shard.stop - shard.start)
        if self.shard.size > 1:
            self.shard.reduce_scatter(out, flat)
        else:
            out.copy_(flat)
        if self.cross is not None and self.cross.size > 1:
            self.cross.all_reduce(out, out)
        return out

    def gather(self, flat: Tensor, shard: slice) -> Tensor:
        """Fill ``flat`` with the slices of all ranks of ``shard``, and return it."""
        if self.shard.size > 1:
            self.shard.all_gather(flat, flat[shard])
        return flat

    def total(self, x: Tensor) -> Tensor:
        """Return the sum of ``x`` over ``shard``, with the same bits on every rank.

        The ranks are added in their order, so engines and nodes can't differ.
        """
        if self.shard.size == 1:
            return x
        gathered = x.new_empty((self.shard.size, *x.shape))
        self.shard.all_gather(gathered, x)
        return gathered.sum(0)

    def least(self, x: Tensor) -> Tensor:
        """Return the minimum of ``x`` over all ranks."""
        out = torch.empty_like(x)
        self.ring.all_reduce(out, x, op="min")
        return out

    def any(self, flag: Tensor) -> Tensor:
        """Return a number above 0 if ``flag`` [1] is above 0 on a rank that holds other shards.

        ``total`` adds the flags inside of ``shard``; this covers the other copies of the state.
        """
        if self.shard.size == self.ring.size:
            return flag
        out = torch.empty_like(flag)
        self.ring.all_reduce(out, flag, op="max")
        return out


def _ring(role: str, ring: Ring) -> CommContext:
    return comm(ring_number(NAME, ring, role))
