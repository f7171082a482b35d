"""The arguments of a group's methods: option objects, and the shorter forms without them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.errors import ShapeError

Tensor = torch.Tensor


def listed(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of an argument that may be a single one, without their gradients."""
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    return [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]


def single(tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Return the one tensor of an argument.

    Raises:
        NotImplementedError: There are several, which stood for several devices of one process.
    """
    found = listed(tensors)
    if len(found) != 1:
        raise NotImplementedError(
            f"{len(found)} tensors in a list, one per device of this process: start one process "
            f"per device, and pass one tensor"
        )
    return found[0]


def parts(tensors: Sequence[Any]) -> list[Tensor]:
    """Return the tensors of an argument that may be a list in a list."""
    if tensors and not isinstance(tensors[0], Tensor):
        if len(tensors) != 1:
            raise NotImplementedError(
                f"{len(tensors)} lists of tensors, one per device of this process: start one "
                f"process per device, and pass one list"
            )
        tensors = tensors[0]
    return listed(tensors)


def check_count(ring: CommContext, collective: str, role: str, given: Sequence[Any]) -> None:
    """Refuse a list that has not one entry per rank."""
    if len(given) != ring.size:
        raise ShapeError(
            f"{ring._describe(collective)}: {role} are {len(given)}; expected one per rank, "
            f"{ring.size}"
        )


def check_sizes(
    ring: CommContext, collective: str, role: str, given: Sequence[Tensor], own: Sequence[Tensor]
) -> None:
    """Refuse tensors that have not as many elements as those of ``own``, one by one."""
    counts, expected = [x.numel() for x in given], [x.numel() for x in own]
    if counts != expected:
        raise ShapeError(
            f"{ring._describe(collective)}: {role} have {counts} elements; expected {expected}, "
            f"one tensor for each, as this rank's own tensor has"
        )


def options(kind: Any, given: Any, timeout: timedelta | None = None, **fields: Any) -> Any:
    """Return ``given`` if it holds options, else new ones of ``kind`` with these fields."""
    if hasattr(given, "asyncOp"):
        return given
    made = kind()
    for name, value in fields.items():
        if value is not None:
            setattr(made, name, value)
    if isinstance(given, timedelta):
        timeout = given
    if timeout is not None:
        made.timeout = timeout
    return made
