"""The forms in which gradients of outputs come: kernels add up each of them in another order."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from commlib.core.tensors import is_wrapper
from commlib.graph.operators.layout import dims_in_memory, expanded_dims, expanded_zeros


class Form(NamedTuple):
    """A form of a gradient.

    Attributes:
        expanded: The dimensions along which it repeats its elements.
        order: The others in memory, from the longest step to the shortest; None if that is the
            order of the output's.
    """

    expanded: tuple[int, ...] = ()
    order: tuple[int, ...] | None = None


DENSE = Form()  # as the output, each element once


class GradientForms:
    """The forms of the gradients of some outputs.

    Gaps in memory do not count: each new form costs another backward graph.

    Attributes:
        every: The forms if all gradients are as their outputs.
    """

    def __init__(self, outs: Sequence[torch.Tensor]) -> None:
        self.every: tuple[Form | None, ...] = (DENSE,) * len(outs)
        metas = [torch.empty_like(x, device="meta") if _is_plain(x) else None for x in outs]
        self._strides = [None if x is None else x.stride() for x in metas]
        self._orders = [None if x is None else dims_in_memory(x) for x in metas]

    def of(self, grads: Sequence[torch.Tensor | None], *, dense: bool) -> tuple[Form | None, ...]:
        """Return the forms of gradients, None for those that are; ``dense``: all count as dense."""
        if dense:
            return tuple(None if grad is None else DENSE for grad in grads)
        return tuple(None if grad is None else self._form(i, grad) for i, grad in enumerate(grads))

    def _form(self, i: int, grad: torch.Tensor) -> Form:
        out_order = self._orders[i]
        if out_order is None or not _is_plain(grad) or grad.stride() == self._strides[i]:
            return DENSE
        if not grad.numel():
            return DENSE
        expanded, order = expanded_dims(grad), dims_in_memory(grad)
        return Form(expanded, None if order == _without(out_order, expanded) else order)


def zeros_of(out: torch.Tensor, form: Form) -> torch.Tensor:
    """Return zeros in the form of a gradient of an output."""
    return expanded_zeros(out, *form)


def _without(dims: tuple[int, ...], others: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dim for dim in dims if dim not in others)


def _is_plain(x: torch.Tensor) -> bool:
    return x.layout is torch.strided and not is_wrapper(x) and not x.is_nested
