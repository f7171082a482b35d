"""all_reduce: reduce over all ranks, on every rank."""

from typing import Any, Literal, overload

import torch
from torch.compiler import is_compiling

from commlib.core.dispatch import is_plain
from commlib.core.manager import _rings, comm
from commlib.core.stream_mode import MODES
from commlib.core.work import Work
from commlib.engines.reduction_names import Reduction, ReductionName
from commlib.errors import ArgumentError
from commlib.ops.arguments import Ring, eager_ring, named_reduction, ring_number
from commlib.ops.registered.library import deliver, like, raw_output, register, save


@overload
def all_reduce(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    op: Reduction | Literal["premul_sum", "PREMUL_SUM"] = ...,
    factor: float | None = ...,
    out: torch.Tensor | None = ...,
    backward: str = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[True] = True,
    fenced: bool = ...,
) -> torch.Tensor: ...
@overload
def all_reduce(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    op: Reduction | Literal["premul_sum", "PREMUL_SUM"] = ...,
    factor: float | None = ...,
    out: torch.Tensor | None = ...,
    backward: str = ...,
    use_calc_stream: bool = ...,
    sync_op: Literal[False],
    fenced: bool = ...,
) -> Work[torch.Tensor]: ...
@overload
def all_reduce(
    x: torch.Tensor,
    ring_id: Ring = ...,
    *,
    op: Reduction | Literal["premul_sum", "PREMUL_SUM"] = ...,
    factor: float | None = ...,
    out: torch.Tensor | None = ...,
    backward: str = ...,
    use_calc_stream: bool = ...,
    sync_op: bool,
    fenced: bool = ...,
) -> torch.Tensor | Work[torch.Tensor]: ...


def all_reduce(
    x: torch.Tensor,
    ring_id: Ring = 0,
    *,
    op: Reduction | Literal["premul_sum", "PREMUL_SUM"] = "sum",
    factor: float | None = None,
    out: torch.Tensor | None = None,
    backward: str = "all_reduce",
    use_calc_stream: bool = True,
    sync_op: bool = True,
    fenced: bool = True,
) -> torch.Tensor | Work[torch.Tensor]:
    """Reduce ``x`` element-wise over the ring, on every rank.

    bool: "sum" is a logical or. Complex: "sum" and "avg" only. 8-bit floats and 16-bit integers
    raise ``DtypeError``.

    Args:
        x: Any shape, the same on every rank.
        ring_id: The ring, its id or its name.
        op: "sum", "prod", "min", "max" or "avg" in any case, or a ``torch.distributed.ReduceOp``.
            "premul_sum" multiplies by ``factor`` first, in the dtype of ``x``; it takes floats
            only. "avg" of integers is the sum in their dtype, divided and rounded towards zero.
        factor: The factor of "premul_sum".
        out: The output, with as many elements as ``x``; ``out=x`` works in place. Default: a new
            tensor.
        backward: Gradient of "sum", "avg" and "premul_sum": "all_reduce", the same reduction of
            the gradients, or "identity", for a loss that every rank computes (tensor parallelism):
            there "all_reduce" would give as many times the gradient as there are ranks.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream.
        sync_op: Wait for the result: the current stream on a GPU, the host on a CPU, at most for
            the ring's timeout. False, which needs ``use_calc_stream=False``: return a ``Work``
            instead.
        fenced: Order the ring's stream after the current stream. False leaves both waits to the
            program.

    Returns:
        A tensor of the shape and dtype of ``x``. With ``sync_op=False`` a ``Work`` whose
        ``result`` is that tensor.

    Raises:
        RingError: The ring does not exist, or it has failed.
        DtypeError, ShapeError, DeviceError, ArgumentError: Before any launch.
    """
    number = ring_id if type(ring_id) is int else ring_number("all_reduce", ring_id)
    ring = _rings.get(number) if type(number) is int and not is_compiling() else None
    plain = ring is not None and is_plain(ring, x, x if out is None else out)
    if not plain:
        ring = eager_ring("all_reduce", number, x, out, use_calc_stream, sync_op)
    if ring is None:
        _check_backward(backward)
        name = named_reduction("all_reduce", number, op)
        result = _registered_op(x, number, name, factor, backward, use_calc_stream)
        return deliver(result, out, sync_op)
    if out is None and (fenced or use_calc_stream):
        out = torch.empty_like(x, memory_format=torch.contiguous_format)  # as ``like``
    elif out is None:
        out = raw_output(ring, like, x)
    return ring._all_reduce(out, x, op, factor, MODES[use_calc_stream, sync_op, fenced], plain)


def all_reduce_(
    x: torch.Tensor, ring_id: Ring = 0, *, op: Reduction = "sum", use_calc_stream: bool = True
) -> torch.Tensor:
    """Reduce ``x`` over the ring in place, on every rank.

    Args:
        x: Any shape; it must not require grad. Input and output.
        ring_id: The ring, its id or its name.
        op: As in ``all_reduce``.
        use_calc_stream: Run on the caller's current stream. False: run on the ring's stream, and
            the current stream waits for it.

    Returns:
        ``x`` with the reduction. The host blocks on a CPU only.

    Raises:
        As ``all_reduce``.
    """
    if type(ring_id) is not int:
        ring_id = ring_number("all_reduce_", ring_id)
    return all_reduce(x, ring_id, op=op, out=x, use_calc_stream=use_calc_stream)


def _check_backward(backward: str) -> None:
    if backward not in ("all_reduce", "identity"):
        raise ArgumentError(f"backward={backward!r}: expected 'all_reduce' or 'identity'")


def _run(
    x: torch.Tensor,
    ring_id: int,
    op: ReductionName,
    factor: float | None,
    backward: str,
    use_calc_stream: bool,
) -> Any:
    out = like(x)
    return comm(ring_id).all_reduce(out, x, op=op, factor=factor, use_calc_stream=use_calc_stream)


def _fake(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return like(x)


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    ring_id, op, factor, backward, use_calc_stream = ctx.saved
    if op in ("max", "min", "prod"):
        raise ArgumentError(f"all_reduce with op={op!r} has no gradient; pass x.detach()")
    if backward == "all_reduce":
        grad = _registered_op(grad, ring_id, op, factor, backward, use_calc_stream)
    return grad, None, None, None, None, None


_registered_op = register(
    "all_reduce(Tensor x, int ring_id, str op, float? factor, str backward, bool use_calc_stream)"
    " -> Tensor",
    _run,
    _fake,
    setup=save(1, 2, 3, 4, 5),
    backward=_backward,
    vmap="any",
)
