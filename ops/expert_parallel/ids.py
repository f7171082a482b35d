"""Argument checks of the operators of expert parallelism."""

import torch

from commlib.errors import ArgumentError, DtypeError, ShapeError

IDS = (torch.int32, torch.int64)


def check_ids(collective: str, role: str, ids: torch.Tensor, dims: int | None = 1) -> None:
    """Raise unless ``ids`` is an int32 or int64 tensor of ``dims`` dims; None allows any number."""
    check_tensor(collective, role, ids)
    if ids.dtype not in IDS:
        raise DtypeError(f"{collective}: {role} is {ids.dtype}; pass {role}.long()")
    if dims is not None and ids.dim() != dims:
        raise ShapeError(f"{collective}: {role} has shape {tuple(ids.shape)}; expected {dims} dims")


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
