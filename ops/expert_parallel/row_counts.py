"""Agree on the number of rows that every rank sends to every expert, and exchange the rows."""

from typing import Any

import numpy as np
import torch

from commlib.core import observers
from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.core.validation import check_readable, check_tensor
from commlib.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from commlib.ops.agreement import Fact, check_ranks_agree, refuse_together
from commlib.ops.registered.library import needs_op, register
from commlib.ops.registered.traced_ring import size_of, sized
from commlib.p2p.routes import routes

Table = np.ndarray[Any, Any]
COLLECTIVES = {False: "global_scatter", True: "global_gather"}


def agreed_table(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int,
    back: bool,
) -> torch.Tensor:
    """Return the table [a, b, k] of the rows that rank a has for expert k of rank b, on the CPU.

    ``local_count[k + b * experts]`` is this rank's row of the table. ``global_count[k + a *
    experts]`` is the number of rows that this rank expects from rank a. ``x`` holds the rows to
    send: to the experts, or ``back`` from them. The hosts exchange their counts once. Counts on a
    GPU are copied to the host first, which waits for the GPU. Raises ``ArgumentError`` or a
    subclass on every rank, and names the ranks that disagree.
    """
    ring, collective = comm(ring_id), COLLECTIVES[back]
    with refuse_together(ring, collective):
        counts = _checked(ring, collective, x, local_count, global_count, back)
    facts = [
        Fact("width of x", x.shape[1], ShapeError),
        Fact("dtype of x", x.dtype, DtypeError),
        Fact("number of counts", len(counts), ShapeError),
    ]
    return torch.from_numpy(
        _compared(ring, collective, check_ranks_agree(ring, collective, facts, counts))
    )


def _checked(
    ring: CommContext,
    collective: str,
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    back: bool,
) -> list[int]:
    """Check this rank's own arguments and return its counts, the local ones first."""
    prefix = ring._describe(collective)
    check_tensor(ring, collective, "x", x)
    if x.dim() != 2:
        raise ShapeError(f"{prefix}: x has shape {tuple(x.shape)}; expected [rows, width]")
    for role, counts in (("local_count", local_count), ("global_count", global_count)):
        check_counts(ring, prefix, role, counts)
        check_readable(ring, collective, role, counts)
        if counts.device == ring.device and observers.captured():
            remedy = "pass capacity="
            if counts.is_cuda:
                remedy += (
                    f", or make the counts a part of the graph: set {role} = {role}.cpu() before "
                    f"the capture"
                )
            raise ArgumentError(
                f"{prefix}: {role} is on {counts.device}, and a capture can't read it; {remedy}"
            )
    if len(local_count) != len(global_count):
        raise ShapeError(
            f"{prefix}: local_count has {len(local_count)} entries, global_count "
            f"{len(global_count)}; expected experts * {ring.size} in both"
        )
    both = torch.stack([local_count, global_count.to(local_count.device)]).tolist()
    for role, counts in zip(("local_count", "global_count"), both, strict=True):
        if min(counts) < 0:
            at = next(i for i, count in enumerate(counts) if count < 0)
            raise ArgumentError(f"{prefix}: {role}[{at}] is {counts[at]}; expected counts >= 0")
    role, total = ("global_count", sum(both[1])) if back else ("local_count", sum(both[0]))
    if total != len(x):
        raise ShapeError(
            f"{prefix}: {role} adds up to {total} rows; x has shape {tuple(x.shape)}; expected one "
            f"count for each of its {len(x)} rows"
        )
    return [*both[0], *both[1]]


def check_counts(ring: CommContext, where: str, role: str, counts: torch.Tensor) -> None:
    """Raise unless ``counts`` are int64 counts for the experts of all ranks."""
    if not isinstance(counts, torch.Tensor):
        raise ArgumentError(f"{where}: {role} is {type(counts).__name__}; expected a torch.Tensor")
    if counts.dtype is not torch.int64:
        raise DtypeError(f"{where}: {role} is {counts.dtype}; pass {role}.long()")
    if counts.dim() != 1 or not len(counts) or len(counts) % ring.size:
        raise ShapeError(
            f"{where}: {role} has shape {tuple(counts.shape)}; expected [experts * "
            f"{ring.size}], the counts for rank 0's experts first"
        )
    if counts.device.type != "cpu" and counts.device != ring.device:
        raise DeviceError(
            f"{where}: {role} is on {counts.device}; expected the CPU or {ring.device}"
        )


def _compared(ring: CommContext, collective: str, every: list[list[int]]) -> Table:
    """Return the table that all ranks agree on."""
    counts = np.array(every, np.int64).reshape(ring.size, 2, ring.size, -1)
    sent, expected = counts[:, 0], counts[:, 1].transpose(1, 0, 2)
    error = counts_error(ring._describe(collective), ring.ring_id, sent, expected)
    if error is not None:
        raise error
    return np.ascontiguousarray(sent)


def counts_error(prefix: str, ring_id: int, sent: Table, expected: Table) -> ArgumentError | None:
    """Return the error of the first count [a, b, k] that the two ranks do not agree on."""
    if (sent == expected).all():
        return None
    a, b, k = np.argwhere(sent != expected)[0]
    return ArgumentError(
        f"{prefix}: rank {a} has {sent[a, b, k]} rows for expert {k} of rank "
        f"{b} (local_count[{k + b * sent.shape[2]}]), but rank {b} expects {expected[a, b, k]} "
        f"(global_count[{k + a * sent.shape[2]}]); exchange the counts first: set "
        f"global_count = ops.all_to_all(local_count, {ring_id})"
    )


def _run(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int,
    size: int,
    back: bool,
) -> torch.Tensor:
    sized(COLLECTIVES[back], ring_id, size)
    return agreed_table(x, local_count, global_count, ring_id, back)


def _fake(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int,
    size: int,
    back: bool,
) -> torch.Tensor:
    sized(COLLECTIVES[back], ring_id, size)
    return torch.empty((size, size, len(local_count) // size), dtype=torch.int64, device="cpu")


_agreed = register(
    "agreed_counts(Tensor x, Tensor local_count, Tensor global_count, int ring_id, int size,"
    " bool back) -> Tensor",
    _run,
    _fake,
)


def row_table(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int,
    back: bool,
) -> torch.Tensor:
    """Return the table of ``agreed_table``, eager or traced; no gradient flows through it."""
    if not torch.compiler.is_compiling():
        with refuse_together(comm(ring_id), COLLECTIVES[back]):
            check_tensor(comm(ring_id), COLLECTIVES[back], "x", x)
    if needs_op(x, *(c for c in (local_count, global_count) if isinstance(c, torch.Tensor))):
        counts = local_count, global_count
        table: torch.Tensor = _agreed(x.detach(), *counts, ring_id, size_of(ring_id), back)
        return table
    if x.requires_grad:
        needs_result(comm(ring_id), COLLECTIVES[back])
    return agreed_table(x, local_count, global_count, ring_id, back)


def move(
    x: torch.Tensor, counts: torch.Tensor, ring_id: int, use_calc_stream: bool, back: bool
) -> torch.Tensor:
    """Launch the exchange of an agreed table and return the rows that this rank receives."""
    ring, rows_between = sized(COLLECTIVES[back], ring_id, len(counts)), counts.numpy()
    received = rows_between[ring.rank] if back else rows_between[:, ring.rank]
    out = x.new_empty((int(received.sum()), x.shape[1]))
    plan = routes(rows_between, ring.rank, back=back)
    ring._exchange_rows(out, x, plan, use_calc_stream=use_calc_stream)
    return out


def register_move(back: bool) -> Any:
    """Register ``move`` in one direction; its gradient is the other direction.

    ``rows``, the length of the result, is given for gradients only.
    """
    name, other = ("from_experts", "to_experts") if back else ("to_experts", "from_experts")

    def run(
        x: torch.Tensor, counts: torch.Tensor, ring_id: int, use_calc_stream: bool, rows: Any
    ) -> torch.Tensor:
        return move(x, counts, ring_id, use_calc_stream, back)

    def fake(
        x: torch.Tensor, counts: torch.Tensor, ring_id: int, use_calc_stream: bool, rows: Any
    ) -> torch.Tensor:
        rows = torch.library.get_ctx().new_dynamic_size() if rows is None else rows
        return x.new_empty((rows, x.shape[1]))

    def setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, counts, *ctx.options, _ = inputs
        ctx.rows = x.shape[0]
        ctx.save_for_backward(counts)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        opposite = getattr(torch.ops.commlib, other)
        return opposite(grad, *ctx.saved_tensors, *ctx.options, ctx.rows), None, None, None, None

    schema = "(Tensor x, Tensor counts, int ring_id, bool use_calc_stream, SymInt? rows) -> Tensor"
    return register(f"{name}{schema}", run, fake, setup=setup, backward=backward)
