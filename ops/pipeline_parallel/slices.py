"""The equal slices of a flattened tensor, without a copy of the rest."""

import torch

from commlib.core.manager import comm
from commlib.errors import ArgumentError, ShapeError


def bounds(collective: str, x: torch.Tensor, ring_id: int, num: int, id: int) -> tuple[int, int]:
    """Return the first and the last element, exclusive, of slice ``id`` of ``num``.

    Raises ``ArgumentError`` for a slice that does not exist, ``ShapeError`` for unequal slices.
    """
    for role, value, low, high in (("num", num, 1, None), ("id", id, 0, num)):
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if not is_integer or value < low or (high is not None and value >= high):
            limit = "1 or above" if high is None else f"0 to num - 1 (num={num})"
            raise ArgumentError(
                f"{_prefix(collective, ring_id)}: {role}={value!r}; expected {limit}"
            )
    count = x.numel()
    if count % num:
        raise ShapeError(
            f"{_prefix(collective, ring_id)}: the {count} elements of shape {tuple(x.shape)} do "
            f"not divide into num={num} slices; pad it, or pass num=1"
        )
    return count // num * id, count // num * (id + 1)


def slice_views(x: torch.Tensor, first: int, last: int) -> list[torch.Tensor]:
    """Return views that hold the elements ``first`` to ``last``, exclusive, of flattened ``x``.

    One view if the strides allow it, else at most two blocks per dimension, in order.
    """
    if x.is_contiguous():
        return [x.view(-1)[first:last]]
    if first == last or x.dim() == 1:
        return [x.new_empty(0) if first == last else x[first:last]]
    row = x[0].numel()
    top, end = -(-first // row), last // row  # the complete rows
    if top > end:
        return slice_views(x[end], first - end * row, last - end * row)
    before = slice_views(x[top - 1], first - (top - 1) * row, row) if first % row else []
    after = slice_views(x[end], 0, last - end * row) if last % row else []
    return [*before, *([x[top:end]] if top < end else []), *after]


def joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Return all views as one tensor: a single view itself, else a copy."""
    return parts[0] if len(parts) == 1 else torch.cat([part.reshape(-1) for part in parts])


def fill(parts: list[torch.Tensor], values: torch.Tensor) -> None:
    """Write the 1-D ``values`` into the views."""
    lengths = [part.numel() for part in parts]
    for part, value in zip(parts, values.split(lengths), strict=True):
        part.copy_(value.view(part.shape))


def _prefix(collective: str, ring_id: int) -> str:
    return collective if torch.compiler.is_compiling() else comm(ring_id)._describe(collective)
