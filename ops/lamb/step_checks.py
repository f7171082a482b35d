"""Checks of a step, made by the host without reading a tensor, before anything is launched."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from commlib.ops.lamb.lamb_rings import NAME
from commlib.ops.lamb.part import Part
from commlib.ops.lamb.settings import check_group, common_moments, is_number
from commlib.streams import sees_capture

Tensor = torch.Tensor
Groups = Sequence[Mapping[str, Any]]


def check_groups(ring: CommContext, groups: Groups, listed: Sequence[Tensor]) -> None:
    """Raise ``ArgumentError`` for a setting out of range, or other parameters than at construction.

    Args:
        ring: The ring, for the error text.
        groups: Parameter groups now.
        listed: All parameters at construction.
    """
    prefix = ring._describe(NAME)
    for number, group in enumerate(groups):
        check_group(prefix, number, group)
    common_moments(prefix, groups)
    now = [param for group in groups for param in group["params"]]
    same = len(now) == len(listed) and all(a is b for a, b in zip(now, listed, strict=True))
    if not same:
        raise ArgumentError(
            f"{prefix}: param_groups holds {len(now)} parameters, and not the {len(listed)} of the "
            f"constructor; expected these, in their order; create a new optimizer"
        )


def check_scale(ring: CommContext, role: str, value: Any) -> None:
    """Raise ``ArgumentError`` unless ``value`` is None, a number or a tensor of one element."""
    valid = value.numel() == 1 if isinstance(value, Tensor) else value is None or is_number(value)
    if not valid:
        actual = tuple(value.shape) if isinstance(value, Tensor) else repr(value)
        raise ArgumentError(
            f"{ring._describe(NAME)}: {role} is {actual}; expected a number, or a tensor of one "
            f"element; set optimizer.{role} = None"
        )


def settle(ring: CommContext, parts: Sequence[Part], order: Sequence[int]) -> None:
    """Put parameters that have left the flat buffers back, with the values that they have now.

    Raises:
        DtypeError, DeviceError, ShapeError: A parameter does not fit into its place any more.
        ArgumentError: A graph is being captured. Each replay would copy the values again.
    """
    for part in parts:
        detached = part.detached()
        for index in detached:
            _check_place(ring, part, index, order[part.first + index])
        if detached and sees_capture(part.values):
            number = order[part.first + detached[0]]
            raise ArgumentError(
                f"{ring._describe(NAME)}: parameter {number} is no longer a view of the flat "
                f"buffer, and a graph is being captured; expected the memory that the constructor "
                f"gave it; call optimizer.refresh_master() before the capture"
            )
        part.reattach(detached)


def _check_place(ring: CommContext, part: Part, place: int, number: int) -> None:
    param, values = part.params[place], part.values
    for name, actual, expected, error in (
        ("dtype", param.dtype, values.dtype, DtypeError),
        ("device", param.device, values.device, DeviceError),
        ("shape", tuple(param.shape), part.shapes[place], ShapeError),
    ):
        if actual != expected:
            raise error(
                f"{ring._describe(NAME)}: parameter {number} has {name} {actual}; expected "
                f"{expected}, as at construction; change the parameter back, or create a new "
                f"optimizer"
            )
