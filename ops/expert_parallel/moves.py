"""Rows to the positions of a dispatch, and their sums back: each is the gradient of the other."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from commlib.core.group import needs_result
from commlib.core.manager import _rings
from commlib.errors import CommTimeout, MismatchError
from commlib.ops.expert_parallel import calls
from commlib.ops.expert_parallel.checks import check_combine
from commlib.ops.expert_parallel.memory import call_name
from commlib.ops.registered.library import register
from commlib.ops.registered.traced_ring import sized
from commlib.p2p.experts.tables import ExpertSpec, ExpertTables, local_experts

Tensor = torch.Tensor

_TENSORS = 5  # the first fields of a Move


class Move(NamedTuple):
    """Arguments of an exchange's ops after their tensors of values, in the order of ``SCHEMA``.

    Attributes:
        expert_ids, positions, sources, row_weights: The tables of the dispatch.
        active: The mask of the dispatch.
        ring_id, size: The ring.
        num_experts, capacity: As given to the dispatch.
        use_calc_stream: See ``CommContext``.
        weighted: Rows are multiplied with ``row_weights``.
        counted: Of ``global_scatter`` or ``global_gather``.
    """

    expert_ids: Tensor
    positions: Tensor
    sources: Tensor
    row_weights: Tensor
    active: Tensor | None
    ring_id: int
    size: int
    num_experts: int
    capacity: int
    use_calc_stream: bool
    weighted: bool
    counted: bool = False

    @property
    def tables(self) -> ExpertTables:
        """The tables as one argument."""
        return ExpertTables(self.expert_ids, self.positions, self.sources, self.row_weights)

    def spec(self, dtype: torch.dtype, width: int) -> ExpertSpec:
        """Return the numbers of the call that moves rows of so many elements."""
        numbers = self.num_experts, self.capacity, self.positions.shape[1]
        return ExpertSpec(*numbers, dtype, width, weighted=self.weighted, counted=self.counted)

    def save(self, ctx: Any, *more: Tensor | None) -> None:
        """Keep the move for the backward, and more tensors."""
        ctx.save_for_backward(*self[:_TENSORS], *more)
        ctx.numbers = self[_TENSORS:]


def saved(ctx: Any) -> Move:
    """Return the move that ``Move.save`` has kept."""
    return saved_with_more(ctx)[0]


def saved_with_more(ctx: Any) -> tuple[Move, tuple[Tensor | None, ...]]:
    """Return the move that ``Move.save`` has kept, and the further tensors.

    Call it once per backward: activation checkpointing unpacks each saved tensor only once.
    """
    tensors = ctx.saved_tensors
    return Move(*tensors[:_TENSORS], *ctx.numbers), tensors[_TENSORS:]


SCHEMA = (
    "Tensor expert_ids, Tensor positions, Tensor sources, Tensor row_weights, Tensor? active,"
    " int ring_id, int size, int num_experts, int capacity, bool use_calc_stream,"
    " bool weighted, bool counted"
)


def is_on_host(ring_id: int) -> bool:
    """Return True if the ring is on a CPU, where the exchange reads the mask and the demand.

    Its calls always take a registered op there: a capture then repeats what the host reads.
    """
    ring = _rings.get(ring_id)
    return ring is not None and ring.device.type == "cpu"


def scattered(x: Tensor, *given: Any) -> Tensor:
    """Return ``x`` of each choice at its position; ``given`` are the fields of a ``Move``."""
    move = Move(*given)
    collective = call_name(move.counted, False)
    ring, spec = sized(collective, move.ring_id, move.size), move.spec(x.dtype, x.shape[1])
    needs_result(ring, collective)
    return calls.scatter(ring, x, move.tables, move.active, spec, move.use_calc_stream)


def combined(y: Tensor, *given: Any) -> Tensor:
    """Return the sum of each token's rows; ``given`` are the fields of a ``Move``."""
    move = Move(*given)
    collective = call_name(move.counted, True)
    ring, local = sized(collective, move.ring_id, move.size), _local(move)
    check_combine(ring, collective, y, local, move.capacity)
    needs_result(ring, collective)
    spec = move.spec(y.dtype, y.shape[2])
    return calls.combine(ring, y, move.tables, move.active, spec, move.use_calc_stream)


def _local(move: Move) -> int:
    return local_experts(move.num_experts, move.size)


def fake_rows(x: Tensor, *given: Any) -> Tensor:
    """Return a tensor like ``scattered``."""
    move = Move(*given)
    return x.new_empty((_local(move), move.capacity, x.shape[1]))


def _fake_sums(y: Tensor, *given: Any) -> Tensor:
    return y.new_empty((Move(*given).positions.shape[0], y.shape[2]))


@contextmanager
def same_gradients(collective: str) -> Iterator[None]:
    """Name the cause that is likely where the exchange of a backward fails: one rank's gradient."""
    try:
        yield
    except (CommTimeout, MismatchError) as error:
        raise type(error)(
            f"{error}; this is the backward of {collective}, which every rank runs: its tensors "
            f"must require grad on all ranks or on none; pass x.requires_grad_() or x.detach() on "
            f"every rank"
        ) from error


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    Move(*inputs[1:]).save(ctx)


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    move = saved(ctx)
    with same_gradients(call_name(move.counted, False)):
        return sums(grad, *move), *[None] * len(Move._fields)


def _sums_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    move = saved(ctx)
    with same_gradients(call_name(move.counted, True)):
        return rows(grad, *move), *[None] * len(Move._fields)


rows = register(
    f"expert_rows(Tensor x, {SCHEMA}) -> Tensor",
    scattered,
    fake_rows,
    setup=_setup,
    backward=_rows_backward,
)
sums = register(
    f"expert_sums(Tensor y, {SCHEMA}) -> Tensor",
    combined,
    _fake_sums,
    setup=_setup,
    backward=_sums_backward,
)
