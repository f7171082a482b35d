"""all_gather: concatenate the tensors of all ranks on every rank."""

from typing import Any, Literal, overload

import torch
from torch.compiler import is_compiling

from commlib.core.dispatch import is_plain
from commlib.core.manager import _rings
from commlib.core.stream_mode import MODES
from commlib.core.work import Work
from commlib.ops.arguments import Ring, eager_ring, ring_number
from commlib.ops.registered.library import deliver, raw_output, register, rows, save
from commlib.ops.registered.traced_ring import size_of, sized


@overload
def all_gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def all_gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def all_gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def all_gather(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Concatenate the tensors of all ranks along dim 0, on every rank.

    The gradient is the reduce_scatter (sum) of the gradients.

    Args:
        x: [n, …] of any dtype, the same shape on every rank. A 0-D tensor counts as one row.
        ring_id: The ring, its id or its name.
        out: The output, [n * size, …]. Default: a new tensor.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        [n * size, …] in rank order; [size] for a 0-D ``x``. With ``sync_op=False`` a ``Work``
        whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
    """
    number = ring_id if type(ring_id) is int else ring_number("all_gather", ring_id)
    ring = _rings.get(number) if type(number) is int and not is_compiling() else None
    plain = ring is not None and is_plain(ring, x, x if out is None else out)
    if not plain:
        ring = eager_ring("all_gather", number, x, out, use_calc_stream, sync_op)
    if ring is None:
        return deliver(_registered_op(x, number, size_of(number), use_calc_stream), out, sync_op)
    if out is None:
        out = (
            _new(x, ring.size)
            if fenced or use_calc_stream
            else raw_output(ring, _new, x, ring.size)
        )
    return ring._all_gather(out, x, MODES[use_calc_stream, sync_op, fenced], plain)


def _new(x: torch.Tensor, size: int) -> torch.Tensor:
    count, rest = rows(x)
    return x.new_empty((count * size, *rest))


def _run(x: torch.Tensor, ring_id: int, size: int, use_calc_stream: bool) -> Any:
    ring = sized("all_gather", ring_id, size)
    return ring.all_gather(_new(x, size), x, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, ring_id: int, size: int, use_calc_stream: bool) -> torch.Tensor:
    sized("all_gather", ring_id, size)
    return _new(x, size)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
    save(1, 2, 3)(ctx, inputs, output)
    ctx.scalar = inputs[0].dim() == 0


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, size, use_calc_stream = ctx.saved
    part = torch.ops.commlib.reduce_scatter(grad, ring_id, size, "sum", use_calc_stream)
    return part.view(()) if ctx.scalar else part, None, None, None


_registered_op = register(
    "all_gather(Tensor x, int ring_id, int size, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    setup=_setup,
    backward=_backward,
    vmap="last",
)
