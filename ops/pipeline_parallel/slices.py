"""The equal slices of a flattened tensor, without a copy of the rest."""

import torch

from commlib.core.manager import comm
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
            f"divide into num={num} slices; pad it, or pass num=1"
        )
    return count // num * id, count // num * (id + 1)


def pieces(x: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
    """Return views that hold the elements ``first`` to ``last``, exclusive, of flattened ``x``.

    One view where the strides allow it, else at most two blocks a dimension, in order.
    """
    if x.is_contiguous():
        return [x.view(-1)[first:last]]
    if first == last or x.dim() == 1:
        return [x.new_empty(0) if first == last else x[first:last]]
    row = x[0].numel()
    top, end = -(-first // row), last // row  # the whole rows
    if top > end:
        return pieces(x[end], first - end * row, last - end * row)
    before = pieces(x[top - 1], first - (top - 1) * row, row) if first % row else []
    behind = pieces(x[end], 0, last - end * row) if last % row else []
    return [*before, *([x[top:end]] if top < end else []), *behind]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return all pieces as one tensor: the only one itself, else a copy."""
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def fill(parts: list[torch.Tensor], values: torch.Tensor) -> None:
    """Write the 1-D ``values`` into the pieces."""
    lengths = [part.numel() for part in parts]
    for part, own in zip(parts, values.split(lengths), strict=True):
        part.copy_(own.view(part.shape))


def _where(verb: str, ring_id: int) -> str:
    return verb if torch.compiler.is_compiling() else comm(ring_id)._describe(verb)
