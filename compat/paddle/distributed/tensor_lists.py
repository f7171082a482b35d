"""Lists of tensors, which legacy collectives take where rings take one tensor."""

from collections.abc import Callable, Sequence
from functools import partial

import torch

from commlib.core.context import CommContext
from commlib.errors import ArgumentError, DtypeError, ShapeError

Tensor = torch.Tensor


def check_list(
    name: str, ring: CommContext, role: str, tensors: Sequence[Tensor], like: Tensor | None = None
) -> None:
    """Refuse a list that has not one tensor per rank, all of the shape and dtype of ``like``.

    Args:
        name: The legacy name, for messages.
        ring: The ring.
        role: The argument, for messages.
        tensors: The list.
        like: Default: shapes may differ.

    Raises:
        ArgumentError, ShapeError, DtypeError: Naming the first wrong entry.
    """
    start = f"{ring._describe(name)}: {role}"
    if not isinstance(tensors, (list, tuple)):
        raise ArgumentError(f"{start} is {type(tensors).__name__}; expected a list of tensors")
    if len(tensors) != ring.size:
        raise ArgumentError(
            f"{start} has {len(tensors)} entries; expected {ring.size}, one per rank of the group"
        )
    for index, one in enumerate(tensors):
        if not isinstance(one, Tensor):
            raise ArgumentError(f"{start}[{index}] is {type(one).__name__}; expected a tensor")
        first = tensors[0] if like is None else like
        if one.dtype != first.dtype:
            raise DtypeError(
                f"{start}[{index}] is {one.dtype}; expected {first.dtype}; pass "
                f"{role}[{index}].to({first.dtype})"
            )
        if like is not None and one.shape != like.shape:
            raise ShapeError(
                f"{start}[{index}] has shape {tuple(one.shape)}; expected {tuple(like.shape)} in "
                f"every entry"
            )


def joined(
    name: str, ring: CommContext, role: str, tensors: Tensor | Sequence[Tensor], like: Tensor
) -> Tensor:
    """Return one tensor of all entries of a list; a tensor is returned as it is.

    Raises:
        ArgumentError, ShapeError, DtypeError: As ``check_list``.
    """
    if isinstance(tensors, Tensor):
        return tensors.detach()
    check_list(name, ring, role, tensors, like)
    return torch.stack([one.detach() for one in tensors])


def parts_for(
    name: str, ring: CommContext, role: str, outputs: list[Tensor], like: Tensor
) -> Tensor:
    """Return a new tensor [size, …] that receives what ``delivery`` then brings to ``outputs``.

    Raises:
        ArgumentError, ShapeError, DtypeError: ``outputs`` is neither empty nor fits.
    """
    if not isinstance(like, Tensor):
        raise ArgumentError(
            f"{ring._describe(name)}: tensor is {type(like).__name__}; expected a torch.Tensor"
        )
    if not isinstance(outputs, list) or outputs:
        check_list(name, ring, role, outputs, like)
    return torch.empty((ring.size, *like.shape), dtype=like.dtype, device=like.device)


def delivery(outputs: list[Tensor], parts: Sequence[Tensor]) -> Callable[[], None] | None:
    """Put ``parts`` into an empty list at once; return the copy into the tensors of any other."""
    if outputs:
        return partial(_copy, [one.detach() for one in outputs], parts)
    outputs.extend(part.detach() for part in parts)  # autograd lets no view be written to
    return None


def _copy(outputs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for out, part in zip(outputs, parts, strict=True):
        out.copy_(part.view(out.shape))
