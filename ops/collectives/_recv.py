"""recv: receive a tensor from one other rank."""

from typing import Any, Literal, overload

import torch

from commlib.core.manager import comm
from commlib.core.work import Work
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import deliver, like, register, traced


@overload
def recv(
    out: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def recv(
    out: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def recv(
    out: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def recv(
    out: torch.Tensor,
    ring_id: Ring = 0,
    *,
    peer: Any = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Receive a tensor that another rank sends. There is no gradient.

    Args:
        out: The output: any shape, dtype and strides, as many bytes as the peer's ``x``.
        ring_id: The ring, its id or its name.
        peer: Position of the sender in the ring. Required.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        ``out``. With ``sync_op=False`` a ``Work`` whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
        PeerError: The peer is not another position of the ring.
    """
    ring_id = ring_number("recv", ring_id)
    if traced("recv", use_calc_stream, sync_op, ring_id, out=out):
        return deliver(_registered_op(out.detach(), ring_id, peer, use_calc_stream), out, sync_op)
    return comm(ring_id).recv(
        out, peer=peer, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _run(shape: torch.Tensor, ring_id: int, peer: int, use_calc_stream: bool) -> Any:
    out = like(shape)
    return comm(ring_id).recv(out, peer=peer, use_calc_stream=use_calc_stream)


def _fake(shape: torch.Tensor, *rest: object) -> torch.Tensor:
    return like(shape)


_registered_op = register(
    "recv(Tensor shape, int ring_id, int peer, bool use_calc_stream) -> Tensor", _run, _fake
)
