"""scatter: rank r receives the r-th part of the root's tensor."""

from typing import Any, Literal, overload

import torch

from commlib.core.context import CommContext
from commlib.core.manager import comm
from commlib.core.work import Work
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import deliver, raw_output, register, rows_of, traced
from commlib.ops.registered.traced_ring import size_of, sized


@overload
def scatter(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def scatter(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def scatter(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def scatter(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    root: int = 0,
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Send each rank its part of the root's tensor along dim 0. There is no gradient.

    Args:
        x: [n, …] of any dtype, n a multiple of the ring's size, the same shape on every rank. Only
            root's values are used.
        ring_id: The ring, its id or its name.
        root: Position of the source in the ring.
        out: The output, [n / size, …]. Default: a new tensor.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        [n / size, …]: on rank r the r-th part of root's ``x``. With ``sync_op=False`` a ``Work``
        whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
        PeerError: ``root`` is not a position of the ring.
    """
    ring_id = ring_number("scatter", ring_id)
    if traced("scatter", use_calc_stream, sync_op, ring_id, x=x, out=out):
        result = _registered_op(x.detach(), ring_id, size_of(ring_id), root, use_calc_stream)
        return deliver(result, out, sync_op)
    ring = comm(ring_id)
    if out is None:
        out = _new(ring, x) if fenced or use_calc_stream else raw_output(ring, _new, ring, x)
    return ring.scatter(
        out, x, root=root, use_calc_stream=use_calc_stream, sync_op=sync_op, fenced=fenced
    )


def _new(ring: CommContext, x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(rows_of(ring._describe("scatter"), x, ring.size))


def _run(x: torch.Tensor, ring_id: int, size: int, root: int, use_calc_stream: bool) -> Any:
    ring = sized("scatter", ring_id, size)
    return ring.scatter(_new(ring, x), x, root=root, use_calc_stream=use_calc_stream)


def _fake(
    x: torch.Tensor, ring_id: int, size: int, root: int, use_calc_stream: bool
) -> torch.Tensor:
    return _new(sized("scatter", ring_id, size), x)


_registered_op = register(
    "scatter(Tensor x, int ring_id, int size, int root, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    vmap="last",
)
