"""split: keep this rank's part of the last axis."""

from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.errors import ShapeError
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import checked, register, save
from commlib.ops.registered.traced_ring import size_of, sized


def split(x: torch.Tensor, ring_id: Ring = 0, *, use_calc_stream: bool = True) -> torch.Tensor:
    """Copy this rank's part of ``x`` along the last axis.

    Only the backward communicates: the gradient is the ``concat`` of all ranks' gradients. The
    host does not block on a GPU.

    Args:
        x: [..., n] of any dtype, n a multiple of the ring's size.
        ring_id: The ring, its id or its name.
        use_calc_stream: Run the backward on the caller's current stream. False: on the ring's
            stream.

    Returns:
        [..., n / size], a copy.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
    """
    ring_id = ring_number("split", ring_id)
    if not torch.compiler.is_compiling():
        checked("split", x, ring_id)
    part: torch.Tensor = _registered_op(x, ring_id, size_of(ring_id), use_calc_stream)
    return part


def _width(ring: CommContext, x: torch.Tensor) -> int:
    if x.dim() == 0 or x.shape[-1] % ring.size:
        raise ShapeError(
            f"{ring._describe('split')}: the last axis of shape {tuple(x.shape)} does not divide "
            f"by the ring's size {ring.size}; pad it"
        )
    return x.shape[-1] // ring.size


def _run(x: torch.Tensor, ring_id: int, size: int, use_calc_stream: bool) -> torch.Tensor:
    ring = sized("split", ring_id, size)
    width = _width(ring, x)
    return x.narrow(-1, ring.rank * width, width).clone(memory_format=torch.contiguous_format)


def _fake(x: torch.Tensor, ring_id: int, size: int, use_calc_stream: bool) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], _width(sized("split", ring_id, size), x)))


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, size, use_calc_stream = ctx.saved
    return torch.ops.commlib.concat(grad, ring_id, size, use_calc_stream), None, None, None


_registered_op = register(
    "split(Tensor x, int ring_id, int size, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    setup=save(1, 2, 3),
    backward=_backward,
    ordered=False,
    vmap="first",
)
