"""The legacy point-to-point pair: send_v2 and recv_v2."""

from collections.abc import Sequence

import torch

from commlib import ops
from commlib.compat.paddle.checks import cut, position, ring, tensor
from commlib.core.context import CommContext
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.registered.library import needs_op, raw_output
from commlib.streams import capturing

# Codes of Paddle's VarType; a tensor's dtype travels as such a number in a program.
_CODES = {
    0: torch.bool,
    1: torch.int16,
    2: torch.int32,
    3: torch.int64,
    4: torch.float16,
    5: torch.float32,
    6: torch.float64,
    20: torch.uint8,
    21: torch.int8,
    22: torch.bfloat16,
    23: torch.complex64,
    24: torch.complex128,
}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in _CODES.values()}
_MOST_DIMS = 64


def send_v2(
    x: torch.Tensor,
    ring_id: int = 0,
    peer: int = 0,
    use_calc_stream: bool = False,
    dynamic_shape: bool = False,
) -> None:
    """Send ``x`` to position ``peer``, which calls ``recv_v2``; nothing is returned.

    ``x``: any shape and dtype. With ``dynamic_shape`` the number of dims goes first, then the dims,
    both int32, then the data; this header is fenced in any case, and neither compiled code, nor a
    capture, nor a ``comm.group()`` can hold it. Raw on the comm stream by default. Raises
    ``PeerError`` for a peer outside the ring or the rank itself. Source: operator ``send_v2``.
    """
    context = ring("send_v2", ring_id)
    position("send_v2", context, "peer", peer)
    if dynamic_shape:
        _send_shape(context, x, peer, use_calc_stream)
    ops.send(cut(x), ring_id, peer=peer, use_calc_stream=use_calc_stream, fenced=use_calc_stream)


def recv_v2(
    out_shape: Sequence[int] = (),
    dtype: torch.dtype | int | str = torch.float32,
    peer: int = 0,
    ring_id: int = 0,
    use_calc_stream: bool = False,
    dynamic_shape: bool = False,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return what position ``peer`` sends.

    ``out_shape``: its shape, every dim 1 or above; with ``dynamic_shape`` it is not read, the shape
    comes from the peer and the host waits for it. ``dtype``: a torch dtype, its name, or Paddle's
    code (5 is float32). ``device`` defaults to the ring's. Raw on the comm stream by default.
    Raises ``PeerError`` as ``send_v2``, ``ShapeError`` for an empty shape or a dim below 1,
    ``DtypeError``. Source: operator ``recv_v2``.
    """
    context = ring("recv_v2", ring_id)
    position("recv_v2", context, "peer", peer)
    if dynamic_shape:
        out_shape, make = _recv_shape(context, peer, use_calc_stream), _empty
    else:
        out_shape, make = tuple(out_shape), new_tensor
    given = "recv_v2", context, out_shape, dtype, device
    out = make(*given) if use_calc_stream else raw_output(context, make, *given)
    got: torch.Tensor = ops.recv(
        out, ring_id, peer=peer, use_calc_stream=use_calc_stream, fenced=use_calc_stream
    )
    return got


def new_tensor(
    name: str,
    context: CommContext,
    shape: tuple[int, ...],
    dtype: torch.dtype | int | str,
    device: torch.device | str | None,
) -> torch.Tensor:
    """Return an empty tensor to receive into, from the arguments of a legacy operator."""
    if not shape or any(dim < 1 for dim in shape):
        also = ", or dynamic_shape=True on both" if name == "recv_v2" else ""
        raise ShapeError(
            f"{context._describe(name)}: out_shape={shape}; expected one dim or more, each 1 or "
            f"above; type out_shape=[...] as the peer's x.shape{also}"
        )
    return _empty(name, context, shape, dtype, device)


def _empty(
    name: str,
    context: CommContext,
    shape: tuple[int, ...],
    dtype: torch.dtype | int | str,
    device: torch.device | str | None,
) -> torch.Tensor:
    where = context.device if device is None else device
    return torch.empty(shape, dtype=_dtype(name, context, dtype), device=where)


def _dtype(name: str, context: CommContext, dtype: torch.dtype | int | str) -> torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    found = _NAMES.get(dtype) if isinstance(dtype, str) else _CODES.get(dtype)
    if found is None:
        raise DtypeError(
            f"{context._describe(name)}: dtype={dtype!r}; expected a torch dtype, one of the "
            f"names {', '.join(_NAMES)}, or one of the codes {', '.join(map(str, _CODES))}; type "
            f"dtype=torch.float32"
        )
    return found


def _send_shape(context: CommContext, x: torch.Tensor, peer: int, use_calc_stream: bool) -> None:
    _on_host(context, "send_v2")
    shape = list(tensor("send_v2", context, x).shape)
    for part in ([len(shape)], shape):
        header = torch.tensor(part, dtype=torch.int32, device=context.device)
        context.send(header, peer=peer, use_calc_stream=use_calc_stream)


def _recv_shape(context: CommContext, peer: int, use_calc_stream: bool) -> tuple[int, ...]:
    _on_host(context, "recv_v2")

    def numbers(count: int) -> list[int]:
        header = torch.empty(count, dtype=torch.int32, device=context.device)
        context.recv(header, peer=peer, use_calc_stream=use_calc_stream)
        return [int(number) for number in header.tolist()]

    (dims,) = numbers(1)
    if not 0 <= dims <= _MOST_DIMS:
        raise ShapeError(
            f"{context._describe('recv_v2')}: the peer announced {dims} dims; expected 0 to "
            f"{_MOST_DIMS}; type dynamic_shape=True in send_v2 of rank {peer} too"
        )
    return tuple(numbers(dims))


def _on_host(context: CommContext, name: str) -> None:
    """Refuse a shape that only the run can know where the host can't stop to read it."""
    place = "compiled code, or under a mode that traces" if needs_op() else None
    if place is None and capturing():
        place = "a capture"
    if place is None and context._open_group is not None:
        place = "a group"
    if place is not None:
        raise ArgumentError(
            f"{context._describe(name)}: dynamic_shape=True inside {place}, where the shape can't "
            f"be read; type dynamic_shape=False and give out_shape, or call it in plain eager code"
        )
