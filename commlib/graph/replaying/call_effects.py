"""Changes outside a call that its graphs, and copies to its arguments, make."""

from collections.abc import Sequence
from typing import Any

import torch

from commlib.graph.calls.bindings import Bindings
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.recording.inputs import Inputs
from commlib.graph.recording.recorded_call import Bound, Recipe
from commlib.graph.recording.segments import Segments
from commlib.graph.watching.effects import Effects


class CallEffects:
    """The effects of one captured call; they are the same at each call with the same memory.

    Attributes:
        gives: Whether each replay gives the program more than outputs.
    """

    def __init__(self, inputs: Inputs, recipe: Recipe, grads: Bound, bindings: Bindings) -> None:
        """Store the call.

        Args:
            inputs: Where it reads its arguments.
            recipe: How it was recorded.
            grads: The gradients that it gives to leaves.
            bindings: The names that each call binds.
        """
        self._inputs, self._rooms, self._copy = inputs, recipe.rooms, recipe.copy
        self._grads = grads
        self._leaves = [leaf for leaf, _ in grads]
        broken = recipe.findings.broken  # an eager part may write to an argument
        self.gives = bool(inputs.touched.written or grads or bindings.names or broken)
        self._known: dict[Any, Effects] = {}  # of a backward or a call, and of how many graphs

    def give(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write to arguments and gradients what a replay has computed for them."""
        self._inputs.give_back(tensors)
        for owner, grad in self._grads:
            if owner.grad is not grad or self._copy:
                owner.grad = grad.clone() if self._copy and grad is not None else grad

    def of(self, call: Arguments | None, graphs: Sequence[Segments]) -> Effects:
        """Return what ``graphs`` change in a call; a backward has no ``call``."""
        kind = call is None, len(graphs)
        written = [] if call is None else self._inputs.touched.written
        pointers = self._inputs.pointers
        if call is not None and any(call.tensors[i].data_ptr() != pointers[i] for i in written):
            return self._effects(call, graphs)  # of tensors that are given this once
        if kind not in self._known:
            self._known[kind] = self._effects(call, graphs)
        return self._known[kind]

    def _effects(self, call: Arguments | None, graphs: Sequence[Segments]) -> Effects:
        recorders = [recorder for segments in graphs for recorder in segments.recorders]
        generators = {id(x): x for each in recorders for x in each.random.generators.values()}
        return Effects(self.writes(call, graphs).values(), generators.values(), self._leaves)

    def writes(self, call: Arguments | None, graphs: Sequence[Segments]) -> dict[int, torch.Tensor]:
        """Return the memory of the program that ``graphs`` write, as a tensor each."""
        rooms = (x for x in (*self._inputs.copies.values(), *self._rooms) if x is not None)
        buffer_keys = {x.untyped_storage()._cdata for x in rooms}
        memories = [each.memory for segments in graphs for each in segments.recorders]
        tensors = {key: memory.externals[key] for memory in memories for key in memory.written}
        written = self._inputs.touched.written
        args = [] if call is None else [call.tensors[i].detach() for i in written]
        tensors |= {x.untyped_storage()._cdata: x for x in args}
        return {
            key: each
            for key, each in tensors.items()
            if key not in buffer_keys and not any(segments.made(key) for segments in graphs)
        }
