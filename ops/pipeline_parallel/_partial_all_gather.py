"""partial_all_gather: gather one slice of a tensor from every rank, on every rank."""

from typing import Any, Literal, overload

import torch

from commlib.core.manager import comm
from commlib.core.work import Work
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.pipeline_parallel.slices import bounds, joined, slice_views
from commlib.ops.registered.library import checked, deliver, like, raw_output, register, traced


@overload
def partial_all_gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def partial_all_gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def partial_all_gather(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def partial_all_gather(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Gather one slice of a flattened tensor from every rank, on every rank.

    There is no gradient. Source: operator ``partial_allgather``.

    Args:
        x: Any shape and dtype, the same on every rank; the number of elements is a multiple of the
            ring's size. Rank r contributes slice r. The slice of a strided ``x`` is copied first;
            such a call is always fenced.
        ring_id: The ring, its id or its name.
        out: The output, with as many elements as ``x``. Default: a new tensor. ``out=x`` completes
            a tensor of which ``partial_recv`` has filled this rank's slice.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        A tensor of the shape of ``x``, its slice r from rank r. With ``sync_op=False`` a ``Work``
        whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
    """
    ring_id = ring_number("partial_all_gather", ring_id)
    if traced("partial_all_gather", use_calc_stream, sync_op, ring_id, x=x, out=out):
        return deliver(_registered_op(x.detach(), ring_id, use_calc_stream), out, sync_op)
    ring = checked("partial_all_gather", x, ring_id)
    parts = _own_slice(x.detach(), ring_id)
    fenced = fenced or len(parts) > 1  # several views are copied on the current stream
    if out is None:
        out = like(x) if fenced or use_calc_stream else raw_output(ring, like, x)
    result: torch.Tensor | Work = ring.all_gather(
        out, joined(parts), use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )
    return result


def _own_slice(x: torch.Tensor, ring_id: int) -> list[torch.Tensor]:
    ring = comm(ring_id)
    first, last = bounds("partial_all_gather", x, ring_id, ring.size, ring.rank)
    return slice_views(x, first, last)


def _run(x: torch.Tensor, ring_id: int, use_calc_stream: bool) -> Any:
    part = joined(_own_slice(x, ring_id))
    return comm(ring_id).all_gather(like(x), part, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, ring_id: int, use_calc_stream: bool) -> torch.Tensor:
    return like(x)


_registered_op = register(
    "partial_all_gather(Tensor x, int ring_id, bool use_calc_stream) -> Tensor", _run, _fake
)
