"""send: send a tensor to one other rank."""

from typing import Any, Literal, overload

import torch

from commlib.core.manager import comm
from commlib.core.work import Work
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import register, traced


@overload
def send(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> None: ...
@overload
def send(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[None]: ...
@overload
def send(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    peer: int,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> Work[None] | None: ...


def send(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    peer: Any = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Work[None] | None:
    """Send a tensor to another rank, which calls ``recv``. There is no gradient.

    Use ``with ring.group():`` for several sends and receives between the same ranks.

    Args:
        x: Any shape and dtype. The peer receives as many bytes.
        ring_id: The ring, its id or its name.
        peer: Position of the receiver in the ring. Required.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        None, or a ``Work`` with ``sync_op=False``. On a CPU the host blocks until the bytes are
        sent.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
        PeerError: The peer is not another position of the ring.
    """
    ring_id = ring_number("send", ring_id)
    if traced("send", use_calc_stream, sync_op, ring_id, x=x):
        _registered_op(x.detach(), ring_id, peer, use_calc_stream)
        return None if sync_op else Work(None)
    return comm(ring_id).send(
        x, peer=peer, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _run(x: torch.Tensor, ring_id: int, peer: int, use_calc_stream: bool) -> None:
    comm(ring_id).send(x, peer=peer, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, *rest: object) -> None:
    return None


_registered_op = register(
    "send(Tensor x, int ring_id, int peer, bool use_calc_stream) -> ()", _run, _fake
)
