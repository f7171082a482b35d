"""Tables of an exchange between tokens and experts: who sent which row, and where it is."""

from typing import NamedTuple

import torch

Tensor = torch.Tensor

FLOAT8 = torch.float8_e4m3fn
GROUP = 128  # elements of a row that share one float32 scale


class ExpertSpec(NamedTuple):
    """The numbers of one call, the same on every rank.

    Attributes:
        num_experts: Of all ranks. Rank r has those from ``r * local_experts(...)`` on.
        capacity: Rows per expert.
        top_k: Choices per token.
        dtype: Of the rows that are given.
        width: Elements of a row.
        quantize: Rows travel as float8_e4m3fn, with a scale per ``GROUP`` elements.
        weighted: The weights of the rows are applied.
        reports: Choices beyond the capacity are recorded for ``overflow``.
        counted: Of ``global_scatter`` or ``global_gather``: each rank is one expert.
    """

    num_experts: int
    capacity: int
    top_k: int
    dtype: torch.dtype
    width: int
    quantize: bool = False
    weighted: bool = True
    reports: bool = True
    counted: bool = False


class Choices(NamedTuple):
    """The experts of a rank's tokens, and the ranks that take part.

    Attributes:
        ids: int32 or int64 [tokens, top_k]; other numbers than those of experts are for none.
        weights: float32 [tokens, top_k]; None for ones.
        active: bool or uint8 [size]: a rank with 0 is left out. None if all take part.
    """

    ids: Tensor
    weights: Tensor | None
    active: Tensor | None


class ExpertTables(NamedTuple):
    """The tables that a dispatch leaves for the way back; dense tensors on the ring's device.

    Attributes:
        expert_ids: int32 [tokens, top_k]: the ids, -1 for no expert.
        positions: int32 [tokens, top_k]: the row on the expert's rank, ``local expert * capacity +
            place``; -1 for a choice without a row.
        sources: int32 [local experts * capacity, 4], one line per row on this rank: source rank,
            token, choice, link; -1 for a row that is not used. Bit 0 of ``link`` is set for the
            first of the rows of one token, in the order of its choices; the bits above are 1 + the
            next such row, 0 for none.
        row_weights: float32 [local experts * capacity]: 0 for a row that is not used.
    """

    expert_ids: Tensor
    positions: Tensor
    sources: Tensor
    row_weights: Tensor


class ExpertCounts(NamedTuple):
    """The number of rows per expert of a dispatch.

    Attributes:
        counts: int32 [local experts]: rows that are used.
        demand: int32 [num_experts]: choices over all ranks, also those beyond the capacity.
    """

    counts: Tensor
    demand: Tensor


class Overflow(NamedTuple):
    """The first expert of a call that got more choices than its capacity."""

    expert: int
    owner: int  # the rank of the expert
    capacity: int
    by_rank: tuple[int, ...]  # choices of each rank of the ring


def local_experts(num_experts: int, size: int) -> int:
    """Return how many experts a rank of ``size`` ranks has room for; the last may have fewer."""
    return -(-num_experts // size)
