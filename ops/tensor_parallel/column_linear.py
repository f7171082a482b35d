"""A column-parallel linear layer whose backward reduces the gradient of its input."""

from typing import Any

import torch
import torch.nn.functional as F

from commlib.ops.registered.library import like, once, register
from commlib.ops.registered.traced_ring import size_of, sized

Tensor = torch.Tensor

NAME = "column_linear"
NO_RING = -1


def column_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ring_id: int, use_calc_stream: bool
) -> Tensor:
    """Return x @ weight.T + bias; the gradient by ``x`` is summed over the ring.

    The backward does one all_reduce. The gradients by ``weight`` and ``bias`` are computed while
    it is in flight. It does none if ``x`` needs no gradient, and none over one rank.

    Args:
        x: [..., in], the same on every rank.
        weight: [out, in], this rank's rows. Its gradient has its strides.
        bias: [out], this rank's part.
        ring_id: The ring; ``NO_RING`` for one rank.
        use_calc_stream: Reduce by two launches on the current stream where the ring has push
            kernels. False, and any other ring: on the ring's stream.

    Returns:
        [..., out]; in the dtype of autocast where that is enabled.
    """
    x, weight, bias = lowered(x), lowered(weight), None if bias is None else lowered(bias)
    if ring_id == NO_RING or size_of(ring_id) == 1:
        return F.linear(x, weight, bias)
    projected: Tensor = _registered_op(x, weight, bias, ring_id, size_of(ring_id), use_calc_stream)
    return projected


def lowered(x: Tensor) -> Tensor:
    """Return ``x`` in the dtype of autocast, which does not cast inputs of registered ops."""
    dtype = autocast_dtype(x.device)
    return x if dtype is None else x.to(dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype that autocast gives to matmuls on ``device``; None if it is disabled."""
    kind = device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring_id: int,
    size: int,
    use_calc_stream: bool,
) -> Tensor:
    sized(NAME, ring_id, size)
    return F.linear(x, weight, bias)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    ring_id: int,
    size: int,
    use_calc_stream: bool,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, *ctx.ring = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needed = ctx.needs_input_grad[:3]
    grads = _grad_op(grad, *ctx.saved_tensors, *ctx.ring, *needed)
    by_x, by_weight, by_bias = (g if n else None for g, n in zip(grads, needed, strict=True))
    return by_x, by_weight, by_bias, None, None, None


def _grad_run(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    ring_id: int,
    size: int,
    use_calc_stream: bool,
    by_x: bool,
    by_weight: bool,
    by_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients; an empty tensor for one that is not needed."""
    ring = sized(NAME, ring_id, size)
    rows, inputs = grad.flatten(0, -2), x.flatten(0, -2)  # not -1: there may be no units
    if not by_x:
        return (x.new_empty(0), *_local_grads(rows, inputs, weight, by_weight, by_bias))
    partial = rows @ weight
    total = like(partial)
    if use_calc_stream:
        work = ring.all_reduce_begin(total, partial)
    else:
        work = ring.all_reduce(total, partial, use_calc_stream=False, sync_op=False)
    try:
        local = _local_grads(rows, inputs, weight, by_weight, by_bias)
    finally:  # the ring takes no other call before
        work.wait()
    return (total.view(x.shape), *local)


def _local_grads(
    rows: Tensor, inputs: Tensor, weight: Tensor, by_weight: bool, by_bias: bool
) -> tuple[Tensor, Tensor]:
    weight_grad, bias_grad = rows.new_empty(0), rows.new_empty(0)
    if by_weight:
        weight_grad = torch.mm(rows.t(), inputs, out=torch.empty_like(weight))
    if by_bias:
        bias_grad = rows.sum(0)
    return weight_grad, bias_grad


def _grad_fake(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    ring_id: int,
    size: int,
    use_calc_stream: bool,
    by_x: bool,
    by_weight: bool,
    by_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        like(x) if by_x else x.new_empty(0),
        torch.empty_like(weight) if by_weight else x.new_empty(0),
        x.new_empty(weight.shape[0]) if by_bias else x.new_empty(0),
    )


_grad_op = register(
    f"{NAME}_grad(Tensor grad, Tensor x, Tensor weight, int ring_id, int size,"
    f" bool use_calc_stream, bool by_x, bool by_weight, bool by_bias) -> (Tensor, Tensor, Tensor)",
    _grad_run,
    _grad_fake,
    backward=once(NAME),
)
_registered_op = register(
    f"{NAME}(Tensor x, Tensor weight, Tensor? bias, int ring_id, int size, bool use_calc_stream)"
    f" -> Tensor",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
    ordered=False,
)
