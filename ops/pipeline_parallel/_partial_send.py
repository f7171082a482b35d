"""partial_send: hand one of the equal slices of a tensor to one other rank."""

from typing import Any

import torch

from commlib.core.validation import check_peer
from commlib.ops.collectives._send import send
from commlib.ops.pipeline_parallel.slices import bounds, joined, slice_views
from commlib.ops.registered.library import checked


def partial_send(
    x: torch.Tensor,
    ring_id: int = 0,
    *,
    peer: int,
    num: int = 1,
    id: int = 0,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> Any:
    """Send slice ``id`` of ``num`` of the flattened ``x`` to ``peer``, who calls ``partial_recv``.

    ``x``: any shape and dtype, its number of elements divisible by ``num``. A slice that the
    strides tear into pieces is copied first, always fenced. Returns None, or a ``Work`` with
    ``sync_op=False``. No gradient. Streams as ``send``. Raises ``ArgumentError`` for a slice that
    there is not, ``ShapeError``, ``PeerError``. Source: operator ``partial_send``.
    """
    if not torch.compiler.is_compiling():
        check_peer(checked("partial_send", x, ring_id), "partial_send", peer)
    first, last = bounds("partial_send", x, ring_id, num, id)
    parts = slice_views(x.detach(), first, last)
    return send(
        joined(parts),
        ring_id,
        peer=peer,
        use_calc_stream=use_calc_stream,
        sync_op=sync_op,
        fenced=fenced or len(parts) > 1,
    )
