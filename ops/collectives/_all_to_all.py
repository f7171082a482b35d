"""all_to_all: rank r receives the r-th part of every rank's tensor."""

from collections.abc import Sequence
from typing import Any, Literal, overload

import torch
from torch.compiler import is_compiling

from commlib.core.dispatch import is_plain
from commlib.core.manager import _rings, comm
from commlib.core.validation import split_rows
from commlib.core.work import Work
from commlib.ops.arguments import Ring, eager_ring, ring_number
from commlib.ops.registered.library import deliver, raw_output, register, rows
from commlib.ops.registered.traced_ring import size_of, sized


@overload
def all_to_all(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out_splits: Sequence[int] | None = ...,
    in_splits: Sequence[int] | None = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def all_to_all(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out_splits: Sequence[int] | None = ...,
    in_splits: Sequence[int] | None = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def all_to_all(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out_splits: Sequence[int] | None = ...,
    in_splits: Sequence[int] | None = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def all_to_all(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    out_splits: Sequence[int] | None = None,
    in_splits: Sequence[int] | None = None,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Exchange parts of ``x``: part j goes to rank j.

    The gradient is the reverse exchange.

    Args:
        x: [n, …] of any dtype. Without splits, n is a multiple of the ring's size.
        ring_id: The ring, its id or its name.
        out_splits: Rows received from each rank. ``out_splits[j]`` equals rank j's
            ``in_splits[r]`` on rank r. Default: equal parts.
        in_splits: Rows sent to each rank. Default: equal parts.
        out: The output, [sum(out_splits), …]. Default: a new tensor.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        [sum(out_splits), …], the received parts in rank order along dim 0; [n, …] without splits.
        With ``sync_op=False`` a ``Work`` whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
    """
    number = ring_id if type(ring_id) is int else ring_number("all_to_all", ring_id)
    ring = _rings.get(number) if type(number) is int and not is_compiling() else None
    if ring is None or not is_plain(ring, x, x if out is None else out):
        ring = eager_ring("all_to_all", number, x, out, use_calc_stream, sync_op)
    if ring is None:
        takes = _checked(number, "out_splits", out_splits)
        sends = _checked(number, "in_splits", in_splits)
        result = _registered_op(x, number, size_of(number), takes, sends, use_calc_stream)
        return deliver(result, out, sync_op)
    if out is None:
        if out_splits is not None:
            out_splits = split_rows(ring, "all_to_all", "out_splits", out_splits)
        raw = not (fenced or use_calc_stream)
        out = raw_output(ring, _new, x, out_splits) if raw else _new(x, out_splits)
    return ring.all_to_all(
        out,
        x,
        out_splits=out_splits,
        in_splits=in_splits,
        use_calc_stream=use_calc_stream,
        sync_op=sync_op,
        fenced=fenced,
    )


def _checked(number: int, role: str, splits: Sequence[int] | None) -> list[int] | None:
    """Return the splits of a call that takes its registered op."""
    if splits is None:
        return None
    symbols = isinstance(splits, (list, tuple)) and any(isinstance(x, torch.SymInt) for x in splits)
    if is_compiling() or symbols:
        return list(splits)
    return split_rows(comm(number), "all_to_all", role, splits)


def _new(x: torch.Tensor, out_splits: Sequence[int] | None) -> torch.Tensor:
    count, rest = rows(x)
    return x.new_empty((count if out_splits is None else sum(out_splits), *rest))


def _run(
    x: torch.Tensor,
    ring_id: int,
    size: int,
    out_splits: list[int] | None,
    in_splits: list[int] | None,
    use_calc_stream: bool,
) -> Any:
    return sized("all_to_all", ring_id, size).all_to_all(
        _new(x, out_splits),
        x,
        out_splits=out_splits,
        in_splits=in_splits,
        use_calc_stream=use_calc_stream,
    )


def _fake(
    x: torch.Tensor,
    ring_id: int,
    size: int,
    out_splits: list[int] | None,
    in_splits: list[int] | None,
    use_calc_stream: bool,
) -> torch.Tensor:
    sized("all_to_all", ring_id, size)
    return _new(x, out_splits)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    """Save the reverse exchange: received parts are sent back, in the shape of ``x``."""
    x, ring_id, size, out_splits, in_splits, use_calc_stream = inputs
    if in_splits is None and out_splits is not None:
        in_splits = [rows(x)[0] // size] * size
    ctx.saved = ring_id, size, out_splits, in_splits, use_calc_stream
    ctx.scalar = x.dim() == 0


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, size, out_splits, in_splits, use_calc_stream = ctx.saved
    back = _registered_op(grad, ring_id, size, in_splits, out_splits, use_calc_stream)
    return back.view(()) if ctx.scalar else back, None, None, None, None, None


_registered_op = register(
    "all_to_all(Tensor x, int ring_id, int size, SymInt[]? out_splits, SymInt[]? in_splits,"
    " bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
    vmap="last",
)
