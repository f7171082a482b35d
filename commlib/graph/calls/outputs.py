"""Outputs of a captured function: graph memory, borrowed until the next replay."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from commlib.core.tensors import is_pending
from commlib.errors import GraphError
from commlib.graph.calls.lasting import Lasting, MadeObjects, hides
from commlib.graph.calls.leaves import source_of
from commlib.graph.calls.output_guard import LENT, OutputGuards
from commlib.graph.calls.output_kinds import (
    Again,
    Alias,
    Argument,
    Borrowed,
    Made,
    Output,
    PartOf,
    Plain,
    View,
    in_turn,
)
from commlib.graph.calls.views import apart, is_plain_view
from commlib.graph.operators.history import node_of
from commlib.graph.operators.layout import copy_of, is_packed
from commlib.graph.python.objects import unfold
from commlib.graph.python.user_names import kind_name

_PLAIN = (torch.Tensor, type(None))  # a result that is one leaf, as most are
_ONE = tree_flatten(None)[1]
Join = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def flat(result: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a result and its structure; a shape is one leaf, and stays a shape.

    Tensors in objects are leaves too.
    """
    if type(result) in _PLAIN:
        return [result], _ONE
    leaves, spec = tree_flatten(result, is_leaf=_is_shape)
    unfolded = [leaf if _is_shape(leaf) else unfold(leaf) for leaf in leaves]
    if any(one is not leaf for one, leaf in zip(unfolded, leaves, strict=True)):
        leaves, spec = tree_flatten(tree_unflatten(unfolded, spec), is_leaf=_is_shape)
    return [_awaited(leaf) for leaf in leaves], spec


def awaited(result: Any) -> Any:
    """Return a result in which nothing is pending."""
    if type(result) in _PLAIN:
        return result
    leaves, spec = tree_flatten(result, is_leaf=_is_shape)
    pending = any(isinstance(x, torch.Tensor) and is_pending(x) for x in leaves)
    return tree_unflatten([_awaited(x) for x in leaves], spec) if pending else result


def _is_shape(x: Any) -> bool:
    return isinstance(x, torch.Size)


def _awaited(leaf: Any) -> Any:
    """Wait for pending results of functional collectives, and return them."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and is_pending(leaf) else leaf


class Outputs:
    """The outputs of one captured call, and the borrowed ones that the program still holds."""

    def __init__(
        self,
        result: Any,
        given: Sequence[torch.Tensor],
        own: Callable[[torch.Tensor], bool],
        lasting: Lasting,
        *,
        copy: bool,
    ) -> None:
        """Store what replays return.

        Args:
            result: What the function has returned in the capture.
            given: The tensors of the call.
            own: Says whether a tensor's memory is the graph's.
            lasting: The objects of the program.
            copy: Whether tensors are copies.
        """
        leaves, self._spec = flat(result)
        self._copy, self._alone = copy, len(leaves) == 1 and leaves[0] is result
        self._kinds: list[Output] = []
        for i, leaf in enumerate(leaves):
            same = next((j for j in range(i) if leaf is leaves[j]), None)
            if same is not None and isinstance(self._kinds[same], Borrowed | Alias | PartOf):
                self._kinds.append(Again(same))
            else:
                self._kinds.append(_kind(leaf, given, own, lasting))
        self._borrowed = [i for i, kind in enumerate(self._kinds) if isinstance(kind, Borrowed)]
        parts = {i: kind for i, kind in enumerate(self._kinds) if isinstance(kind, PartOf)}
        self._parts = in_turn(parts) if parts else []
        self._again = [(i, kind.place) for i, kind in enumerate(self._kinds) if type(kind) is Again]
        self._leaves = [i for i in self._borrowed if cast(Borrowed, self._kinds[i]).leaf]
        made = {i: kind.value for i, kind in enumerate(self._kinds) if isinstance(kind, Made)}
        self._made, self._objects = (
            [*made],
            MadeObjects([*made.values()], lasting) if made else None,
        )
        self._guards = OutputGuards("output")
        self.any_borrowed = bool(self._borrowed)
        self._all_borrowed = len(self._borrowed) == len(leaves) and not self._leaves
        kind = self._kinds[0] if self._alone else None
        self._only = kind if isinstance(kind, Plain) else None

    def expire(self, event: str, line: object = None) -> None:
        """Make borrowed outputs of the last replay that are still held raise when read."""
        self._guards.expire(event, line)

    def release(self, event: str, line: object = None) -> None:
        """Release the graph's memory, which the next capture may use; ``expire`` what is held."""
        self.expire(event, line)
        self._kinds.clear()

    def give(
        self, given: Sequence[torch.Tensor], where: object = None, join: Join | None = None
    ) -> Any:
        """Return the outputs of the replay that was just launched.

        ``join`` gets those that the graph has made and returns them with their gradients.
        """
        if self._only is not None:  # the quick way for a function that returns None
            return self._only.value
        leaves = [self._one(i, given, where) for i in range(len(self._kinds))]
        if join is not None:
            joined = join([leaves[i] for i in self._borrowed])
            for i, leaf in zip(self._borrowed, joined, strict=True):
                leaves[i] = leaf
        if not self._all_borrowed:
            self._complete(leaves)
        return leaves[0] if self._alone else tree_unflatten(leaves, self._spec)

    def _complete(self, leaves: list[Any]) -> None:
        """Make of each leaf what the function returns, and put in what depends on other leaves."""
        for i in self._leaves:
            leaves[i].requires_grad_()
        if self._objects is not None:
            for i, x in zip(self._made, self._objects.again(), strict=True):
                leaves[i] = x
        for i, part in self._parts:
            leaves[i] = part.of(leaves[part.place])
        for i, source in self._again:
            leaves[i] = leaves[source]

    def made(self, result: Any) -> list[torch.Tensor]:
        """Return those leaves of ``result`` that ``join`` will be given."""
        leaves, _ = flat(result)
        return [leaves[i] for i in self._borrowed]

    def lent(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Return what shares the memory and the count of writes of the borrowed outputs.

        ``places``: those in ``made``. Copies share nothing.
        """
        guards, borrowed = self._guards.by_position, (self._borrowed[i] for i in places)
        return [guards[i].alias for i in borrowed if i in guards]

    def _one(self, i: int, given: Sequence[torch.Tensor], where: object) -> Any:
        kind = self._kinds[i]
        if type(kind) is Borrowed:
            if self._copy or kind.copied:
                return kind.tensor.clone() if kind.packed else copy_of(kind.tensor)
            return self._guards.borrow(i, kind.tensor, where)
        if isinstance(kind, Plain):
            return kind.value
        if isinstance(kind, Argument):
            return given[kind.position]
        if isinstance(kind, View):
            return kind.of(given[kind.position])
        if isinstance(kind, Alias):
            return kind.again()
        return None  # known when all are


def leads_back(tensor: Any) -> bool:
    """Return True if gradients flow through an output."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and node_of(tensor) is not None


def _kind(
    leaf: Any,
    given: Sequence[torch.Tensor],
    own: Callable[[torch.Tensor], bool],
    lasting: Lasting,
) -> Output:
    if isinstance(leaf, PartOf):
        return leaf
    if not isinstance(leaf, torch.Tensor):
        return Made(leaf) if lasting.misses(leaf) else Plain(leaf)
    position, alone = source_of(leaf, given), leaf.requires_grad and node_of(leaf) is None
    if position is None:
        if own(leaf):
            return Borrowed(leaf.detach(), is_packed(leaf), alone, type(leaf) not in LENT)
        made = leaf not in lasting and (alone or leaf.layout is torch.strided)
        return Alias(apart(leaf)) if made else Plain(leaf)
    tensor = given[position]
    if leaf is tensor:
        return Argument(position)
    offset = int(leaf.storage_offset() - tensor.storage_offset())
    detached = tensor.requires_grad and (alone or not leaf.requires_grad)
    return View(position, leaf.size(), leaf.stride(), offset, detached, alone)


def standing(
    leaf: Any,
    given: Sequence[torch.Tensor],
    own: Callable[[torch.Tensor], bool],
    lasting: Lasting,
) -> Any:
    """Return a leaf of a result in a form that each replay can hand out; in the capture.

    What is not a plain view of an argument becomes memory of the graph: other types over its bytes,
    what autograd reaches by other ways. Conjugates and negatives that are still to be computed are.
    Raises ``GraphError`` for an object that hides tensors of the graph.
    """
    if not isinstance(leaf, torch.Tensor):
        if hides(leaf, own):
            raise GraphError(
                f"an output is a {kind_name(leaf)}, in which no replay could put new "
                f"tensors; return the tensors themselves, or register the type with "
                f"torch.utils._pytree.register_pytree_node"
            )
        if lasting.misses(leaf):
            MadeObjects([leaf], lasting)  # can it be copied?
        return leaf
    position = source_of(leaf, given)
    if position is None:
        leaf = leaf.clone() if leaf._is_zerotensor() else leaf  # it has no memory to borrow
        return leaf.resolve_conj().resolve_neg() if own(leaf) else leaf
    if leaf is given[position] or is_plain_view(leaf, given[position]):
        return leaf
    return leaf.resolve_conj().resolve_neg().clone()


def alias_of(leaf: torch.Tensor, given: Sequence[torch.Tensor]) -> Argument | View | None:
    """Return which of ``given`` a leaf is, or is a plain view of, if any."""
    kind = _kind(leaf, given, lambda _: False, Lasting())
    if isinstance(kind, View) and not is_plain_view(leaf, given[kind.position]):
        return None
    return kind if isinstance(kind, Argument | View) else None
