"""concat: concatenate the tensors of all ranks along the last axis."""

from typing import Any

import torch

from commlib.core.group import needs_result
from commlib.errors import ShapeError
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import checked, register, save
from commlib.ops.registered.traced_ring import size_of, sized


def concat(x: torch.Tensor, ring_id: Ring = 0, *, use_calc_stream: bool = True) -> torch.Tensor:
    """Concatenate the tensors of all ranks along the last axis, on every rank.

    The gradient is this rank's part of the last axis, as ``split`` returns it: every rank computes
    the same loss. The host does not block on a GPU.

    Args:
        x: [..., n] of any dtype, at least 1-D, the same shape on every rank.
        ring_id: The ring, its id or its name.
        use_calc_stream: Communicate on the caller's current stream. False: on the ring's stream.

    Returns:
        [..., n * size] in rank order, a new tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
    """
    ring_id = ring_number("concat", ring_id)
    if not torch.compiler.is_compiling():
        checked("concat", x, ring_id)
    gathered: torch.Tensor = _registered_op(x, ring_id, size_of(ring_id), use_calc_stream)
    return gathered


def _run(x: torch.Tensor, ring_id: int, size: int, use_calc_stream: bool) -> torch.Tensor:
    ring = sized("concat", ring_id, size)
    if x.dim() == 0:
        raise ShapeError(f"{ring._describe('concat')}: x is 0-D; expected a last axis")
    needs_result(ring, "concat")
    parts = x.new_empty((size, *x.shape))
    ring.all_gather(parts, x, use_calc_stream=use_calc_stream)
    return parts.movedim(0, -2).reshape(_shape(x, size))


def _shape(x: torch.Tensor, size: int) -> tuple[int, ...]:
    return (*x.shape[:-1], x.shape[-1] * size)


def _fake(x: torch.Tensor, ring_id: int, size: int, use_calc_stream: bool) -> torch.Tensor:
    sized("concat", ring_id, size)
    return x.new_empty(_shape(x, size))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, size, use_calc_stream = ctx.saved
    return torch.ops.commlib.split(grad, ring_id, size, use_calc_stream), None, None, None


_registered_op = register(
    "concat(Tensor x, int ring_id, int size, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    setup=save(1, 2, 3),
    backward=_backward,
    vmap="first",
)
