"""Memory of graphs that raises where the program reads it after a graph has overwritten it."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from commlib.graph.calls.graph_break import graph_break
from commlib.graph.operators.layout import unowned

# Makes a read of a piece of memory raise; builds of torch without CUDA lack it.
_SPOIL = getattr(torch._C, "_set_storage_data_ptr_access_error_msg", None)
_CHECKED = (
    "a borrowed output of commlib.graph checks itself in each operator, where torch was built "
    "without CUDA; that can't be traced. Pass outputs='copy' to graph.capture"
)


class GuardedTensor(torch.Tensor):
    """An output that checks itself whether it was overwritten, if torch can't guard memory."""

    overwritten: Sequence[str] = ()  # one list for an output and its views: how it ended

    @classmethod
    @graph_break(_CHECKED)
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        guarded = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, GuardedTensor)]
        for leaf in guarded:
            if leaf.overwritten and getattr(func, "__name__", "") not in _READS_NOTHING:
                raise RuntimeError(leaf.overwritten[0])
        with torch._C.DisableTorchFunctionSubclass():
            if func in _PLAINLY:
                with torch.set_grad_enabled(torch.is_grad_enabled() or func in _TEXT):
                    plain = args[0].as_subclass(torch.Tensor)
                return func(plain, *args[1:], **(kwargs or {}))
            result = func(*args, **(kwargs or {}))
            _watch(result, guarded)
            return result


GuardedTensor.__name__ = GuardedTensor.__qualname__ = "Tensor"  # as messages name it

# Classes of outputs that can be borrowed; an output of another class is copied, and keeps it.
LENT = torch.Tensor, torch.nn.Parameter, GuardedTensor


# What makes something else of a tensor: a copy, a pickle, a text.
_TEXT = {torch.Tensor.__repr__}  # which says whether the tensor requires grad
# Access to attributes and to what is known of a tensor without its memory. Views are watched.
_READS_NOTHING = {
    "__get__", "untyped_storage", "is_inference", "size", "stride", "storage_offset", "dim",
    "numel", "element_size", "get_device", "is_contiguous", "is_floating_point", "is_complex",
    "is_conj", "is_neg",
}  # fmt: skip
_PLAINLY = {torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__, torch.Tensor.__format__, *_TEXT}


def _watch(result: Any, known: Sequence[GuardedTensor]) -> None:
    """Let tensors that an operator returns share the end of the outputs whose memory they share."""
    if type(result) not in (tuple, list):
        result = (result,)
    if not result or not isinstance(result[0], torch.Tensor):
        return
    ends = {leaf.untyped_storage()._cdata: leaf.overwritten for leaf in known}
    for tensor in result:
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


guards_memory = _SPOIL is not None  # whatever reads it; else only tensors themselves are guarded


class OutputGuard:
    """One output, under a storage that is used again unless the program still holds it.

    Attributes:
        alias: A tensor under that storage; an output shares its count of writes.
        at_rest: Its ``state`` while the program holds nothing of it.
    """

    def __init__(self, tensor: torch.Tensor, what: str) -> None:
        """``what``: "output" or "gradient", for the message."""
        self.alias, self._what = unowned(tensor), what
        self._storage = self.alias.untyped_storage()
        self.at_rest = self.state()
        self._ended: list[str] = []
        self._where: object = None

    def state(self) -> tuple[Any, ...]:
        """Return the address, how many tensors share the storage, and what names it in Python."""
        storage = self._storage
        sharers = _sharers(storage._cdata) if _sharers else object()
        return storage.data_ptr(), sharers, sys.getrefcount(storage)

    @property
    def moved(self) -> bool:
        """Return True if the program has moved the output to other memory (``share_memory_``)."""
        return bool(self._storage.data_ptr() != self.at_rest[0])

    def begin(self, where: object) -> torch.Tensor:
        """Return the output for the caller at ``where``."""
        self._where = where
        if _SPOIL is not None:
            return self.alias.detach()
        output = torch.Tensor._make_subclass(
            GuardedTensor, self.alias
        )  # no view: it may be written to
        output.overwritten = self._ended
        return output

    def end(self, event: str, line: object) -> None:
        """Let reading it raise from now on, also through its views; it can't begin again.

        ``event``: what has overwritten it; ``line``: where, if that is known.
        """
        end = event if line is None else f"{event} {line}"
        text = (
            f"this {self._what} of a graph, returned at {self._where}, was overwritten by {end}; "
            f'read it before, clone it, or capture with {self._what}s="copy"'
        )
        if _SPOIL is not None:
            _SPOIL(self._storage._cdata, text)
        else:
            self._ended.append(text)


class OutputGuards:
    """Borrowed outputs: tensors in a graph's memory that the program was given, by position."""

    def __init__(self, what: str) -> None:
        """``what``: as of an ``OutputGuard``."""
        self._what = what
        self.by_position: dict[int, OutputGuard] = {}
        self._lent: set[int] = set()  # positions of those that the program may hold

    def borrow(self, i: int, tensor: torch.Tensor, where: object) -> torch.Tensor:
        """Return the borrowed output over ``tensor`` for the caller at ``where``."""
        guard = self.by_position.get(i)
        if guard is None:
            guard = self.by_position[i] = OutputGuard(tensor, self._what)
        self._lent.add(i)
        return guard.begin(where)

    def expire(self, event: str, line: object = None) -> None:
        """Make borrowed outputs of the last replay that are still held raise when read.

        ``event`` and ``line`` as of an ``OutputGuard``.
        """
        lent, self._lent = self._lent, set()
        for i in lent:
            guard = self.by_position[i]
            if guard.state() == guard.at_rest:
                continue  # the program has neither the output, nor a view of it, nor its storage
            if not guard.moved:
                guard.end(event, line)
            del self.by_position[i]

    def __del__(self) -> None:
        self.expire("the end of its graph")
