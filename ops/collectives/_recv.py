"""recv: end with what one other rank sends."""

from typing import Any

import torch

from commlib.core.manager import comm
from commlib.ops.registered.library import deliver, like, register, traced


def recv(
    out: torch.Tensor,
    ring_id: int = 0,
    *,
    peer: int,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Any:
    """Fill ``out`` with what position ``peer`` sends, and return it.

    ``out``: any shape, dtype and strides; as many bytes as the peer's ``x``. With ``sync_op=False``
    returns a ``Work`` whose ``result`` is ``out``. No gradient. Streams as ``all_reduce``. Raises
    ``PeerError`` for a peer outside the ring or the rank itself.
    """
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
