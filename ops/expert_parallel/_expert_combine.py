"""expert_combine: bring the experts' results back to their tokens, and sum them."""

from typing import Any

import torch

from commlib.ops.expert_parallel import moves
from commlib.ops.expert_parallel.checks import check_handle
from commlib.ops.expert_parallel.handle import ExpertHandle
from commlib.ops.expert_parallel.ids import check_tensor
from commlib.ops.expert_parallel.moves import Move, saved_with_more
from commlib.ops.registered.library import once, register, traced

Tensor = torch.Tensor

NAME = "expert_combine"


def expert_combine(
    y: Tensor,
    handle: ExpertHandle,
    *,
    weighted: bool = True,
    use_calc_stream: bool = True,
) -> Tensor:
    """Return, for each token, the weighted sum of its experts' results.

    Products and sums are in float32 (float64 for float64), each rounded, in a fixed order: the
    rows of one rank in order of choice, then the ranks in order. So all engines and modes give the
    same bits. Gradients flow to ``y`` and to the ``weights`` of the dispatch. Whether these require
    grad must be the same on every rank. A weighted sum has no second derivative.

    Args:
        y: [local experts, capacity, any width], the results for the rows of ``expert_dispatch``:
            bfloat16, float16, float32 or float64. Unused rows are not read.
        handle: From ``expert_dispatch``, whose ring this call uses.
        weighted: Multiply with the weights of the dispatch. False: sum the rows as they are.
        use_calc_stream: Communicate on the caller's current stream. False: on the ring's stream.

    Returns:
        [tokens, width], dtype of ``y``; 0 for a token without a row. The host does not block on
        a GPU.

    Raises:
        ArgumentError: ``handle`` is not a handle, or ``ring.group()`` is open.
        CapacityError: An earlier dispatch on a GPU has reported it. The ring stays usable.
        RingError: The ring does not exist, has failed, or was created again with another size.
        DtypeError, ShapeError, DeviceError: Before any launch.
    """
    check_handle(NAME, handle)
    ring_id = handle.ring_id
    check_tensor(NAME, "y", y)
    traces = traced(NAME, use_calc_stream, True, ring_id, y=y)
    weights = handle.weights if weighted else None  # None: without a gradient of weights
    values = [y] if weights is None else [y, weights]
    needs_grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in values)
    tables = handle.expert_ids, handle.positions, handle.sources, handle.row_weights
    numbers = handle.size, handle.num_experts, handle.capacity
    move = Move(*tables, handle.active, ring_id, *numbers, use_calc_stream, weighted)
    if traces or needs_grad or moves.is_on_host(ring_id):
        op: Any = moves.sums if weights is None else _registered_op
        total: Tensor = op(*values, *move)
        return total
    return moves.combined(y, *move)


def _run(y: Tensor, weights: Tensor, *given: Any) -> Tensor:
    return moves.combined(y, *given)


def _fake(y: Tensor, weights: Tensor, *_: Any) -> Tensor:
    return y.new_empty((weights.shape[0], y.shape[2]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    y, _, *args = inputs
    Move(*args).save(ctx, y if ctx.needs_input_grad[1] else None)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    move, (y,) = saved_with_more(ctx)
    of_weights = None
    with moves.same_gradients(NAME):
        of_y, dots = _gradients(grad, y, *move)
        if y is not None:
            # A dot product is in the column of its choice: the sum of a token's rows are its
            # gradients.
            columns = moves.sums(dots, *move._replace(weighted=False))
            of_weights = columns[:, : move.positions.shape[1]]
    return of_y, of_weights, *[None] * len(move)


def _run_gradients(grad: Tensor, y: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    """Return the gradient of y, and each row's dot product with y in the column of its choice."""
    move = Move(*given)
    if y is None:
        of_y = moves.scattered(grad, *move)
        return of_y, of_y.new_empty(0, dtype=torch.float32)
    rows = moves.scattered(grad, *move._replace(weighted=False))
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    of_y = (wide * move.row_weights.view(*rows.shape[:2], 1)).to(rows.dtype)
    choice = move.sources[:, 2].view(rows.shape[:2]).long()
    dot = torch.where(choice >= 0, (wide * y).sum(2).float(), 0.0)
    dots = dot.new_zeros((*rows.shape[:2], _columns(move)))
    return of_y, dots.scatter_(2, choice.clamp(min=0)[..., None], dot[..., None])


def _columns(move: Move) -> int:
    """Return a number of float32 columns, at least top_k, that kernels take: whole vectors."""
    return -(-move.positions.shape[1] // 4) * 4


def _fake_gradients(grad: Tensor, y: Tensor | None, *given: Any) -> tuple[Tensor, Tensor]:
    of_y = moves.fake_rows(grad, *given)
    shape = (0,) if y is None else (*of_y.shape[:2], _columns(Move(*given)))
    return of_y, grad.new_empty(shape, dtype=torch.float32)


_registered_op = register(
    f"{NAME}(Tensor y, Tensor weights, {moves.SCHEMA}) -> Tensor",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
)
_gradients = register(
    f"{NAME}_gradients(Tensor grad, Tensor? y, {moves.SCHEMA}) -> (Tensor, Tensor)",
    _run_gradients,
    _fake_gradients,
    backward=once(NAME),
)
