"""broadcast: copy the root's tensor to every rank."""

from typing import Any, Literal, overload

import torch
from torch.compiler import is_compiling

from commlib.core.dispatch import is_plain
from commlib.core.manager import _rings, comm
from commlib.core.work import Work
from commlib.ops.arguments import Ring, eager_ring, ring_number
from commlib.ops.registered.library import (
    deliver,
    like,
    once,
    raw_output,
    register,
    save,
)


@overload
def broadcast(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def broadcast(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def broadcast(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def broadcast(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    root: int = 0,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Copy the root's tensor to every rank.

    The gradient is the sum of all gradients on root, and zeros on the other ranks.

    Args:
        x: Any shape and dtype, the same on every rank. Only root's values are used.
        ring_id: The ring, its id or its name.
        root: Position of the source in the ring.
        out: The output, with as many elements as ``x``; ``out=x`` works in place. Default: a new
            tensor.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        A tensor of the shape and dtype of ``x`` with root's values. With ``sync_op=False`` a
        ``Work`` whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
        PeerError: ``root`` is not a position of the ring.
    """
    number = ring_id if type(ring_id) is int else ring_number("broadcast", ring_id)
    ring = _rings.get(number) if type(number) is int and not is_compiling() else None
    if ring is None or not is_plain(ring, x, x if out is None else out):
        ring = eager_ring("broadcast", number, x, out, use_calc_stream, sync_op)
    if ring is None:
        return deliver(_registered_op(x, number, root, use_calc_stream), out, sync_op)
    if out is None:
        out = like(x) if fenced or use_calc_stream else raw_output(ring, like, x)
    return ring.broadcast(
        out, x, root=root, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def broadcast_(
    x: torch.Tensor, ring_id: Ring = 0, *, root: int = 0, use_calc_stream: bool = True
) -> torch.Tensor:
    """Copy the root's tensor into ``x`` on every rank.

    Args:
        x: Any shape; it must not require grad. Input and output.
        ring_id: The ring, its id or its name.
        root: Position of the source in the ring.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream, and
            the current stream waits for it.

    Returns:
        ``x`` with root's values. The host blocks on a CPU only.

    Raises:
        As ``broadcast``.
    """
    if type(ring_id) is not int:
        ring_id = ring_number("broadcast_", ring_id)
    return broadcast(x, ring_id, root=root, out=x, use_calc_stream=use_calc_stream)


def _run(x: torch.Tensor, ring_id: int, root: int, use_calc_stream: bool) -> Any:
    out = like(x)
    return comm(ring_id).broadcast(out, x, root=root, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, root, use_calc_stream = ctx.saved
    return _grad_op(grad, ring_id, root, use_calc_stream), None, None, None


def _grad_run(grad: torch.Tensor, ring_id: int, root: int, use_calc_stream: bool) -> Any:
    """Return the sum on root and zeros elsewhere; this rank's role is decided at run time."""
    ring, total = comm(ring_id), like(grad)
    ring.reduce(total, grad, root=root, use_calc_stream=use_calc_stream)
    return total if ring.rank == root else total.zero_()


_grad_op = register(
    "broadcast_grad(Tensor grad, int ring_id, int root, bool use_calc_stream) -> Tensor",
    _grad_run,
    _fake,
    backward=once("broadcast"),
    vmap="any",
)
_registered_op = register(
    "broadcast(Tensor x, int ring_id, int root, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    setup=save(1, 2, 3),
    backward=_backward,
    vmap="any",
)
