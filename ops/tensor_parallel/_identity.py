"""identity: a copy whose gradient is summed over the ring (tensor-parallel "f")."""

from typing import Any

import torch

from commlib.core.manager import comm
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import checked, like, register, save


def identity(x: torch.Tensor, ring_id: Ring = 0, *, use_calc_stream: bool = True) -> torch.Tensor:
    """Copy ``x``; the gradient is all-reduced (sum). Use it before a column-parallel layer.

    Only the backward communicates. The host does not block on a GPU.

    Args:
        x: Any shape and dtype.
        ring_id: The ring, its id or its name.
        use_calc_stream: Run the backward on the caller's current stream. False: on the ring's
            stream.

    Returns:
        A copy of ``x``.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
    """
    ring_id = ring_number("identity", ring_id)
    if not torch.compiler.is_compiling():
        checked("identity", x, ring_id)
    copied: torch.Tensor = _registered_op(x, ring_id, use_calc_stream)
    return copied


def _run(x: torch.Tensor, ring_id: int, use_calc_stream: bool) -> torch.Tensor:
    comm(ring_id)
    return x.clone(memory_format=torch.contiguous_format)


def _fake(x: torch.Tensor, ring_id: int, use_calc_stream: bool) -> torch.Tensor:
    comm(ring_id)
    return like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, calc = ctx.saved
    total = torch.ops.commlib.all_reduce(grad, ring_id, "sum", None, "all_reduce", calc)
    return total, None, None


_registered_op = register(
    "identity(Tensor x, int ring_id, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    setup=save(1, 2),
    backward=_backward,
    ordered=False,
    vmap="any",
)
