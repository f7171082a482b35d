"""Argument checks of the operators of expert parallelism."""

import torch

from commlib.core.tensors import has_memory
from commlib.core.validation import refuse_unreadable
from commlib.errors import ArgumentError, DtypeError, ShapeError

IDS = (torch.int32, torch.int64)


def check_ids(collective: str, role: str, ids: torch.Tensor, dims: int | None = 1) -> None:
    """Raise unless ``ids`` is an int32 or int64 tensor of ``dims`` dims; None allows any number."""
    check_readable(collective, role, ids)
    check_dtype(collective, role, ids)
    if dims is not None and ids.dim() != dims:
        raise ShapeError(f"{collective}: {role} has shape {tuple(ids.shape)}; expected {dims} dims")


def check_dtype(collective: str, role: str, ids: torch.Tensor) -> None:
    """Raise unless ``ids`` is a tensor of int32 or int64."""
    check_tensor(collective, role, ids)
    if ids.dtype not in IDS:
        raise DtypeError(f"{collective}: {role} is {ids.dtype}; pass {role}.long()")


def check_readable(collective: str, role: str, value: torch.Tensor) -> None:
    """Raise unless ``value`` is a tensor that can be read; a trace has no memory to look at."""
    check_tensor(collective, role, value)
    if not torch.compiler.is_compiling() and not has_memory(value):
        refuse_unreadable(collective, role, value)


def check_tensor(collective: str, role: str, value: torch.Tensor) -> None:
    """Raise unless ``value`` is a tensor."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"{collective}: {role} is {type(value).__name__}; expected a torch.Tensor"
        )


def check_number(collective: str, role: str, value: int, low: int) -> None:
    """Raise unless ``value`` is a whole number >= ``low``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ArgumentError(f"{collective}: {role}={value!r}; expected a whole number >= {low}")
