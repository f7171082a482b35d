"""expert_dispatch: send each token to the experts that it has chosen, in fixed shapes."""

from typing import Any, NamedTuple

import torch

from commlib.core.context import CommContext
from commlib.core.group import needs_result
from commlib.core.manager import comm
from commlib.errors import ArgumentError
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.expert_parallel import calls, moves
from commlib.ops.expert_parallel.checks import (
    check_dispatch,
    check_options,
    ids_of,
    weights_of,
)
from commlib.ops.expert_parallel.handle import Dispatched, ExpertHandle
from commlib.ops.expert_parallel.moves import Move, saved
from commlib.ops.registered.library import register, traced
from commlib.ops.registered.traced_ring import size_of, sized
from commlib.p2p.experts.tables import Choices, ExpertSpec

Tensor = torch.Tensor

NAME = "expert_dispatch"


def expert_dispatch(
    x: Tensor,
    expert_ids: Tensor,
    num_experts: int,
    capacity: int,
    ring_id: Ring = 0,
    *,
    weights: Tensor | None = None,
    quantize: str | None = None,
    on_overflow: str = "error",
    active: Tensor | None = None,
    use_calc_stream: bool = True,
) -> Dispatched:
    """Send every token to the experts that it has chosen, on any rank of the ring.

    Counts are made and exchanged on the device, and shapes do not depend on them. So the call can
    be compiled, captured in a graph and replayed with other choices. Expert e is on rank
    ``e // local``, with local = ceil(num_experts / ring.size). The gradient
    of ``x`` is the unweighted ``expert_combine``.

    Args:
        x: [tokens, width], bfloat16, float16, float32 or float64. Ranks may have different
            numbers of tokens, or none. All other numbers, such as ``top_k``, ``num_experts`` and
            ``capacity``, are the same on every rank. The hosts compare them before the first call
            with new ones, at most the ring's timeout.
        expert_ids: [tokens, top_k] or [tokens], int32 or int64. An id outside [0, num_experts),
            such as -1, chooses no expert.
        num_experts: Experts of all ranks.
        capacity: Rows of one expert, from all ranks together. Of more rows, those of the highest
            ranks and latest tokens are dropped.
        ring_id: The ring, its id or its name.
        weights: [tokens, top_k], which ``expert_combine`` multiplies with the experts' results.
            Floats other than float32 are cast. Default: 1.
        quantize: "fp8": send float8_e4m3fn with a scale per 128 elements. Default: the dtype of x.
        on_overflow: "error": ``CapacityError`` on every rank if an expert gets more rows than its
            capacity. On a CPU this call raises it; on a GPU the ring's next check does, which is
            a later call of this kind or ``ring.check()``. Ranks may then raise it in different
            calls: to continue after it, synchronise the GPU and call ``ring.check()`` at the same
            place on every rank. "drop": report the number in ``handle.demand``.
        active: [size], bool or uint8, on the ring's device, the same on every rank that takes
            part. Ranks with 0 are left out: choices of their experts get no row. It is read when
            the call runs, also in a replay, and must not change before ``expert_combine`` and the
            gradients. A rank that made no calls is back after ``ring.reset()`` on every rank.
            Default: all ranks take part.
        use_calc_stream: Communicate on the caller's current stream. False: on the ring's stream.

    Returns:
        ``Dispatched(rows, counts, handle, scales)``: rows [local, capacity, width], the
        used rows of each expert first, by source rank, token and choice, and 0 after them; counts,
        int32 [local]; the handle for ``expert_combine``; scales, float32
        [local, capacity, width / 128] with ``quantize``, else None. The host does not
        block on a GPU.

    Raises:
        CapacityError: See ``on_overflow``. The ring stays usable.
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch; on every rank if
            numbers differ.
        CommTimeout: Other ranks do not compare new numbers; the text names them.
    """
    ring_id = ring_number(NAME, ring_id)
    check_options(NAME, num_experts, capacity, quantize, on_overflow)
    ids = ids_of(NAME, expert_ids)
    scaled = weights_of(NAME, weights)
    named = {"expert_ids": ids, "weights": scaled, "active": active}
    traces = traced(NAME, use_calc_stream, True, ring_id, x=x, **named)
    needs_grad = torch.is_grad_enabled() and getattr(x, "requires_grad", False)
    if needs_grad and quantize:
        raise ArgumentError(
            f"{NAME}: x requires grad with quantize={quantize!r}, which has no gradient; pass "
            f"x.detach(), or leave quantize= away"
        )
    call: Any = _registered_op if traces or needs_grad or moves.is_on_host(ring_id) else _run
    size, x_scales = size_of(ring_id), None if scaled is None else scaled.detach()
    options = quantize == "fp8", on_overflow == "error", use_calc_stream
    args = _Given(x, ids, x_scales, active, ring_id, size, num_experts, capacity, *options)
    rows, scales, chosen, positions, sources, row_weights, counts, demand = call(*args)
    tables = chosen, positions, sources, row_weights
    handle = ExpertHandle(*tables, demand, scaled, active, num_experts, capacity, ring_id, size)
    return Dispatched(rows, counts, handle, scales if quantize else None)


class _Given(NamedTuple):
    """The arguments of the op, in the order of its schema."""

    x: Tensor
    ids: Tensor
    weights: Tensor | None
    active: Tensor | None
    ring_id: int
    size: int
    num_experts: int
    capacity: int
    fp8: bool
    reports: bool
    use_calc_stream: bool

    def checked(self, ring: CommContext) -> tuple[Choices, ExpertSpec]:
        """Return the choices and the numbers; raise for tensors that do not fit."""
        x, choices = self.x, Choices(self.ids, self.weights, self.active)
        check_dispatch(ring, NAME, x, choices, self.num_experts, self.capacity, self.fp8)
        numbers = self.num_experts, self.capacity, self.ids.shape[1], x.dtype, x.shape[1]
        return choices, ExpertSpec(*numbers, quantize=self.fp8, reports=self.reports)


def _run(*values: Any) -> tuple[Tensor, ...]:
    args = _Given(*values)
    ring, calc = sized(NAME, args.ring_id, args.size), args.use_calc_stream
    choices, spec = args.checked(ring)
    needs_result(ring, NAME)
    rows, scales, tables, counts = calls.dispatch(ring, args.x, choices, spec, calc)
    return rows, scales, *tables, *counts


def _fake(*values: Any) -> tuple[Tensor, ...]:
    args = _Given(*values)
    choices, spec = args.checked(comm(args.ring_id))
    rows, scales, tables, counts = calls.outputs(args.x, choices.ids, spec, args.size)
    return rows, scales, *tables, *counts


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    """Save what brings the gradients of the rows back."""
    args = _Given(*inputs)
    ctx.mark_non_differentiable(*output[1:])
    tables = output[2], output[3], output[4], output[5]
    numbers = args.ring_id, args.size, args.num_experts, args.capacity
    Move(*tables, args.active, *numbers, args.use_calc_stream, weighted=False).save(ctx)


def _backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    with moves.same_gradients(NAME):
        return moves.sums(grad, *saved(ctx)), *[None] * (len(_Given._fields) - 1)


_registered_op = register(
    f"{NAME}(Tensor x, Tensor expert_ids, Tensor? weights, Tensor? active, int ring_id, int size,"
    f" int num_experts, int capacity, bool fp8, bool reports, bool use_calc_stream)"
    f" -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
)
