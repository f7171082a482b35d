"""The result of ``expert_dispatch``: rows by expert, and the handle that combines them again."""

from typing import NamedTuple

import torch

Tensor = torch.Tensor


class ExpertHandle(NamedTuple):
    """The places of the rows of one dispatch, and their origins: for ``expert_combine``.

    Attributes:
        expert_ids: int32 [tokens, top_k]; -1 for an id outside [0, num_experts).
        positions: int32 [tokens, top_k]: the row of each choice on the rank of its expert,
            ``local expert * capacity + place``. -1: no expert, dropped, or the rank is left out.
        sources: int32 [rows, 4], for each local row: rank, token, choice and link; all -1 for an
            unused row. Bit 0 of a link is set for the first row here of its token. The bits above
            are 1 + the next row here of the same token; 0 for none.
        row_weights: float32 [rows], the weight of each local row; 0 for an unused row.
        demand: int32 [num_experts], the choices of each expert over all ranks, before the capacity.
            ``(demand - capacity).clamp(min=0)`` is the number of dropped rows per expert.
        weights: float32 [tokens, top_k], the weights that were given; None without.
        active: The mask that was given.
        num_experts, capacity, ring_id: As given.
        size: The number of ranks of the ring.
    """

    expert_ids: Tensor
    positions: Tensor
    sources: Tensor
    row_weights: Tensor
    demand: Tensor
    weights: Tensor | None
    active: Tensor | None
    num_experts: int
    capacity: int
    ring_id: int
    size: int


class Dispatched(NamedTuple):
    """The rows of this rank's experts.

    Attributes:
        rows: [local experts, capacity, width], of each expert by source rank, token and choice.
            Rows beyond the count are 0.
        counts: int32 [local experts], the used rows of each expert.
        handle: For ``expert_combine``.
        scales: float32 [local experts, capacity, width / 128] with ``quantize``, else None.
    """

    rows: Tensor
    counts: Tensor
    handle: ExpertHandle
    scales: Tensor | None
