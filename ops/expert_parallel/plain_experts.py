"""The plain form of the expert exchange: torch operators and the collectives of any ring.

It defines the results. The kernels of ``commlib.p2p`` give the same bits.
"""

from functools import partial

import torch

from commlib.core.context import CommContext
from commlib.core.observers import unwatched
from commlib.ops.expert_parallel.agreement import check_spec
from commlib.ops.expert_parallel.dispatch_reports import describe_overflow, overflow_of
from commlib.ops.expert_parallel.memory import check_memory, enough_memory, result_needed
from commlib.ops.expert_parallel.plain_exchange import (
    PlainExchange,
    packed,
    partial_sums,
    picked,
    unpacked,
)
from commlib.ops.expert_parallel.quantize import quantized
from commlib.ops.expert_parallel.routing import ChosenExperts, links, row_sources
from commlib.p2p.experts.tables import (
    Choices,
    ExpertCounts,
    ExpertSpec,
    ExpertTables,
    local_experts,
)

Tensor = torch.Tensor
_NAME = "expert_dispatch"
Result = tuple[Tensor, Tensor, ExpertTables, ExpertCounts]


def dispatch(
    ring: CommContext, x: Tensor, choices: Choices, spec: ExpertSpec, use_calc_stream: bool
) -> Result:
    """Return rows, scales (of width 0 unless rows are quantized), tables and counts."""
    exchange = PlainExchange(ring, choices.active, use_calc_stream)
    check_spec(ring, _NAME, spec, exchange)
    check_memory(ring, spec)
    chosen = ChosenExperts(choices.ids, spec.num_experts, ring.size, exchange.present)
    every = exchange.all_gather(chosen.counts)
    before = every.cumsum(0)[ring.rank] - every[ring.rank]
    positions = chosen.positions(before, spec.capacity)
    my_counts, count = _own_counts(ring, every), _rows(ring, spec)
    columns = _columns(x, choices.weights, positions, chosen.owners, spec)
    received = exchange.to_owners(packed(columns), positions, chosen.owners, count)
    if spec.reports:  # after the last exchange: so every rank has made the same ones
        with unwatched():
            report = overflow_of(every, spec.capacity)
            ring._device_reports.note(_NAME, report, describe_overflow)
    sources = row_sources(my_counts, spec.capacity)
    meta, scales, rows = unpacked(picked(received, sources), columns)
    lines = torch.where((sources >= 0)[:, None], meta[:, :3], -1)
    lines = torch.cat([sources.int()[:, None], lines], 1)
    row_weights = meta[:, 3].contiguous().view(torch.float32)
    tables = ExpertTables(chosen.expert_ids, positions, lines, row_weights)
    counts = ExpertCounts(my_counts.sum(0).clamp(max=spec.capacity).int(), every.sum(0).int())
    shape = count // spec.capacity, spec.capacity
    rows, scales = (part.view(*shape, part.shape[1]) for part in (rows, scales))
    return rows, scales, tables, counts


def _columns(
    x: Tensor, weights: Tensor | None, positions: Tensor, owners: Tensor, spec: ExpertSpec
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what travels with each choice: token, choice, link and weight; scales; elements."""
    tokens, top_k = positions.shape
    if weights is None:
        weights = torch.ones(positions.shape, device=x.device)
    token = torch.arange(tokens, dtype=torch.int32, device=x.device)[:, None]
    choice = torch.arange(top_k, dtype=torch.int32, device=x.device)[None]
    numbers = token.expand(-1, top_k), choice.expand(tokens, -1), links(positions, owners)
    meta = torch.stack([*numbers, weights.contiguous().view(torch.int32)], 2).view(-1, 4)
    none = x.new_empty((tokens, 0), dtype=torch.float32)
    elements, scales = quantized(x) if spec.quantize else (x, none)
    return meta, scales.repeat_interleave(top_k, 0), elements.repeat_interleave(top_k, 0)


def _own_counts(ring: CommContext, every: Tensor) -> Tensor:
    """Return every rank's choices of this rank's experts: [size, local experts]."""
    local = local_experts(every.shape[1], ring.size)
    wide = torch.nn.functional.pad(every, (0, local * ring.size - every.shape[1]))
    return wide[:, ring.rank * local : (ring.rank + 1) * local]


def _rows(ring: CommContext, spec: ExpertSpec) -> int:
    return local_experts(spec.num_experts, ring.size) * spec.capacity


def _owners(ring: CommContext, tables: ExpertTables, spec: ExpertSpec) -> Tensor:
    """Return the rank of each chosen expert; rank 0 for a choice of no expert."""
    return tables.expert_ids.long().clamp(min=0) // local_experts(spec.num_experts, ring.size)


def scatter(
    ring: CommContext,
    x: Tensor,
    tables: ExpertTables,
    active: Tensor | None,
    spec: ExpertSpec,
    use_calc_stream: bool,
) -> Tensor:
    """Return the rows of ``x`` at the positions of an earlier dispatch, weighted if asked for."""
    exchange = PlainExchange(ring, active, use_calc_stream)
    check_spec(ring, "expert_scatter", spec, exchange)
    check_memory(ring, spec)
    columns = [x.repeat_interleave(spec.top_k, 0)]
    owners, count = _owners(ring, tables, spec), _rows(ring, spec)
    received = exchange.to_owners(packed(columns), tables.positions, owners, count)
    sources = tables.sources[:, 0].long()
    [rows] = unpacked(picked(received, exchange.masked(sources, sources)), columns)
    if spec.weighted:
        rows = (_wide(rows) * tables.row_weights[:, None]).to(rows.dtype)
    return rows.view(count // spec.capacity, spec.capacity, x.shape[1])


def combine(
    ring: CommContext,
    y: Tensor,
    tables: ExpertTables,
    active: Tensor | None,
    spec: ExpertSpec,
    use_calc_stream: bool,
) -> Tensor:
    """Return the sum of each token's rows: [tokens, width], weighted if asked for."""
    exchange = PlainExchange(ring, active, use_calc_stream)
    check_spec(ring, "expert_combine", spec, exchange)
    tokens = len(tables.positions)
    check_memory(ring, spec, back=True, tokens=tokens)
    rows = _wide(y.reshape(_rows(ring, spec), spec.width))
    if spec.weighted:
        rows = rows * tables.row_weights[:, None]
    sources, link = tables.sources[:, 0].long(), tables.sources[:, 3].long()
    first = torch.where(link & 1 == 1, sources, -1)  # an unused row has -1 in both
    sums = partial_sums(rows, link, spec.top_k)
    owners = _owners(ring, tables, spec)
    with enough_memory(ring, partial(result_needed, ring, spec, tokens)):
        return exchange.to_tokens(sums, first, tables.positions, owners).to(y.dtype)


def _wide(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype that products and sums are made in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
