"""Leaves in place of a verified call's arguments, and the way from its result back to these.

A verified call compares the gradients of a function with those of its graph. Gradients through the
history of an argument are not the function's: they may reach a weight that the function uses too.
So the function gets leaves. Where its own result counts, one node leads from there to the caller.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_unflatten

from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.leaves import (
    Tensors,
    gradients,
    leaf,
    leaves_of,
    with_grads,
    without_grads,
)
from commlib.graph.calls.output_kinds import Argument
from commlib.graph.calls.outputs import alias_of, flat, leads_back
from commlib.graph.replaying.nodes import all_run, retains


class StandIns:
    """Leaves with the memory of a call's tensors, for those that require grad.

    Attributes:
        leaves: One per tensor of the call.
    """

    def __init__(self, call: Arguments) -> None:
        self._call, self._ran = call, False
        self.leaves = with_grads([leaf(x) for x in call.tensors], call.tensors)

    def run(self, fn: Callable[..., Any]) -> Any:
        """Return ``fn`` of the leaves; of new ones from the second run on, without its hooks."""
        leaves = self.leaves
        if self._ran:
            leaves = [leaf(x) for x in self._call.tensors]
        self._ran = True
        pairs = zip(leaves, self._call.tensors, strict=True)
        same = all(new is x for new, x in pairs)
        args, kwargs = self._call.given if same else self._call.rebuilt(leaves)
        return fn(*args, **kwargs)

    def end(self) -> None:
        """Release the gradients that the leaves share with the call's tensors."""
        without_grads(self.leaves, self._call.tensors)

    def tied(self, results: Sequence[Any]) -> list[Any]:
        """Return ``results`` of the function with the call's tensors in place of the leaves."""
        flattened = [flat(result) for result in results]
        tensors = {id(x): x for leaves, _ in flattened for x in leaves if _wants_grad(x)}
        by_id = dict(
            zip(tensors, _tied([*tensors.values()], self.leaves, self._call.tensors), strict=True)
        )
        return [
            tree_unflatten([by_id.get(id(x), x) for x in leaves], spec)
            if any(by_id.get(id(x), x) is not x for x in leaves)
            else result
            for result, (leaves, spec) in zip(results, flattened, strict=True)
        ]


def _wants_grad(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _tied(outs: Tensors, leaves: Tensors, tensors: Tensors, *, shared: bool = False) -> Tensors:
    """Return ``outs``, computed from ``leaves``, as results of ``tensors``.

    Leaves and plain views of them become the tensors and views of these. One node joins the others.
    """
    results = [_alias(out, leaves, tensors) for out in outs]
    places = [i for i, x in enumerate(results) if x is outs[i] and leads_back(x)]
    reached = leaves_of(outs[i] for i in places)
    stand_for = {id(new): x for new, x in zip(leaves, tensors, strict=True) if new is not x}
    if any(id(x) in stand_for for x in reached):
        ends = [stand_for.get(id(x), x) for x in reached]
        history = _History([outs[i] for i in places], reached, ends, shared=shared)
        joined = _Tie.apply(history, *ends)  # type: ignore[no-untyped-call]
        for i, out in zip(places, joined, strict=True):
            results[i] = out
    return results


def _alias(out: torch.Tensor, leaves: Tensors, tensors: Tensors) -> torch.Tensor:
    """Return the tensor, or the view of it, that ``out`` is of a leaf; else ``out``."""
    kind = alias_of(out, leaves)
    if kind is None or leaves[kind.position] is tensors[kind.position]:
        return out
    tensor = tensors[kind.position]
    return tensor if isinstance(kind, Argument) else kind.of(tensor)


class _History:
    """Results, the leaves that they are computed from, and the tensors that these stand for."""

    def __init__(self, outs: Tensors, leaves: Tensors, ends: Tensors, *, shared: bool) -> None:
        """``shared``: whether another history has a part of the same autograd graph."""
        self.outs, self._leaves, self._ends, self._shared = outs, leaves, ends, shared

    def gradients(self, grads: Sequence[torch.Tensor | None], *, keep: bool) -> list[Any]:
        """Return the gradients of the ends, or None.

        ``keep``: whether another backward may follow.
        """
        coming = [(out, g) for out, g in zip(self.outs, grads, strict=True) if g is not None]
        outs, out_grads = [out for out, _ in coming], [g for _, g in coming]
        quiet = [new for new, x in zip(self._leaves, self._ends, strict=True) if new is x]
        if not torch.is_grad_enabled():
            keep = keep or self._shared
            return list(gradients(outs, self._leaves, out_grads, quiet=quiet, keep=keep))
        self._shared = True  # create_graph=True
        new = [leaf(g) for g in out_grads]
        in_grads = gradients(outs, self._leaves, new, quiet=quiet, create=True)
        defined = [x for x in in_grads if x is not None]
        tied = _tied(defined, [*self._leaves, *new], [*self._ends, *out_grads], shared=True)
        each = iter(tied)
        return [x if x is None else next(each) for x in in_grads]


class _Tie(torch.autograd.Function):
    """The node between results of leaves and the tensors that the leaves stand for."""

    @staticmethod
    def forward(ctx: Any, history: _History, *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results."""
        ctx.history = history
        ctx.set_materialize_grads(False)
        return tuple(out.detach() for out in history.outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the gradients of the tensors."""
        keep = retains() or not all_run(ctx.next_functions)
        return None, *ctx.history.gradients(grads, keep=keep)
