"""Forms of what pipeline stages exchange: shapes, dtypes and gradients, as one message."""

from typing import NamedTuple

import torch

from commlib.compat.paddle.dtypes import CODES
from commlib.core.context import CommContext
from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor
Tensors = Tensor | tuple[Tensor, ...] | None
LENGTH = 128  # numbers in a message
_NUMBERS = {dtype: number for number, dtype in CODES.items()}


class Form(NamedTuple):
    """Shapes, dtypes and requires_grad of what a stage sends, and whether it is a tuple."""

    is_tuple: bool
    parts: tuple[tuple[torch.dtype, bool, tuple[int, ...]], ...]

    def numbers(self) -> list[int]:
        """Return the form as numbers; ``read`` is the inverse."""
        numbers = [int(self.is_tuple), len(self.parts)]
        for dtype, has_grad, shape in self.parts:
            numbers += [_NUMBERS[dtype], int(has_grad), len(shape), *shape]
        return numbers

    def message(self, device: torch.device) -> Tensor:
        """Return the numbers with zeros after them, as long as every message."""
        numbers = self.numbers()
        return torch.tensor(numbers + [0] * (LENGTH - len(numbers)), device=device)

    def fits(self, known: "Form") -> bool:
        """Return True if the other stage, which knows ``known``, can receive this form.

        What required grad in training need not in evaluation; the reverse would lose gradients.
        """
        if self.is_tuple != known.is_tuple or len(self.parts) != len(known.parts):
            return False
        return all(
            part[::2] == other[::2] and part[1] <= other[1]
            for part, other in zip(self.parts, known.parts, strict=True)
        )

    def has_grad(self) -> bool:
        """Return True if gradients come back for it."""
        return any(has_grad for _, has_grad, _ in self.parts)

    def gradients(self) -> "Form":
        """Return the form of the gradients, which some tensors of a tuple lack."""
        parts = [part for part in self.parts if part[1] or not self.is_tuple]
        return Form(self.is_tuple, tuple((dtype, False, shape) for dtype, _, shape in parts))

    def new(self, device: torch.device) -> Tensors:
        """Return empty tensors."""
        made = tuple(
            torch.empty(shape, dtype=dtype, device=device, requires_grad=has_grad)
            for dtype, has_grad, shape in self.parts
        )
        return made if self.is_tuple else made[0]


def listed(tensors: Tensors) -> tuple[Tensor, ...]:
    """Return the tensors of what one call sends or receives."""
    if tensors is None:
        return ()
    return tuple(tensors) if isinstance(tensors, (tuple, list)) else (tensors,)


def form_of(ring: CommContext, tensors: Tensors) -> Form:
    """Return the form of what a stage sends.

    Raises:
        ArgumentError: It is neither a tensor nor a tuple of tensors.
        ShapeError: A message can't hold it.
    """
    name, every = ring._describe("P2pHelper"), listed(tensors)
    wrong = [type(one).__name__ for one in every if not isinstance(one, Tensor)]
    wrong += [str(one.dtype) for one in every if not wrong and one.dtype not in _NUMBERS]
    if wrong:
        raise ArgumentError(
            f"{name}: sends {wrong}; expected a tensor or a tuple of tensors, of dtypes "
            f"{[str(dtype) for dtype in _NUMBERS]}"
        )
    parts = tuple((one.dtype, one.requires_grad, tuple(one.shape)) for one in every)
    form = Form(isinstance(tensors, (tuple, list)), parts)
    if len(form.numbers()) > LENGTH:
        raise ShapeError(
            f"{name}: the output has {len(every)} tensors, whose shapes need "
            f"{len(form.numbers())} numbers; expected at most {LENGTH}; send fewer tensors"
        )
    return form


def read(numbers: list[int]) -> Form:
    """Return the form that another stage has sent."""
    is_tuple, count, *rest = numbers
    parts = []
    for _ in range(count):
        code, has_grad, dims, *rest = rest
        parts.append((CODES[code], bool(has_grad), tuple(rest[:dims])))
        rest = rest[dims:]
    return Form(bool(is_tuple), tuple(parts))
