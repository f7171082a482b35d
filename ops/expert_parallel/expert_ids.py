"""What the helpers of expert parallelism refuse."""

import torch

from commlib.errors import ArgumentError, DtypeError, ShapeError

IDS = (torch.int32, torch.int64)


def check_ids(verb: str, role: str, ids: torch.Tensor, dims: int | None = 1) -> None:
    """Refuse what is no int32 or int64 tensor of ``dims`` dims; None allows any number."""
    check_tensor(verb, role, ids)
    if ids.dtype not in IDS:
        raise DtypeError(f"{verb}: {role} is {ids.dtype}; call {role}.long()")
    if dims is not None and ids.dim() != dims:
        raise ShapeError(f"{verb}: {role} has shape {tuple(ids.shape)}; expected {dims} dims")


def check_tensor(verb: str, role: str, given: torch.Tensor) -> None:
    """Refuse what is no tensor."""
    if not isinstance(given, torch.Tensor):
        raise ArgumentError(f"{verb}: {role} is {type(given).__name__}; expected a torch.Tensor")


def check_number(verb: str, role: str, given: int, low: int) -> None:
    """Refuse what is no whole number from ``low`` on."""
    if isinstance(given, bool) or not isinstance(given, int) or given < low:
        raise ArgumentError(f"{verb}: {role}={given!r}; expected a whole number >= {low}")
