"""The report of a ring: its state, its errors, and the carrier of a call."""

from typing import TypedDict

import torch

from commlib.core.ring import Ring
from commlib.core.validation import check_dtype
from commlib.engines.reduction_names import RingReduction, reduction_name
from commlib.engines.reductions import resolve_reduction
from commlib.errors import ArgumentError


class RingReport(TypedDict):
    """The state of a ring, its calls and its memory; see ``CommContext.report``."""

    ring_id: int
    engine: str
    ranks: list[int]
    rank: int
    size: int
    device: str
    state: str
    calls: int
    last: str | None
    communicator: bool
    bytes: int
    workspace_bytes: int
    errors: list[str]


def report(ring: Ring) -> RingReport:
    """Return the rows of ``CommContext.report``."""
    memory, fault = ring._engine.memory, ring._health.fault
    return {
        "ring_id": ring.ring_id,
        "engine": ring.engine,
        "ranks": list(ring.ranks),
        "rank": ring.rank,
        "size": ring.size,
        "device": str(ring.device),
        "state": fault or "ready",
        "calls": ring._calls,
        "last": ring._last,
        "communicator": fault is None and ring._engine.connected,
        "bytes": memory.communicator,
        "workspace_bytes": memory.workspace,
        "errors": errors(ring),
    }


def errors(ring: Ring) -> list[str]:
    """Return what went wrong so far, oldest first, and what the library reports now."""
    texts = ring._health.errors()
    if not ring._health.ended:
        try:
            ring._engine.check()
        except Exception as error:
            texts.append(f"{ring._describe('asynchronous error')}: {error}")
    return texts


def nccl_comm(ring: Ring) -> int:
    """Return the address of the ring's ``ncclComm_t``; see ``CommContext.nccl_comm``."""
    if ring._health.fault is not None:
        raise ring._health.unusable("nccl_comm")
    address = ring._engine.nccl_comm
    if address is None:
        raise ArgumentError(
            f"{ring._describe('nccl_comm')}: the ring has no NCCL communicator; expected engine "
            f"nccl, several ranks, and a call of ring.connect() on every member"
        )
    return address


def explain(ring: Ring, nbytes: int, dtype: torch.dtype, op: RingReduction) -> str:
    """Return what carries an all_reduce, and why; see ``CommContext.explain``."""
    prefix = ring._describe("explain")
    check_dtype(ring, "explain", dtype)
    if not hasattr(nbytes, "__index__"):
        raise ArgumentError(
            f"{prefix}: nbytes={nbytes!r}; expected a number of bytes; pass x.nbytes"
        )
    op = reduction_name(op)
    factor = 1.0 if op == "premul_sum" else None
    try:
        reduction = resolve_reduction(dtype, op, ring._engine.reducer, factor)
    except ArgumentError as error:
        raise type(error)(f"{prefix}: {error}") from None
    if nbytes < 0 or nbytes % dtype.itemsize:
        raise ArgumentError(
            f"{prefix}: nbytes={nbytes}: expected a multiple of {dtype.itemsize}, the bytes of one "
            f"{dtype}"
        )
    if ring._health.fault is not None:
        return f"nothing: the ring can't be used: {ring._health.fault}"
    if nbytes == 0 or ring.size == 1:
        return f"nothing is sent: {'a ring of one rank' if nbytes else 'no bytes'}"
    return ring._engine.explain(nbytes, reduction)
