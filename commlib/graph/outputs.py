"""What a captured function returns: the same memory at every replay, lent until the next."""

import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from io import IOBase
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from commlib.core.tensors import is_pending
from commlib.errors import GraphError
from commlib.graph.objects import unfold


class Argument(NamedTuple):
    """The caller's own tensor, handed back."""

    position: int


class View(NamedTuple):
    """A view of one of the caller's tensors."""

    position: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from that tensor's first element on
    detached: bool

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it of the tensor that this call was given."""
        source = tensor.detach() if self.detached else tensor
        return source.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


class Again(NamedTuple):
    """The very tensor of an earlier place."""

    place: int


class Borrowed(NamedTuple):
    """Memory of the graph, to be overwritten by its next replay."""

    tensor: torch.Tensor


class Plain(NamedTuple):
    """Anything else: no tensor, or one that lives outside."""

    value: Any


Output = Argument | View | Again | Borrowed | Plain
Join = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def flat(result: Any) -> tuple[list[Any], TreeSpec]:
    """Return the leaves of a result and its structure; a shape is one leaf, and stays a shape.

    Tensors in objects are leaves too.
    """
    leaves, spec = tree_flatten(result, is_leaf=_is_shape)
    unfolded = [leaf if _is_shape(leaf) else unfold(leaf) for leaf in leaves]
    if any(one is not leaf for one, leaf in zip(unfolded, leaves, strict=True)):
        leaves, spec = tree_flatten(tree_unflatten(unfolded, spec), is_leaf=_is_shape)
    return [_awaited(leaf) for leaf in leaves], spec


def awaited(result: Any) -> Any:
    """Return a result in which nothing is pending."""
    leaves, spec = tree_flatten(result, is_leaf=_is_shape)
    pending = any(isinstance(x, torch.Tensor) and is_pending(x) for x in leaves)
    return tree_unflatten([_awaited(x) for x in leaves], spec) if pending else result


def _is_shape(x: Any) -> bool:
    return isinstance(x, torch.Size)


def _awaited(leaf: Any) -> Any:
    """Return what nobody has waited for, the result of a functional collective, as it is then."""
    return leaf.clone() if isinstance(leaf, torch.Tensor) and is_pending(leaf) else leaf


class Outputs:
    """The outputs of one captured call, and what of them the program still holds."""

    def __init__(
        self,
        result: Any,
        given: Sequence[torch.Tensor],
        own: Callable[[torch.Tensor], bool],
        *,
        copy: bool,
    ) -> None:
        """``own`` says whether a tensor's memory is the graph's."""
        leaves, self._spec = flat(result)
        self._copy, self._alone = copy, len(leaves) == 1 and leaves[0] is result
        self._kinds: list[Output] = []
        for i, leaf in enumerate(leaves):
            same = next((j for j in range(i) if leaf is leaves[j]), None)
            if same is not None and isinstance(self._kinds[same], Borrowed):
                self._kinds.append(Again(same))
            else:
                self._kinds.append(_kind(leaf, given, own))
        self._lent = [i for i, kind in enumerate(self._kinds) if isinstance(kind, Borrowed)]
        self._again = [(i, kind.place) for i, kind in enumerate(self._kinds) if type(kind) is Again]
        self._loans: dict[int, OutputGuard] = {}  # by position
        self.lends = bool(self._lent)
        kind = self._kinds[0] if self._alone else None
        self._only = kind if isinstance(kind, Plain) else None

    def expire(self, where: str) -> None:
        """Make what is still held of the last replay raise when it is read."""
        for i, loan in list(self._loans.items()):
            if loan.moved:
                del self._loans[i]
            elif loan.held:
                loan.end(where)
                del self._loans[i]

    def __del__(self) -> None:
        self.expire("the end of its graph")

    def give(self, given: Sequence[torch.Tensor], where: str, join: Join | None = None) -> Any:
        """Return the outputs of the replay that was just launched.

        ``join`` gets those that the graph has made and returns them with their gradients.
        """
        if self._only is not None:  # the quick way for a function that returns None
            return self._only.value
        leaves = [self._one(i, given, where) for i in range(len(self._kinds))]
        if join is not None:
            joined = join([leaves[i] for i in self._lent])
            for i, leaf in zip(self._lent, joined, strict=True):
                leaves[i] = leaf
        for i, place in self._again:
            leaves[i] = leaves[place]
        return leaves[0] if self._alone else tree_unflatten(leaves, self._spec)

    def made(self, result: Any) -> list[torch.Tensor]:
        """Return those leaves of ``result`` that ``join`` will be given."""
        leaves, _ = flat(result)
        return [leaves[i] for i in self._lent]

    def versions(self, places: Sequence[int]) -> list[int]:
        """Return how often what is lent in some of the places of ``made`` was written to."""
        loans = [self._loans.get(self._lent[i]) for i in places]
        return [-1 if loan is None else loan.version for loan in loans]

    def _one(self, i: int, given: Sequence[torch.Tensor], where: str) -> Any:
        kind = self._kinds[i]
        if isinstance(kind, Plain):
            return kind.value
        if isinstance(kind, Argument):
            return given[kind.position]
        if isinstance(kind, View):
            return kind.of(given[kind.position])
        if isinstance(kind, Again):
            return None  # known when all are
        if self._copy:
            return kind.tensor.clone()
        loan = self._loans.get(i)
        if loan is None:
            loan = self._loans[i] = OutputGuard(kind.tensor)
        return loan.begin(where)


def leads_back(tensor: Any) -> bool:
    """Whether gradients flow through an output."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and tensor.grad_fn is not None


def _kind(leaf: Any, given: Sequence[torch.Tensor], own: Callable[[torch.Tensor], bool]) -> Output:
    if not isinstance(leaf, torch.Tensor):
        return Plain(leaf)
    key = leaf.untyped_storage()._cdata
    for position, tensor in enumerate(given):
        if leaf is tensor:
            return Argument(position)
        if key == tensor.untyped_storage()._cdata:
            offset = int(leaf.storage_offset() - tensor.storage_offset())
            detached = tensor.requires_grad and not leaf.requires_grad
            return View(position, leaf.size(), leaf.stride(), offset, detached)
    return Borrowed(leaf.detach()) if own(leaf) else Plain(leaf)


# Nodes of views that `as_strided` can stand for: each element is in one place only.
_VIEWS = (
    "Alias", "AsStrided", "Diagonal", "Permute", "ReshapeAlias", "Select", "Slice", "Squeeze",
    "Swapaxes", "T", "Transpose", "UnsafeView", "Unsqueeze", "View",
)  # fmt: skip


def standing(leaf: Any, given: Sequence[torch.Tensor], own: Callable[[torch.Tensor], bool]) -> Any:
    """Return a leaf of a result in a form that each replay can hand out; in the capture.

    What is not a plain view of an argument becomes memory of the graph: other types over its bytes,
    what autograd reaches by other ways. Conjugates and negatives that are still to be computed are.
    Raises ``GraphError`` for an object that hides tensors of the graph.
    """
    if not isinstance(leaf, torch.Tensor):
        if hides(leaf, own):
            raise GraphError(
                f"an output is a {type(leaf).__qualname__}, in which no replay could put new "
                f"tensors; return the tensors themselves, or register the type with "
                f"torch.utils._pytree.register_pytree_node"
            )
        return leaf
    key = leaf.untyped_storage()._cdata
    source = next((x for x in given if x.untyped_storage()._cdata == key), None)
    if source is None:
        return leaf.resolve_conj().resolve_neg() if own(leaf) else leaf
    if leaf is source or _plain_view(leaf, source):
        return leaf
    return leaf.resolve_conj().resolve_neg().clone()


def _plain_view(leaf: torch.Tensor, source: torch.Tensor) -> bool:
    same = leaf.dtype == source.dtype
    same = same and leaf.is_conj() == source.is_conj() and leaf.is_neg() == source.is_neg()
    node = leaf.grad_fn
    while same and node is not None and type(node).__name__ != "AccumulateGrad":
        name = type(node).__name__.partition("Backward")[0]
        same = name in _VIEWS and len(node.next_functions) == 1
        node = node.next_functions[0][0]
    return same


_MOST = 1000  # objects that are looked through


def hides(leaf: Any, own: Callable[[torch.Tensor], bool]) -> bool:
    """Whether an object that is not a tensor holds one of the graph, or a run that goes on."""
    if isinstance(leaf, Iterator) and not isinstance(leaf, IOBase):
        return True
    queue, seen = [leaf], set[int]()
    while queue and len(seen) < _MOST:
        found = queue.pop(0)
        if id(found) in seen or isinstance(found, type | ModuleType):
            continue
        seen.add(id(found))
        if isinstance(found, torch.Tensor):
            if own(found):
                return True
        elif isinstance(found, FunctionType):
            queue += [found.__closure__, found.__defaults__]
        else:
            queue += gc.get_referents(found)
    return False


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose storage is its own and owns nothing."""
    source = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        source.data_ptr(), source.device, source.nbytes()
    )
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *place)


# Makes a read of a piece of memory raise; builds of torch without CUDA lack it.
_SPOIL = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)


class GuardedTensor(torch.Tensor):
    """An output where torch can't guard memory: it knows itself that it was overwritten."""

    overwritten: Sequence[str] = ()  # one list for an output and its views: how it ended

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GuardedTensor)]
        for leaf in known:
            if leaf.overwritten:
                raise RuntimeError(leaf.overwritten[0])
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PLAINLY:
                return func(args[0].as_subclass(torch.Tensor), *args[1:], **(kwargs or {}))
            found = func(*args, **(kwargs or {}))
            if not torch.compiler.is_compiling():
                _watch(found, known)
            return found


# What makes something else of a tensor: a copy, a pickle, a text.
_PLAINLY = {torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__, torch.Tensor.__format__}


def _watch(found: Any, known: Sequence[GuardedTensor]) -> None:
    """Let tensors that an operator returns share the end of the outputs whose memory they share."""
    if type(found) not in (tuple, list):
        found = (found,)
    if not found or not isinstance(found[0], torch.Tensor):
        return
    ends = {leaf.untyped_storage()._cdata: leaf.overwritten for leaf in known}
    for tensor in found:
        plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        if not plain or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            continue
        end = ends.get(tensor.untyped_storage()._cdata)
        if end is not None:
            tensor.__class__ = (
                GuardedTensor  # a subclass made by torch would be one more autograd node
            )
            tensor.overwritten = end


# How many tensors share a storage; builds of torch may lack it.
_sharers: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class OutputGuard:
    """One output, under a storage that is used again unless the program still holds it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._alias = _alias(tensor)
        self._storage = self._alias.untyped_storage()
        self._place = self._storage.data_ptr()
        self._at_rest = self._holders()
        self._ended: list[str] = []
        self._where = ""

    def _holders(self) -> tuple[int, int]:
        """Count the tensors that share the storage, and what names it in Python."""
        return _sharers(self._storage._cdata) if _sharers else 0, sys.getrefcount(self._storage)

    @property
    def held(self) -> bool:
        """Whether the program still has the output, a view of it, or its storage."""
        return _sharers is None or self._holders() != self._at_rest

    @property
    def version(self) -> int:
        """How often the output was written to, as autograd counts."""
        return self._alias._version

    @property
    def moved(self) -> bool:
        """Whether the program has given the output its own memory (``share_memory_``)."""
        return self._storage.data_ptr() != self._place

    def begin(self, where: str) -> torch.Tensor:
        """Return the output for the caller at ``where``."""
        self._where = where
        if _SPOIL is not None:
            return self._alias.detach()
        given = torch.Tensor._make_subclass(
            GuardedTensor, self._alias
        )  # no view: it may be written to
        given.overwritten = self._ended
        return given

    def end(self, where: str) -> None:
        """Let reading it raise from now on, also through its views; it can't begin again."""
        text = (
            f"this output of a graph, returned at {self._where}, was overwritten by {where}; "
            f'read it before, clone it, or capture with outputs="copy"'
        )
        if _SPOIL is not None:
            _SPOIL(self._storage._cdata, text)
        else:
            self._ended.append(text)
