"""How many rows go from every rank to every expert: told by all, checked by all, then trusted."""

from typing import Any

import numpy as np
import torch

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.core.validation import check_readable, check_tensor
from commlib.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from commlib.ops.agreement import Fact, agree, told
from commlib.ops.registered.library import needs_op, register
from commlib.ops.registered.traced_ring import size_of, sized
from commlib.p2p.routes import routes
from commlib.streams import capturing

Table = np.ndarray[Any, Any]
VERBS = {False: "global_scatter", True: "global_gather"}


def agreed(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int,
    back: bool,
) -> torch.Tensor:
    """Return the table [a, b, k] of the rows that rank a has for expert k of rank b, on the CPU.

    ``local_count[k + b * experts]`` is this rank's row of it; ``global_count[k + a * experts]``
    what this rank expects from a. ``x`` is what is to be sent: to the experts, or ``back`` from
    them. One exchange between the hosts; counts on a GPU are copied first, which waits for them.
    Raises ``ArgumentError`` (or a kind of it) on every rank, naming those that disagree.
    """
    context, verb = comm(ring_id), VERBS[back]
    with told(context, verb):
        own = _checked(context, verb, x, local_count, global_count, back)
    facts = [
        Fact("width of x", x.shape[1], ShapeError),
        Fact("dtype of x", x.dtype, DtypeError),
        Fact("number of counts", len(own), ShapeError),
    ]
    return torch.from_numpy(_compared(context, verb, agree(context, verb, facts, own)))


def _checked(
    context: CommContext,
    verb: str,
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    back: bool,
) -> list[int]:
    """Check this rank's own arguments and return its counts, the local ones first."""
    where = context._describe(verb)
    check_tensor(context, verb, "x", x)
    if x.dim() != 2:
        raise ShapeError(f"{where}: x has shape {tuple(x.shape)}; expected [rows, width]")
    for role, counts in (("local_count", local_count), ("global_count", global_count)):
        _check_counts(context, where, role, counts)
        check_readable(context, verb, role, counts)
    if len(local_count) != len(global_count):
        raise ShapeError(
            f"{where}: local_count has {len(local_count)} entries, global_count "
            f"{len(global_count)}; expected experts * {context.size} in both"
        )
    both = torch.stack([local_count, global_count.to(local_count.device)]).tolist()
    for role, counts in zip(("local_count", "global_count"), both, strict=True):
        if min(counts) < 0:
            at = next(i for i, count in enumerate(counts) if count < 0)
            raise ArgumentError(f"{where}: {role}[{at}] is {counts[at]}; expected counts >= 0")
    role, total = ("global_count", sum(both[1])) if back else ("local_count", sum(both[0]))
    if total != len(x):
        raise ShapeError(
            f"{where}: {role} adds up to {total} rows; x has shape {tuple(x.shape)}; expected one "
            f"count for each of its {len(x)} rows"
        )
    return [*both[0], *both[1]]


def _check_counts(context: CommContext, where: str, role: str, counts: torch.Tensor) -> None:
    if not isinstance(counts, torch.Tensor):
        raise ArgumentError(f"{where}: {role} is {type(counts).__name__}; expected a torch.Tensor")
    if counts.dtype is not torch.int64:
        raise DtypeError(f"{where}: {role} is {counts.dtype}; call {role}.long()")
    if counts.dim() != 1 or not len(counts) or len(counts) % context.size:
        raise ShapeError(
            f"{where}: {role} has shape {tuple(counts.shape)}; expected [experts * "
            f"{context.size}], the counts for rank 0's experts first"
        )
    if counts.device.type != "cpu" and counts.device != context.device:
        raise DeviceError(
            f"{where}: {role} is on {counts.device}; expected the CPU or {context.device}"
        )
    if counts.is_cuda and capturing():
        raise ArgumentError(
            f"{where}: {role} is on {counts.device}, and a capture can't read it; the counts are a "
            f"part of the graph: use {role} = {role}.cpu() before the capture"
        )


def _compared(context: CommContext, verb: str, every: list[list[int]]) -> Table:
    """Return the table that all ranks agree on."""
    counts = np.array(every, np.int64).reshape(context.size, 2, context.size, -1)
    sent, expected = counts[:, 0], counts[:, 1].transpose(1, 0, 2)
    if not (sent == expected).all():
        a, b, k = np.argwhere(sent != expected)[0]
        raise ArgumentError(
            f"{context._describe(verb)}: rank {a} has {sent[a, b, k]} rows for expert {k} of rank "
            f"{b} (local_count[{k + b * sent.shape[2]}]), but rank {b} expects {expected[a, b, k]} "
            f"(global_count[{k + a * sent.shape[2]}]); exchange the counts first: type "
            f"global_count = ops.all_to_all(local_count, {context.ring_id})"
        )
    return np.ascontiguousarray(sent)


def _run(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int,
    size: int,
    back: bool,
) -> torch.Tensor:
    sized(VERBS[back], ring_id, size)
    return agreed(x, local_count, global_count, ring_id, back)


def _fake(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int,
    size: int,
    back: bool,
) -> torch.Tensor:
    sized(VERBS[back], ring_id, size)
    return torch.empty((size, size, len(local_count) // size), dtype=torch.int64, device="cpu")


_agreed = register(
    "agreed_counts(Tensor x, Tensor local_count, Tensor global_count, int ring_id, int size,"
    " bool back) -> Tensor",
    _run,
    _fake,
)


def table(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: int,
    back: bool,
) -> torch.Tensor:
    """``agreed``, eager or traced; no gradient flows through it."""
    if not torch.compiler.is_compiling():
        with told(comm(ring_id), VERBS[back]):
            check_tensor(comm(ring_id), VERBS[back], "x", x)
    if needs_op(x, *(c for c in (local_count, global_count) if isinstance(c, torch.Tensor))):
        counts = local_count, global_count
        agreed_on: torch.Tensor = _agreed(x.detach(), *counts, ring_id, size_of(ring_id), back)
        return agreed_on
    if x.requires_grad:
        needs_result(comm(ring_id), VERBS[back])
    return agreed(x, local_count, global_count, ring_id, back)


def move(
    x: torch.Tensor, counts: torch.Tensor, ring_id: int, use_calc_stream: bool, back: bool
) -> torch.Tensor:
    """Launch the exchange of an agreed table and return the rows that come to this rank."""
    context, held = sized(VERBS[back], ring_id, len(counts)), counts.numpy()
    mine = held[context.rank] if back else held[:, context.rank]
    out = x.new_empty((int(mine.sum()), x.shape[1]))
    way = routes(held, context.rank, back=back)
    context._exchange_rows(out, x, way, use_calc_stream=use_calc_stream)
    return out


def twin(back: bool) -> Any:
    """Register ``move`` in one direction; its gradient is the other one.

    ``rows`` of the result are known on the way of a gradient only.
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
        x, counts, *ctx.how, _ = inputs
        ctx.rows = x.shape[0]
        ctx.save_for_backward(counts)

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        opposite = getattr(torch.ops.commlib, other)
        return opposite(grad, *ctx.saved_tensors, *ctx.how, ctx.rows), None, None, None, None

    schema = "(Tensor x, Tensor counts, int ring_id, bool use_calc_stream, SymInt? rows) -> Tensor"
    return register(f"{name}{schema}", run, fake, setup=setup, backward=backward)
