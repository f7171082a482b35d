"""global_scatter and global_gather with counts that stay on the device, in fixed shapes.

Every rank counts as one expert with ``capacity`` rows: the counts of all ranks say where each row
is, and the kernels of the expert exchange move it there.
"""

from functools import partial
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.core.observers import unwatched
from commlib.core.validation import check_tensor
from commlib.errors import ArgumentError, CapacityError, CommError, DtypeError, ShapeError
from commlib.ops.expert_parallel import moves
from commlib.ops.expert_parallel.agreement import CAPACITY, Number, check_once
from commlib.ops.expert_parallel.checks import FLOATS, check_rows
from commlib.ops.expert_parallel.ids import check_number
from commlib.ops.expert_parallel.memory import enough_memory, tables_needed
from commlib.ops.expert_parallel.moves import Move
from commlib.ops.expert_parallel.plain_exchange import PlainExchange
from commlib.ops.expert_parallel.row_counts import COLLECTIVES, check_counts, counts_error
from commlib.ops.registered.library import register, traced
from commlib.ops.registered.traced_ring import size_of, sized
from commlib.rendezvous.identity import RingIdentity

Tensor = torch.Tensor
_SAME = "expected the same number on every rank, one count for each expert of the ring"


def counted(
    x: Tensor,
    local_count: Tensor,
    global_count: Tensor,
    ring_id: int,
    capacity: int,
    use_calc_stream: bool,
    back: bool,
) -> Tensor:
    """Return [capacity, width]: the rows for this rank's experts, or this rank's own rows back."""
    name = COLLECTIVES[back]
    check_number(name, "capacity", capacity, 1)
    counts = {"local_count": local_count, "global_count": global_count}
    traces = traced(name, use_calc_stream, True, ring_id, x=x, **counts)
    if not torch.compiler.is_compiling():
        _check(comm(ring_id), x, counts, back)
    registered = traces or moves.is_on_host(ring_id)
    size, count = size_of(ring_id), x.shape[0]
    own_rows, most = (capacity, count) if back else (count, capacity)
    call: Any = _tables if registered else _run
    outputs = call(local_count, global_count, ring_id, size, own_rows, most, use_calc_stream, back)
    tables = outputs[0], outputs[1], outputs[2], outputs[3]
    experts = size  # every rank is one
    move = Move(
        *tables, None, ring_id, size, experts, most, use_calc_stream, weighted=False, counted=True
    )
    registered = registered or (torch.is_grad_enabled() and x.requires_grad)
    if back:
        call = moves.sums if registered else moves.combined
        result: Tensor = call(x.unsqueeze(0), *move)
        return result
    call = moves.rows if registered else moves.scattered
    received: Tensor = call(x, *move)
    return received.squeeze(0)


def _check(ring: CommContext, x: Tensor, counts: dict[str, Tensor], back: bool) -> None:
    """Raise for arguments of this rank; their values are compared on the device."""
    name = COLLECTIVES[back]
    prefix = ring._describe(name)
    check_tensor(ring, name, "x", x)
    if x.dim() != 2 or (back and not len(x)):
        rows = "[capacity of global_scatter, width]" if back else "[rows, width]"
        raise ShapeError(f"{prefix}: x has shape {tuple(x.shape)}; expected {rows}")
    if x.dtype not in FLOATS:
        raise DtypeError(
            f"{prefix}: x is {x.dtype} with capacity=; expected bfloat16, float16, float32 or "
            f"float64; pass x.float()"
        )
    for role, count in counts.items():
        check_counts(ring, prefix, role, count)
        check_tensor(ring, name, role, count)
    lengths = [len(count) for count in counts.values()]
    if lengths[0] != lengths[1]:
        raise ShapeError(
            f"{prefix}: local_count has {lengths[0]} entries, global_count {lengths[1]}; expected "
            f"experts * {ring.size} in both"
        )


def _run(
    local_count: Tensor,
    global_count: Tensor,
    ring_id: int,
    size: int,
    own_rows: int,
    capacity: int,
    use_calc_stream: bool,
    back: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the tables of the exchange: ids, positions, sources and weights of the rows.

    Args:
        local_count, global_count: As in ``global_scatter``.
        ring_id, size: The ring.
        own_rows: The most rows of this rank, on their way to the experts.
        capacity: The most rows of this rank's experts, the same on every rank.
        use_calc_stream: See ``CommContext``.
        back: For ``global_gather``.
    """
    ring = sized(COLLECTIVES[back], ring_id, size)
    _check_capacity(ring, own_rows, capacity, back)
    needs_result(ring, COLLECTIVES[back])
    _check_numbers(ring, len(local_count), capacity, back)
    exchange = PlainExchange(ring, None, use_calc_stream)
    limit = local_count.new_full((1,), own_rows)
    every = exchange.all_gather(torch.cat([limit, local_count, global_count]))
    limits, sent, expected = every.split([1, len(local_count), len(global_count)], 1)
    table = sendable(sent, limits).view(size, size, -1)
    with unwatched():
        report = _found(limits, sent, expected, table, capacity)
        describe = partial(_describe, COLLECTIVES[back])
        ring._device_reports.note(COLLECTIVES[back], report, describe)
    most = own_rows if back else capacity
    with enough_memory(ring, partial(tables_needed, ring, most, back)):
        sent_rows = _send_tables(table, ring.rank, own_rows, capacity)
        return sent_rows + _take_tables(table, ring.rank, capacity)


def _check_capacity(ring: CommContext, own_rows: int, capacity: int, back: bool) -> None:
    """Raise for more rows than those of an ``expert_dispatch`` may be."""
    check_rows(ring._describe(COLLECTIVES[back]), own_rows if back else capacity, 1)


def _check_numbers(ring: CommContext, count: int, capacity: int, back: bool) -> None:
    """Raise on every rank unless all ranks have as many counts and the same capacity."""
    template = "x has {} rows on the ranks" if back else "capacity is {}"
    numbers = (
        Number(count, "local_count has {} entries", _SAME, ShapeError),
        Number(capacity, template, CAPACITY, ShapeError),
    )
    check_once(ring, COLLECTIVES[back], (count, capacity), lambda: numbers)


def sendable(sent: Tensor, rows: Tensor) -> Tensor:
    """Return the counts [size, ...] without those of rows that a rank does not have.

    Nobody waits for such rows then. ``rows``: [size, 1], the rows of each rank.
    """
    most = sent.clamp(min=0).minimum(rows)  # their sums do not overflow
    return most.minimum((rows - most.cumsum(1) + most).clamp(min=0))


def _fake(
    local_count: Tensor, _: Tensor, ring_id: int, size: int, rows: int, capacity: int, *more: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _check_capacity(sized(COLLECTIVES[more[1]], ring_id, size), rows, capacity, more[1])
    ids = local_count.new_empty((rows, 1), dtype=torch.int32)
    lines = ids.new_empty((capacity, 4))
    return ids, torch.empty_like(ids), lines, ids.new_empty(capacity, dtype=torch.float32)


def _send_tables(table: Tensor, rank: int, rows: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return, for each row of this rank, its receiver and its place there, -1 for none."""
    size, _, experts = table.shape
    counts = table[rank].reshape(-1)  # by receiver, then expert
    ends, row = counts.cumsum(0), torch.arange(rows, device=table.device)
    block = torch.searchsorted(ends, row, right=True).clamp(max=len(counts) - 1)
    owner, expert = block // experts, block % experts
    by_expert = table.permute(1, 2, 0).reshape(size, -1)  # of each receiver: expert, then sender
    starts = (by_expert.cumsum(1) - by_expert).view(size, experts, size)
    slot = starts[owner, expert, rank] + row - (ends - counts)[block]
    used = (row < ends[-1]) & (slot < capacity)
    owner, slot = (torch.where(used, number, -1).int()[:, None] for number in (owner, slot))
    return owner, slot


def _take_tables(table: Tensor, rank: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Return, for each row that this rank receives, its line of ``sources`` and its weight."""
    size, _, experts = table.shape
    counts = table[:, rank].t().reshape(-1)  # by expert, then sender
    ends, row = counts.cumsum(0), torch.arange(capacity, device=table.device)
    block = torch.searchsorted(ends, row, right=True).clamp(max=len(counts) - 1)
    expert, sender = block // size, block % size
    flat = table.view(size, -1)
    starts = (flat.cumsum(1) - flat)[:, rank * experts : (rank + 1) * experts]
    token = starts[sender, expert] + row - (ends - counts)[block]
    used = row < ends[-1]
    first = torch.ones_like(row)  # each token has one row
    lines = torch.stack([sender, token, torch.zeros_like(row), first], 1)
    return torch.where(used[:, None], lines, -1).int(), used.float()


def _found(limits: Tensor, sent: Tensor, expected: Tensor, table: Tensor, capacity: int) -> Tensor:
    """Return the report of counts that do not match, or do not fit.

    ``table``: the rows that are sent, where ``sent`` are those that were asked for.
    """
    size = len(sent)
    wrong = (table != expected.view(size, size, -1).transpose(0, 1)).any()
    wrong = wrong | (table != sent.view_as(table)).any()
    wrong = wrong | (table.sum((0, 2)) > capacity).any()
    numbers = wrong.long(), sent.new_full((1,), capacity), limits, sent, expected
    return torch.cat([number.reshape(-1) for number in numbers])


def _describe(name: str, identity: RingIdentity, numbers: list[int]) -> CommError:
    """Return the error of a report."""
    prefix, size = identity.describe(name), identity.size
    capacity, limits = numbers[0], numbers[1 : size + 1]
    values = torch.tensor(numbers[size + 1 :]).view(2, size, size, -1)
    sent, expected = values[0], values[1].transpose(0, 1)
    if (sent < 0).any():
        return ArgumentError(f"{prefix}: local_count has a number below 0; expected counts >= 0")
    error = counts_error(prefix, identity.ring_id, sent.numpy(), expected.numpy())
    if error is not None:
        return error
    sums = [sum(counts) for counts in sent.flatten(1).tolist()]  # a tensor's sum may wrap around
    taken = [sum(counts) for counts in sent.transpose(0, 1).flatten(1).tolist()]
    for rank in range(size):
        if sums[rank] > limits[rank]:
            return ShapeError(
                f"{prefix}: local_count of rank {rank} adds up to {sums[rank]} rows; expected at "
                f"most {limits[rank]}, the rows that it has place for"
            )
    rank = max(range(size), key=lambda one: taken[one])
    return CapacityError(
        f"{prefix}: the experts of rank {rank} get {taken[rank]} rows; expected at most "
        f"capacity={capacity}; the rest was dropped; pass a larger capacity="
    )


_tables = register(
    "counted_tables(Tensor local_count, Tensor global_count, int ring_id, int size,"
    " SymInt own_rows, SymInt capacity, bool use_calc_stream, bool back)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
)
