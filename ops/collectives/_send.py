"""send: hand a tensor to one other rank."""

from typing import Any

import torch

from commlib.core.manager import comm
from commlib.core.work import Work
from commlib.ops.registered.library import register, traced


def send(
    x: torch.Tensor,
    ring_id: int = 0,
    *,
    peer: int,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Any:
    """Send ``x`` to position ``peer``, which calls ``recv`` with a tensor of as many bytes.

    ``x``: any shape and dtype. Returns None, or a ``Work`` with ``sync_op=False``. On a CPU blocks
    until the bytes are on their way. No gradient. Streams as ``all_reduce``. Raises ``PeerError``
    for a peer outside the ring or the rank itself. Several sends and receives between the same
    ranks belong into ``with ring.group():``.
    """
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
