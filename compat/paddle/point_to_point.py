"""Legacy point-to-point operators: send_v2 and recv_v2."""

from collections.abc import Sequence

import torch

from commlib import ops
from commlib.compat.paddle.checks import detached, position, ring_of, tensor
from commlib.compat.paddle.dtypes import dtype_of
from commlib.core import observers
from commlib.core.context import CommContext
from commlib.errors import ArgumentError, ShapeError
from commlib.ops.registered.library import needs_op, raw_output

_MOST_DIMS = 64


def send_v2(
    x: torch.Tensor,
    ring_id: int = 0,
    peer: int = 0,
    use_calc_stream: bool = False,
    dynamic_shape: bool = False,
) -> None:
    """Send ``x`` to position ``peer``, which calls ``recv_v2``.

    Source: operator ``send_v2``.

    Args:
        x: Any shape and dtype.
        ring_id: The ring.
        peer: Position of the receiver in the ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        dynamic_shape: True sends the number of dims and the dims first, both as int32. This header
            is always fenced, and needs eager code outside captures and ``ring.group()``.

    Raises:
        PeerError: ``peer`` is not a position in the ring, or is this rank.
        ArgumentError: ``dynamic_shape`` in compiled code, a capture or a group.
    """
    ring = ring_of("send_v2", ring_id)
    position("send_v2", ring, "peer", peer)
    if dynamic_shape:
        _send_shape(ring, x, peer, use_calc_stream)
    ops.send(
        detached(x), ring_id, peer=peer, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )


def recv_v2(
    out_shape: Sequence[int] = (),
    dtype: torch.dtype | int | str = torch.float32,
    peer: int = 0,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    dynamic_shape: bool = False,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return the tensor that position ``peer`` sends.

    Source: operator ``recv_v2``.

    Args:
        out_shape: Shape of the tensor, every dim at least 1.
        dtype: A torch dtype, its name, or Paddle's code (5 is float32).
        peer: Position of the sender in the ring.
        ring_id: The ring.
        use_calc_stream: True runs on the current stream, False raw on the ring's comm stream.
        dynamic_shape: True ignores ``out_shape`` and receives the shape; the host waits for it.
        device: Device of the tensor. None is the ring's.

    Returns:
        A new tensor.

    Raises:
        PeerError: ``peer`` is not a position in the ring, or is this rank.
        ShapeError: ``out_shape`` is empty or has a dim below 1.
        DtypeError: ``dtype`` is unknown.
        ArgumentError: ``dynamic_shape`` in compiled code, a capture or a group.
    """
    ring = ring_of("recv_v2", ring_id)
    position("recv_v2", ring, "peer", peer)
    if dynamic_shape:
        out_shape, make = _recv_shape(ring, peer, use_calc_stream), _empty
    else:
        out_shape, make = tuple(out_shape), new_tensor
    arguments = "recv_v2", ring, out_shape, dtype, device
    out = make(*arguments) if use_calc_stream else raw_output(ring, make, *arguments)
    received: torch.Tensor = ops.recv(
        out, ring_id, peer=peer, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return received


def new_tensor(
    name: str,
    ring: CommContext,
    shape: tuple[int, ...],
    dtype: torch.dtype | int | str,
    device: torch.device | str | None,
) -> torch.Tensor:
    """Return an empty tensor to receive into, from the arguments of a legacy operator."""
    if not shape or any(dim < 1 for dim in shape):
        dynamic = ", or dynamic_shape=True on both" if name == "recv_v2" else ""
        raise ShapeError(
            f"{ring._describe(name)}: out_shape={shape}; expected one dim or more, each 1 or "
            f"above; pass out_shape=[...], the peer's x.shape{dynamic}"
        )
    return _empty(name, ring, shape, dtype, device)


def _empty(
    name: str,
    ring: CommContext,
    shape: tuple[int, ...],
    dtype: torch.dtype | int | str,
    device: torch.device | str | None,
) -> torch.Tensor:
    device = ring.device if device is None else device
    return torch.empty(shape, dtype=dtype_of(ring._describe(name), dtype), device=device)


def _send_shape(ring: CommContext, x: torch.Tensor, peer: int, use_calc_stream: bool) -> None:
    _on_host(ring, "send_v2")
    shape = list(tensor("send_v2", ring, x).shape)
    for part in ([len(shape)], shape):
        header = torch.tensor(part, dtype=torch.int32, device=ring.device)
        ring.send(header, peer=peer, use_calc_stream=use_calc_stream)


def _recv_shape(ring: CommContext, peer: int, use_calc_stream: bool) -> tuple[int, ...]:
    _on_host(ring, "recv_v2")

    def numbers(count: int) -> list[int]:
        header = torch.empty(count, dtype=torch.int32, device=ring.device)
        ring.recv(header, peer=peer, use_calc_stream=use_calc_stream)
        return [int(number) for number in header.tolist()]

    (dims,) = numbers(1)
    if not 0 <= dims <= _MOST_DIMS:
        raise ShapeError(
            f"{ring._describe('recv_v2')}: the peer announced {dims} dims; expected 0 to "
            f"{_MOST_DIMS}; pass dynamic_shape=True in send_v2 of rank {peer} too"
        )
    return tuple(numbers(dims))


def _on_host(ring: CommContext, name: str) -> None:
    """Raise where the host can't read a received shape: compiled code, captures and groups."""
    scope = "compiled code, or under a mode that traces" if needs_op() else None
    if scope is None and observers.captured():
        scope = "a capture"
    if scope is None and ring._open_group is not None:
        scope = "a group"
    if scope is not None:
        raise ArgumentError(
            f"{ring._describe(name)}: dynamic_shape=True inside {scope}, where the shape can't be "
            f"read; pass dynamic_shape=False and out_shape, or call it in plain eager code"
        )
