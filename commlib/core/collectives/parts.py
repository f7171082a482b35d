"""Lists with a tensor per rank, which collectives take in place of one tensor of all parts."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from commlib.core.dispatch import async_unsupported, is_plain
from commlib.core.observers import begun
from commlib.core.ring import Ring
from commlib.core.stream_mode import StreamMode
from commlib.core.validation import check_inference, check_out, check_tensor
from commlib.core.within import Seconds, call_deadline
from commlib.core.work import OnStream, Then, Work
from commlib.deferred import release_deferred
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.streams import capture_of, on_stream

Tensor = torch.Tensor
Parts = list[Tensor] | tuple[Tensor, ...]
Launch = Callable[..., Any]  # of a collective of the ring; takes its options


def is_list(given: object) -> bool:
    """Return True for what is checked as a list of tensors."""
    return isinstance(given, (list, tuple))


def check_parts(
    ring: Ring,
    collective: str,
    role: str,
    parts: Any,
    own: Tensor,
    mode: StreamMode | None = None,
    *,
    written: bool = False,
) -> None:
    """Refuse anything but a tensor per rank, of the dtype of this rank's own tensor.

    Args:
        ring: The ring.
        collective: What the program has called.
        role: The argument.
        parts: The list.
        own: This rank's other tensor.
        mode: Of a call that may be more than one launch.
        written: The list is the output.

    Raises:
        ArgumentError, DeviceError, DtypeError, ShapeError: Naming the first wrong tensor.
    """
    if mode is not None:
        check_mode(ring, collective, mode)
    if not is_list(parts):
        raise ArgumentError(
            f"{ring._describe(collective)}: {role} is {type(parts).__name__}; expected a list of "
            f"tensors"
        )
    if len(parts) != ring.size:
        raise ShapeError(
            f"{ring._describe(collective)}: {role} has {len(parts)} tensors; expected one per "
            f"rank, {ring.size}"
        )
    if not is_plain(ring, own, own):
        check_tensor(ring, collective, "out" if role == "xs" else "x", own)
    for at, part in enumerate(parts):
        if not is_plain(ring, part, part):
            check_tensor(ring, collective, f"{role}[{at}]", part)
            if written:
                check_out(ring, collective, part)
        if written:
            check_inference(ring, collective, f"{role}[{at}]", part)
        if part.dtype is not own.dtype:
            raise DtypeError(
                f"{ring._describe(collective)}: {role}[{at}] is {part.dtype}; expected one dtype, "
                f"{own.dtype}; call {role}[{at}].to({own.dtype})"
            )


def check_mode(ring: Ring, collective: str, mode: StreamMode) -> None:
    """Refuse a list where no copy can follow the call in stream order."""
    if ring._open_group is not None:
        raise ArgumentError(
            f"{ring._describe(collective)}: a list of tensors while a group is open already; leave "
            f"it first, or pass one tensor of all parts"
        )
    if not mode.fenced:
        raise ArgumentError(
            f"{ring._describe(collective)}: fenced=False does not support a list of tensors, which "
            f"may need copies; pass one tensor of all parts"
        )


def check_size(ring: Ring, collective: str, role: str, at: int, part: Tensor, own: Tensor) -> None:
    """Raise ShapeError if a part and this rank's own tensor differ in size."""
    if part.numel() != own.numel():
        raise ShapeError(
            f"{ring._describe(collective)}: {role}[{at}] of shape {tuple(part.shape)} has "
            f"{part.numel()} elements; expected {own.numel()}, as this rank's own tensor"
        )


def check_even(ring: Ring, collective: str, role: str, parts: Parts, own: Tensor) -> None:
    """Raise if the parts differ in size: other ranks do not know these sizes."""
    for at, part in enumerate(parts):
        check_size(ring, collective, role, at, part, own)


def is_even(parts: Parts) -> bool:
    """Return True if all parts have as many elements: every rank has parts of the same sizes."""
    return all(part.numel() == parts[0].numel() for part in parts)


def adjacent(parts: Parts) -> Tensor | None:
    """Return the flat view of parts that follow each other in one tensor; None if they do not.

    They are views of one tensor, as ``chunk`` and ``split`` return them, so that the view counts
    its writes as theirs.
    """
    first = parts[0]
    base, end = first._base, first.storage_offset()
    for part in parts:
        if part._base is not base or not part.is_contiguous() or part.is_neg() or part.is_conj():
            return None
        if part.storage_offset() != end:
            return None
        end += part.numel()
    if base is None:
        return first.view(-1) if len(parts) == 1 else None
    return first.detach().as_strided((end - first.storage_offset(),), (1,))


def joined(parts: Parts) -> Tensor:
    """Return one flat tensor with the elements of all parts: a view if they are adjacent."""
    view = adjacent(parts)
    if view is not None:
        return view
    return torch.cat([part.detach().reshape(-1) for part in parts])


def unshared(x: Tensor, outs: Iterable[Tensor]) -> Tensor:
    """Return ``x``, or a copy if another call of its group writes to its memory."""
    begin, end = _span(x)
    spans = [_span(out) for out in outs]
    return x.detach().clone() if any(a < end and begin < b for a, b in spans) else x


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the addresses that a tensor's elements are between."""
    begin, steps = tensor.data_ptr(), zip(tensor.stride(), tensor.shape, strict=True)
    reach = 1 + sum(stride * (size - 1) for stride, size in steps)
    return begin, begin + reach * tensor.itemsize if tensor.numel() else begin


def fill(
    ring: Ring,
    collective: str,
    outs: Parts,
    launch: Callable[[Tensor], Launch],
    mode: StreamMode,
    timeout: Seconds | None,
) -> list[Tensor] | Work[list[Tensor]]:
    """Make a collective into one flat tensor, and copy its parts to ``outs`` in stream order.

    Without the copy where ``outs`` are adjacent. ``launch(flat)`` returns the collective as a
    function of its options.
    """
    use_calc_stream, sync_op = mode.use_calc_stream, mode.sync_op
    kwargs = {"use_calc_stream": use_calc_stream, "sync_op": sync_op, "timeout": timeout}
    flat, result = adjacent(outs), list(outs)
    if flat is not None:
        done = launch(flat)(**kwargs)
        return result if sync_op else Work(result, done._pending, done._limit)
    flat = outs[0].new_empty(sum(out.numel() for out in outs))
    call, copy = launch(flat), partial(_copy, result, flat)
    if sync_op:
        call(**kwargs)
        copy()
        return result
    if ring._fences is None:
        begun_call = call(**kwargs)
        later = partial(_copy_later, result, flat)
        return Work(result, Then(begun_call, later), begun_call._limit)
    if use_calc_stream:
        raise ArgumentError(async_unsupported(ring, collective))
    limit = None if timeout is None else call_deadline(ring, collective, timeout)
    calc, comm = torch.cuda.current_stream(ring.device), ring._fences.comm
    capture = capture_of(calc.cuda_stream)
    release_deferred()
    ring._fences.comm_waits(calc)
    with on_stream(comm):
        call()
        copy()
    event = torch.cuda.Event()
    event.record(comm)
    late = partial(ring._health.late, collective, ())
    return begun(Work(result, OnStream(event, calc, (call, copy), capture, late), limit))


def _copy(outs: Parts, flat: Tensor) -> None:
    for out, part in zip(outs, flat.split([out.numel() for out in outs]), strict=True):
        out.copy_(part.view(out.shape))


def _copy_later(outs: Parts, flat: Tensor) -> None:
    # A waiter may be in another grad or inference mode than the caller's.
    with torch.inference_mode(any(out.is_inference() for out in outs)), torch.no_grad():
        _copy(outs, flat)
