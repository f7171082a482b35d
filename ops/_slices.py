"""The equal slices of a flattened tensor."""

import torch

from commlib._manager import comm
from commlib.errors import ArgumentError, ShapeError


def bounds(verb: str, x: torch.Tensor, ring_id: int, num: int, id: int) -> tuple[int, int]:
    """Return the first and the last element, exclusive, of slice ``id`` of ``num``.

    Raises ``ArgumentError`` for a slice that there is not, ``ShapeError`` for unequal ones.
    """
    for role, given, low, high in (("num", num, 1, None), ("id", id, 0, num)):
        whole = isinstance(given, int) and not isinstance(given, bool)
        if not whole or given < low or (high is not None and given >= high):
            limit = "1 or above" if high is None else f"0 to num - 1 (num={num})"
            raise ArgumentError(f"{_where(verb, ring_id)}: {role}={given!r}; expected {limit}")
    count = x.numel()
    if count % num:
        raise ShapeError(
            f"{_where(verb, ring_id)}: the {count} elements of shape {tuple(x.shape)} do not "
            f"divide into num={num} slices; pad it, or type num=1"
        )
    return count // num * id, count // num * (id + 1)


def _where(verb: str, ring_id: int) -> str:
    return verb if torch.compiler.is_compiling() else comm(ring_id).where(verb)
