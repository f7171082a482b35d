"""Argument checks of ``expert_dispatch`` and ``expert_combine``, before anything is launched."""

from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.validation import check_tensor
from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.expert_parallel.handle import ExpertHandle
from commlib.ops.expert_parallel.ids import check_dtype, check_number
from commlib.ops.expert_parallel.ids import check_tensor as check_tensor_type
from commlib.p2p.experts.tables import GROUP, Choices, local_experts

Tensor = torch.Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ON_OVERFLOW = ("error", "drop")
_MOST_ROWS = 2**30 - 1  # a link has 31 bits: 1 + a row, and one for the first row


def check_options(
    collective: str, num_experts: int, capacity: int, quantize: str | None, on_overflow: str
) -> None:
    """Raise for an invalid number or option."""
    check_number(collective, "num_experts", num_experts, 1)
    check_number(collective, "capacity", capacity, 1)
    if quantize not in (None, "fp8"):
        raise ArgumentError(f"{collective}: quantize={quantize!r}; expected None or 'fp8'")
    if on_overflow not in _ON_OVERFLOW:
        raise ArgumentError(
            f"{collective}: on_overflow={on_overflow!r}; expected 'error' or 'drop'"
        )


def ids_of(collective: str, expert_ids: Tensor) -> Tensor:
    """Return the ids as [tokens, top_k]."""
    check_dtype(collective, "expert_ids", expert_ids)
    return _columns(collective, "expert_ids", expert_ids)


def weights_of(collective: str, weights: Tensor | None) -> Tensor | None:
    """Return the weights as float32 [tokens, top_k]."""
    if weights is None:
        return None
    check_tensor_type(collective, "weights", weights)
    if not weights.is_floating_point():
        raise DtypeError(f"{collective}: weights is {weights.dtype}; pass weights.float()")
    return _columns(collective, "weights", weights).float()


def _columns(collective: str, role: str, value: Tensor) -> Tensor:
    """Return [tokens, top_k]; a 1-D tensor has top_k 1."""
    if value.dim() not in (1, 2):
        raise ShapeError(
            f"{collective}: {role} has shape {tuple(value.shape)}; expected [tokens, top_k] or "
            f"[tokens]"
        )
    return value.unsqueeze(1) if value.dim() == 1 else value


def check_dispatch(
    ring: CommContext,
    collective: str,
    x: Tensor,
    choices: Choices,
    num_experts: int,
    capacity: int,
    fp8: bool,
) -> None:
    """Raise for tensors of a dispatch that do not fit each other or the ring."""
    prefix, (ids, weights, active) = ring._describe(collective), choices
    check_tensor(ring, collective, "x", x)
    check_tensor(ring, collective, "expert_ids", ids)
    _check_float(prefix, "x", x)
    if x.dim() != 2:
        raise ShapeError(f"{prefix}: x has shape {tuple(x.shape)}; expected [tokens, width]")
    if ids.shape[0] != x.shape[0] or ids.shape[1] < 1:
        raise ShapeError(
            f"{prefix}: expert_ids has shape {tuple(ids.shape)}; expected [{x.shape[0]}, top_k], "
            f"the tokens of x, with top_k >= 1"
        )
    if weights is not None:
        check_tensor(ring, collective, "weights", weights)
        if weights.shape != ids.shape:
            raise ShapeError(
                f"{prefix}: weights has shape {tuple(weights.shape)}; expected "
                f"{tuple(ids.shape)}, the shape of expert_ids"
            )
    _check_active(ring, collective, active)
    if fp8 and x.shape[1] % GROUP:
        raise ShapeError(
            f"{prefix}: x has width {x.shape[1]} with quantize='fp8'; expected a multiple of "
            f"{GROUP}; pad the rows"
        )
    check_rows(prefix, capacity, local_experts(num_experts, ring.size))


def check_rows(prefix: str, capacity: int, experts: int) -> None:
    """Raise for more rows than the links between rows can count: ``experts`` of a rank."""
    rows = experts * capacity
    if rows > _MOST_ROWS:
        raise ArgumentError(
            f"{prefix}: capacity={capacity} makes {rows} rows on a rank; expected at most "
            f"{_MOST_ROWS}; pass a smaller capacity"
        )


def _check_active(ring: CommContext, collective: str, active: Tensor | None) -> None:
    """Raise unless the mask is None or has one bool or uint8 per rank."""
    if active is None:
        return
    check_tensor(ring, collective, "active", active)
    prefix = ring._describe(collective)
    if active.dtype not in (torch.bool, torch.uint8):
        raise DtypeError(f"{prefix}: active is {active.dtype}; pass active.bool()")
    if tuple(active.shape) != (ring.size,):
        raise ShapeError(
            f"{prefix}: active has shape {tuple(active.shape)}; expected [{ring.size}], one "
            f"element per rank of the ring"
        )


def check_handle(collective: str, handle: Any) -> None:
    """Raise unless ``handle`` is a handle of a dispatch."""
    if not isinstance(handle, ExpertHandle):
        raise ArgumentError(
            f"{collective}: handle is {type(handle).__name__}; expected the handle that "
            f"ops.expert_dispatch returns"
        )


def check_combine(ring: CommContext, collective: str, y: Tensor, count: int, capacity: int) -> None:
    """Raise unless ``y`` has the rows of the handle: [count, capacity, width]."""
    prefix = ring._describe(collective)
    check_tensor(ring, collective, "y", y)
    _check_float(prefix, "y", y)
    if y.dim() != 3 or tuple(y.shape[:2]) != (count, capacity):
        raise ShapeError(
            f"{prefix}: y has shape {tuple(y.shape)}; expected [{count}, {capacity}, width], the "
            f"experts of a rank and the capacity of the handle"
        )


def _check_float(prefix: str, role: str, value: Tensor) -> None:
    if value.dtype not in FLOATS:
        raise DtypeError(
            f"{prefix}: {role} is {value.dtype}; expected bfloat16, float16, float32 or float64; "
            f"pass {role}.float()"
        )
