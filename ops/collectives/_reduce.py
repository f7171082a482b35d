"""reduce: reduce over all ranks, on the root."""

from typing import Any, Literal, overload

import torch

from commlib.core.manager import comm
from commlib.core.work import Work
from commlib.engines.reduction_names import Reduction, ReductionName
from commlib.ops.arguments import Ring, named_reduction, ring_number
from commlib.ops.registered.library import deliver, like, raw_output, register, traced
from commlib.ops.registered.traced_ring import rank_of


@overload
def reduce(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    op: Reduction = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def reduce(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    op: Reduction = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def reduce(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    root: int = ...,
    op: Reduction = ...,
    out: torch.Tensor | None = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def reduce(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    root: int = 0,
    op: Reduction = "sum",
    out: torch.Tensor | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Reduce ``x`` element-wise over the ring, on root. There is no gradient.

    Args:
        x: Any shape, the same on every rank; dtypes as in ``all_reduce``.
        ring_id: The ring, its id or its name.
        root: Position of the destination in the ring.
        op: "sum", "prod", "min", "max" or "avg" in any case, or a ``torch.distributed.ReduceOp``.
        out: The output, with as many elements as ``x``; written on root only. Default: a new
            tensor.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        The reduction on root, a copy of ``x`` or the unchanged ``out`` on the other ranks. With
        ``sync_op=False`` a ``Work`` whose ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
        PeerError: ``root`` is not a position of the ring.
    """
    ring_id = ring_number("reduce", ring_id)
    if traced("reduce", use_calc_stream, sync_op, ring_id, x=x, out=out):
        name = named_reduction("reduce", ring_id, op)
        result = _registered_op(x.detach(), ring_id, root, name, use_calc_stream)
        if out is not None and rank_of(ring_id) != root:
            result, out = out, None
        return deliver(result, out, sync_op)
    ring = comm(ring_id)
    if out is None:
        at_root = ring.rank == root
        raw = at_root and not (fenced or use_calc_stream)
        out = raw_output(ring, like, x) if raw else _new(x, at_root)
    return ring.reduce(
        out,
        x,
        root=root,
        op=op,
        use_calc_stream=use_calc_stream,
        sync_op=sync_op,
        fenced=fenced,
    )


def reduce_(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    root: int = 0,
    op: Reduction = "sum",
    use_calc_stream: bool = True,
) -> torch.Tensor:
    """Reduce ``x`` over the ring in place, on root; other ranks keep ``x``.

    Args:
        x: Any shape; it must not require grad. Input and output.
        ring_id: The ring, its id or its name.
        root: Position of the destination in the ring.
        op: As in ``all_reduce``.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream, and
            the current stream waits for it.

    Returns:
        ``x`` with the reduction on root. The host blocks on a CPU only.

    Raises:
        As ``reduce``.
    """
    if type(ring_id) is not int:
        ring_id = ring_number("reduce_", ring_id)
    return reduce(x, ring_id, root=root, op=op, out=x, use_calc_stream=use_calc_stream)


def _new(x: torch.Tensor, at_root: bool) -> torch.Tensor:
    if at_root:
        return like(x)
    return x.detach().clone(memory_format=torch.contiguous_format)


def _run(x: torch.Tensor, ring_id: int, root: int, op: ReductionName, use_calc_stream: bool) -> Any:
    ring = comm(ring_id)
    out = _new(x, ring.rank == root)
    return ring.reduce(out, x, root=root, op=op, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return like(x)


_registered_op = register(
    "reduce(Tensor x, int ring_id, int root, str op, bool use_calc_stream) -> Tensor",
    _run,
    _fake,
    vmap="any",
)
