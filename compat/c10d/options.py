"""The arguments of a group's methods: option objects, and the shorter forms without them."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.tensors import is_symbolic
from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor


def duration(given: timedelta | float) -> timedelta:
    """Return a timeout that may be a number of seconds, as C++ takes it too."""
    return given if isinstance(given, timedelta) else timedelta(seconds=given)


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
    items = listed(tensors)
    if len(items) != 1:
        raise NotImplementedError(
            f"{len(items)} tensors in a list, one per device of this process: start one process "
            f"per device, and pass one tensor"
        )
    return items[0]


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


def distinct(ring: CommContext, name: str, outputs: list[Tensor]) -> list[Tensor]:
    """Return a list of outputs none of which is in it twice.

    Raises:
        ArgumentError: One is: its values would depend on timing.
    """
    dense = [x for x in outputs if x.layout is torch.strided and not is_symbolic(x)]
    places = [x.data_ptr() for x in dense if x.numel()]
    if len(set(places)) < len(places):
        raise ArgumentError(
            f"{ring._describe(name)}: a tensor is in the list of outputs twice; pass a tensor for "
            f"each rank"
        )
    return outputs


def check_rows(ring: CommContext, rows: list[list[Tensor]], own: list[Tensor]) -> None:
    """Refuse lists of outputs, one per rank, that do not fit this rank's own tensors."""
    if len(rows) != ring.size:
        raise ShapeError(
            f"{ring._describe('all_gather_coalesced')}: {len(rows)} lists of outputs; expected one "
            f"per rank, {ring.size}"
        )
    expected = [_kind(x) for x in own]
    for rank, row in enumerate(rows):
        actual = [_kind(x) for x in row]
        if actual != expected:
            raise ShapeError(
                f"{ring._describe('all_gather_coalesced')}: the outputs of rank {rank} have "
                f"{actual} elements; expected {expected}, as this rank's own tensors"
            )


def _kind(x: Tensor) -> str:
    return f"{x.numel()} {x.dtype} on {x.device}"


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
