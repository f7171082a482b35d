"""Rows to their owners and sums back by torch operators and all_to_all, in fixed shapes."""

from collections.abc import Sequence

import numpy as np
import torch

from commlib.core.context import CommContext
from commlib.errors import CommTimeout
from commlib.p2p.routes import routes

Tensor = torch.Tensor

SAME_MASK = "pass the same active= on every rank that takes part"


class PlainExchange:
    """The exchanges of one call between the ranks that take part.

    On a CPU, ranks that are left out need not make the call. On a GPU all ranks make it: a
    captured call can't leave out what the mask says at its replay.

    Attributes:
        present: bool [size], the ranks whose rows count; None if all take part.
    """

    def __init__(self, ring: CommContext, active: Tensor | None, use_calc_stream: bool) -> None:
        """Read the mask, on the device. A rank that is left out exchanges with no other."""
        self._ring, self._calc = ring, use_calc_stream
        mask = None if active is None else active != 0
        self.present = None if mask is None else mask & mask[ring.rank]

    @property
    def may_miss_ranks(self) -> bool:
        """Return True if ranks that are left out need not make the call."""
        return self.present is not None and self._ring.device.type == "cpu"

    def all_to_all(self, x: Tensor) -> Tensor:
        """Send ``x[r]`` to rank r and return what every rank sends: [size, ...]."""
        ring = self._ring
        if self.present is None or not self.may_miss_ranks:
            return ring.all_to_all(torch.empty_like(x), x, use_calc_stream=self._calc)
        mask = self.present.tolist()
        members = [rank for rank in range(ring.size) if mask[rank]] or [ring.rank]
        rows = np.zeros((ring.size, ring.size, 1), np.int64)
        rows[np.ix_(members, members)] = 1
        flat = x.view(ring.size, x[0].numel())
        sent = flat[members]
        taken, plan = torch.empty_like(sent), routes(rows, ring.rank, back=False)
        try:
            ring._exchange_rows(taken, sent, plan, use_calc_stream=self._calc, by_all=False)
        except CommTimeout as error:
            raise CommTimeout(
                f"{error}; active leaves out all ranks but {members} on this rank, which has "
                f"waited for the others of them; {SAME_MASK}"
            ) from error
        out = torch.zeros_like(flat)
        out[members] = taken
        return out.view(x.shape)

    def all_gather(self, counts: Tensor) -> Tensor:
        """Return every rank's 1-D ``counts``: [size, ...], 0 for a rank that is left out."""
        every = self.all_to_all(counts.expand(self._ring.size, -1).contiguous())
        return every if self.present is None else torch.where(self.present[:, None], every, 0)

    def masked(self, values: Tensor, ranks: Tensor) -> Tensor:
        """Return ``values`` with -1 where the rank is left out."""
        if self.present is None:
            return values
        return torch.where(self.present[ranks.clamp(min=0)], values, -1)

    def to_owners(self, rows: Tensor, positions: Tensor, owners: Tensor, count: int) -> Tensor:
        """Bring a row of bytes per choice to its position on its owner.

        Args:
            rows: uint8 [tokens * top_k, bytes].
            positions: The row on the owner, -1 for none: [tokens, top_k].
            owners: The rank of each choice: [tokens, top_k].
            count: Rows of a rank.

        Returns:
            uint8 [size, count, bytes]: what each rank has sent, at its position.
        """
        size = self._ring.size
        target = torch.where(self.masked(positions, owners) >= 0, owners * count + positions, -1)
        sent = placed(rows, target.reshape(-1), size * count)
        return self.all_to_all(sent.view(size, count, rows.shape[1]))

    def to_tokens(self, sums: Tensor, sources: Tensor, positions: Tensor, owners: Tensor) -> Tensor:
        """Bring partial sums to their tokens and add them in order of ranks: [tokens, width].

        Args:
            sums: ``partial_sums`` of this rank's rows: [rows, width].
            sources: The rank that gets each row's sum; -1 for a row that is not a token's first.
            positions, owners: As in ``to_owners``.
        """
        size, count, width = self._ring.size, *sums.shape
        line = torch.arange(count, device=sums.device)
        target = torch.where(self.masked(sources, sources) >= 0, sources * count + line, -1)
        received = self.all_to_all(placed(sums, target, size * count).view(size, count, width))
        ranks = torch.where(self.masked(positions, owners) >= 0, owners, size)
        return summed(received, ranks, positions.clamp(min=0))


def placed(rows: Tensor, target: Tensor, count: int) -> Tensor:
    """Return [count, width] with ``rows[i]`` at ``target[i]``, zero elsewhere; -1 drops a row."""
    last = torch.where(target >= 0, target, count)  # dropped rows share one line
    return rows.new_zeros((count + 1, rows.shape[1])).index_copy_(0, last, rows)[:count]


def picked(received: Tensor, sources: Tensor) -> Tensor:
    """Return each row from the rank that has sent it, zero where ``sources`` is -1."""
    line = torch.arange(len(sources), device=sources.device)
    return torch.where((sources >= 0)[:, None], received[sources.clamp(min=0), line], 0)


def partial_sums(rows: Tensor, link: Tensor, top_k: int) -> Tensor:
    """Return, at the first row of each token, the sum of its rows here in order of choice."""
    total, following = rows, link >> 1
    for _ in range(top_k - 1):
        at = (following - 1).clamp(min=0)
        more = following > 0
        total = torch.where(more[:, None], total + rows[at], total)
        following = torch.where(more, link[at] >> 1, 0)
    return total


def summed(received: Tensor, ranks: Tensor, positions: Tensor) -> Tensor:
    """Return each token's sum of ``received[rank, position]``, each rank once, in their order.

    Args:
        received: [size, rows, width].
        ranks: [tokens, top_k], the rank of each choice; ``size`` for a choice without a row.
        positions: [tokens, top_k]. The first choice of a rank has the place of that rank's sum.
    """
    size, order = len(received), ranks.argsort(dim=1, stable=True)
    ranks, positions = ranks.gather(1, order), positions.gather(1, order)
    total = received.new_zeros((len(ranks), received.shape[2]))
    for choice in range(ranks.shape[1]):
        rank = ranks[:, choice]
        fresh = rank < size
        if choice:
            fresh = fresh & (rank != ranks[:, choice - 1])
        part = received[rank.clamp(max=size - 1), positions[:, choice]]
        added = torch.where((ranks[:, 0] != rank)[:, None], total + part, part)
        total = torch.where(fresh[:, None], added, total)
    return total


def packed(columns: Sequence[Tensor]) -> Tensor:
    """Return the columns of each row as its bytes: uint8 [rows, bytes]."""
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns], 1)


def unpacked(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the columns of ``packed``, with the widths and dtypes of ``like``."""
    widths = [column.shape[1] * column.itemsize for column in like]
    return [
        part.reshape(-1).clone().view(column.dtype).view(len(rows), column.shape[1])
        for part, column in zip(rows.split(widths, 1), like, strict=True)
    ]
