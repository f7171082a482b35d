"""Reductions in NCCL's own numbers, and the push kernels that may carry them instead."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from commlib.engines.libnccl import raw
from commlib.engines.reductions import ReductionSpec
from commlib.errors import EngineError
from commlib.p2p import kernel_table
from commlib.p2p.push_collectives import PushCollective

# ncclDataType_t and ncclRedOp_t (nccl.h); CuPy's own constants stop before the 8-bit floats.
BYTES = 0
TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.uint32: 3,
    torch.int64: 4,
    torch.uint64: 5,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_KNOWN_FACTORS = 64


@dataclass(frozen=True, eq=False)  # equal by identity: a key at every call
class Reduction:
    """The form in which NCCL gets a reduction, and the kernels that may carry it instead."""

    name: str
    parts: int  # elements of the reduction for each element of the tensor
    kind: int
    op: int
    all_reduce: PushCollective | None = None
    reduce_scatter: PushCollective | None = None
    premul: ReductionSpec | None = None  # a premul_sum, whose operation NCCL makes for each call


@lru_cache(_KNOWN_FACTORS)
def scaled(spec: ReductionSpec, sign: float) -> Reduction:
    """Return a premul_sum; for each of the last factors the same object, the key of the call log.

    ``sign``: that of the factor: 0.0 and -0.0 are equal.
    """
    return Reduction(spec.op, 1, TYPES[spec.dtype], 0, premul=spec)


@contextmanager
def premul(where: str, comm: Any, reduction: ReductionSpec) -> Iterator[Reduction]:
    """ncclRedOpCreatePreMulSum, which CuPy lacks; NCCL releases it when the call returns.

    Args:
        where: The start of an error text.
        comm: NCCL's communicator, a pointer.
        reduction: The reduction with its factor.
    """
    nccl = raw()
    scalar = torch.tensor([reduction.factor], dtype=reduction.dtype, device="cpu")
    op, host_immediate, kind = ctypes.c_int(), 1, TYPES[reduction.dtype]
    status = nccl.ncclRedOpCreatePreMulSum(
        ctypes.byref(op), scalar.data_ptr(), kind, host_immediate, comm
    )
    if status != 0:
        raise EngineError(f"{where}: ncclRedOpCreatePreMulSum: {status}")
    try:
        yield Reduction(reduction.op, 1, kind, op.value)
    finally:
        nccl.ncclRedOpDestroy(op, comm)


def explain(
    closed: str | None, reduction: ReductionSpec, nbytes: int, size: int, *, connected: bool
) -> str:
    """Return what carries an all_reduce of so many bytes: the table's push kernel, or NCCL.

    ``closed``: why the ring has no push kernels; None if it has.
    """
    reason = closed or kernel_table.refusal(reduction.dtype, reduction.op)
    row = None if reason else kernel_table.select_kernel("all_reduce", nbytes, size)
    if row is None:
        reason = reason or f"the table leaves {nbytes} bytes over {size} ranks to it"
        return _by_nccl(reason, connected)
    threads = kernel_table.shape(row, nbytes // kernel_table.VECTOR, size)[1]
    return (
        f"{row.kernel} push: the table's row for up to {row.most} bytes over {size} "
        f"ranks, {threads} threads per block and at most {row.blocks} blocks"
    )


def _by_nccl(why: str, connected: bool) -> str:
    """Say that NCCL carries a call, and what its first call will take."""
    if connected:
        return f"NCCL: {why}"
    return (
        f"NCCL: {why}; the ring has no NCCL communicator yet: the first such call makes it, "
        f"which blocks the host and takes GPU memory (several hundred MiB), or call "
        f"ring.connect() on every member"
    )
