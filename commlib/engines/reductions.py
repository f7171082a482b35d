"""The form in which each dtype travels, its reductions, and the reason for each error."""

from difflib import get_close_matches
from functools import cache
from typing import Any, NamedTuple

import torch

from commlib.engines.reduction_names import BITWISE, NAMES, OPS, is_torch_reduction
from commlib.errors import ArgumentError, DtypeError, ReductionError

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
UNSIGNED = {torch.uint32: torch.int32, torch.uint64: torch.int64}
_COMPLEX = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_OTHER_NAMES = {
    "mean": "avg",
    "average": "avg",
    "mul": "prod",
    "and": "band",
    "or": "bor",
    "xor": "bxor",
}
_BOOL_OPS = {"sum": "max", "max": "max", "prod": "min", "min": "min"}
_BOOL_OPS |= {"band": "min", "bor": "max", "bxor": "bxor"}

# Dtypes that every engine takes as they are; anything else is moved as bytes.
NATIVE = frozenset(_FLOATS + _INTEGERS)


class ReductionSpec(NamedTuple):
    """A reduction as the engine sees it: the dtype to view the tensor as, and the operation."""

    dtype: torch.dtype
    op: str
    factor: float = 1.0


class Reducer(NamedTuple):
    """The reductions of an engine beyond the common set."""

    name: str
    unsigned: bool
    bitwise: bool = False


@cache
def _refusal(dtype: torch.dtype, op: str, reducer: Reducer) -> str | None:
    if dtype in (torch.int16, torch.uint16):
        return "no engine reduces 16-bit integers; cast to torch.int32"
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return "8-bit floats can be moved but not reduced; cast to torch.bfloat16"
    if op in BITWISE:
        if not reducer.bitwise:
            return (
                f"the {reducer.name} engine has no bitwise reduction on this device; call "
                f"all_gather and combine the parts with torch.bitwise_{op.removeprefix('b')}"
            )
        integral = not (dtype.is_floating_point or dtype.is_complex)
        return None if integral else "bitwise reductions take integers and booleans"
    if op == "premul_sum":
        floats = "premul_sum takes floating-point tensors; multiply first and use op='sum'"
        return None if dtype in _FLOATS else floats
    if dtype is torch.bool:
        return "the mean of booleans is not a boolean; cast to a float" if op == "avg" else None
    if dtype in _COMPLEX:
        return None if op in ("sum", "avg") else f"{op} of complex numbers is not done in parts"
    if dtype in UNSIGNED and op in ("max", "min") and not reducer.unsigned:
        return f"the {reducer.name} engine has no unsigned {op}; cast to torch.int64"
    if dtype in UNSIGNED or dtype in NATIVE:
        return None
    return "no engine reduces it; cast to torch.float32"


def unknown(op: Any) -> str:
    """Return why ``op`` is not a reduction."""
    valid = ", ".join(OPS + BITWISE)
    if is_torch_reduction(op):
        op = f"{getattr(op, 'op', op)} of torch.distributed"
        return f"op is {op}; expected one of {valid}; pass op='premul_sum', factor=... for its like"
    name = op.lower() if isinstance(op, str) else ""
    near = [*get_close_matches(_OTHER_NAMES.get(name, name), OPS + BITWISE, 1), "sum"][0]
    return f"op={op!r:.80} is not a reduction; expected one of {valid}; pass op={near!r}"


def resolve_reduction(
    dtype: torch.dtype, op: str, reducer: Reducer, factor: float | None = None
) -> ReductionSpec:
    """Return how ``op`` over ``dtype`` is handed to an engine.

    bool travels as uint8 with SUM meaning OR; complex as its real parts; uint32 and uint64 as the
    signed integer of the same width where only sums and products are asked (two's complement).
    An unknown ``op``, or a factor that is not a number, raises ``ArgumentError``. A refusal raises
    ``DtypeError`` with its reason, and ``ReductionError`` where no dtype has ``op``.
    """
    if not isinstance(op, str) or op not in NAMES:
        raise ArgumentError(unknown(op))
    if (op == "premul_sum") != (factor is not None):
        if factor is None:
            raise ArgumentError(
                f"op={op!r} without its factor; expected a number; pass factor=, or multiply first "
                f"and pass op='sum' where a call has no factor="
            )
        raise ArgumentError(
            f"op={op!r} with factor={factor!r:.80}: no other reduction has a factor; pass "
            f"op='premul_sum', or leave factor= away"
        )
    reason = _refusal(dtype, op, reducer)
    if reason:
        lacks = op in BITWISE and not reducer.bitwise  # for every dtype
        kind = ReductionError if lacks else DtypeError
        raise kind(f"{op} of {dtype} is refused: {reason}")
    if dtype is torch.bool:
        return ReductionSpec(torch.uint8, _BOOL_OPS[op])
    if dtype in _COMPLEX:
        return ReductionSpec(_COMPLEX[dtype], op)
    if dtype in UNSIGNED and not reducer.unsigned:
        return ReductionSpec(UNSIGNED[dtype], op)
    return ReductionSpec(dtype, op, 1.0 if factor is None else _number(factor))


def _number(factor: Any) -> float:
    """Return the factor of a premul_sum as a float."""
    try:
        if not isinstance(factor, str):
            return float(factor)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: many elements
        pass
    raise ArgumentError(f"factor={factor!r:.80}: expected a number that a float can hold")


def factor_of(reduction: ReductionSpec) -> torch.Tensor | None:
    """Return the factor of a premul_sum as NCCL has it, rounded to the tensors' dtype; or None."""
    if reduction.op != "premul_sum":
        return None
    return torch.tensor(reduction.factor, dtype=reduction.dtype, device="cpu")


def refusals(reducer: Reducer) -> dict[tuple[torch.dtype, str], str]:
    """Return every refused (dtype, op) of an engine with its reason."""
    dtypes = (*_FLOATS, *_INTEGERS, *UNSIGNED, *_COMPLEX, torch.bool, torch.int16, torch.uint16)
    small = (torch.float8_e4m3fn, torch.float8_e5m2)
    reasons = {(d, op): _refusal(d, op, reducer) for d in dtypes + small for op in OPS}
    return {key: reason for key, reason in reasons.items() if reason}
