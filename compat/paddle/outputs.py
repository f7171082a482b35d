"""Outputs that a call in the attribute style has after its inputs, as Paddle's own callers pass."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from commlib.compat.paddle.checks import detached, ring_of, tensor
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.registered.library import needs_op
from commlib.streams import capturing

Tensor = torch.Tensor
Operator = Callable[..., Any]

_OPERATIONS = ("avg", "max", "min", "prod", "sum")
# Operators with a form in place: the input is copied to the output first.
_COLLECTIVES = {
    "c_broadcast",
    *(f"c_{kind}_{operation}" for kind in ("allreduce", "reduce") for operation in _OPERATIONS),
}
_BARRIERS = {"barrier", "c_sync_calc_stream", "c_sync_comm_stream"}
WITH_OUTPUTS = {*_COLLECTIVES, *_BARRIERS, "coalesce_tensor"}


def call_with_outputs(
    name: str,
    operator: Operator,
    in_place: Operator,
    tensors: Sequence[Any],
    attributes: dict[str, Any],
) -> Any:
    """Call an operator of ``WITH_OUTPUTS``, write its results to the outputs, and return these.

    Args:
        name: Its name.
        operator: The operator.
        in_place: Its form in place. Used for collectives alone.
        tensors: The input and the outputs.
        attributes: All other arguments, by name.

    Raises:
        ArgumentError: There are too many or too few outputs.
        ShapeError, DtypeError: An output does not have the shape or the dtype of the result.
    """
    if name == "coalesce_tensor":
        return _coalesced(operator, tensors, attributes)
    if len(tensors) != 2:
        raise ArgumentError(
            f"{name}: {len(tensors)} tensors before the attributes; expected the input and one "
            f"output"
        )
    x, out = tensors
    if name in _BARRIERS:
        _write(name, operator(x, **attributes), out)
        return out
    for each in tensors:
        tensor(name, ring_of(name, attributes.get("ring_id", 0)), each)
    if out is not x:
        with _on_stream_of_call(name, x, attributes):
            _write(name, x, out)
    return in_place(out, **attributes)


def _on_stream_of_call(name: str, x: Tensor, attributes: dict[str, Any]) -> Any:
    """Return the stream that a call runs on, as a context; a raw call has the comm stream.

    Calls in compiled code and captures are ordered after the current stream.
    """
    raw = x.is_cuda and not attributes.get("use_calc_stream", False)
    raw = raw and not needs_op(x) and not capturing()
    stream = ring_of(name, attributes.get("ring_id", 0)).stream if raw else None
    if stream is None:
        return nullcontext()
    x.record_stream(stream)  # the program may free it while the comm stream still reads it
    return torch.cuda.stream(stream)


def _write(name: str, results: Any, outputs: Any) -> None:
    """Copy each result to its output."""
    pairs = _pairs(name, results, outputs)
    for result, out in pairs:
        if result.shape != out.shape:
            raise ShapeError(
                f"{name}: the output has shape {tuple(out.shape)}; expected {tuple(result.shape)}, "
                f"that of the result"
            )
        if result.dtype != out.dtype:
            raise DtypeError(
                f"{name}: the output is {out.dtype}; expected {result.dtype}, that of the result"
            )
    for result, out in pairs:
        if result is not out:
            out.detach().copy_(detached(result))


def _pairs(name: str, results: Any, outputs: Any) -> list[tuple[Tensor, Tensor]]:
    """Return each result with its output."""
    first, second = (
        [each] if isinstance(each, Tensor) else list(each or ()) for each in (results, outputs)
    )
    if len(first) != len(second):
        raise ArgumentError(f"{name}: {len(second)} outputs for {len(first)} results; pass as many")
    return list(zip(first, second, strict=True))


def _coalesced(
    operator: Operator, tensors: Sequence[Any], attributes: dict[str, Any]
) -> tuple[list[Tensor], Tensor]:
    """Let the outputs share the memory of the buffer, which keeps its memory if it fits."""
    if len(tensors) != 3:
        raise ArgumentError(
            f"coalesce_tensor: {len(tensors)} tensors before the attributes; expected the inputs, "
            f"the outputs and the buffer"
        )
    inputs, outputs, buffer = tensors
    buffer = buffer[0] if isinstance(buffer, list | tuple) else buffer
    views, fused = operator(inputs, **attributes)
    pairs = _pairs("coalesce_tensor", views, outputs)
    wrong = [each.dtype for each in (buffer, *outputs) if each.dtype != fused.dtype]
    if wrong:
        raise DtypeError(f"coalesce_tensor: an output is {wrong[0]}; expected {fused.dtype}")
    if buffer.shape == fused.shape and buffer.device == fused.device and buffer.is_contiguous():
        buffer.detach().copy_(fused)
    else:
        buffer.data = fused
    flat = buffer.detach()
    for view, out in pairs:
        first = view.storage_offset()
        out.data = flat[first : first + view.numel()].view(view.shape)
    return list(outputs), buffer
