"""One operator of a captured stretch, with its tensors: it can be run again."""

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch

from commlib.core.observers import Seen
from commlib.core.work import Work
from commlib.errors import GraphError
from commlib.graph.operators.layout import expanded_dims, fill

_NESTS = (tuple, list, dict)
# ``mode_of(FAKE)`` is set where operators compute shapes and no values.
mode_of, FAKE = torch._C._get_dispatch_mode, torch._C._TorchDispatchModeKey.FAKE
_COLLECTIVES = ("c10d", "_c10d_functional")  # of torch.distributed, which do not wait


class Step(NamedTuple):
    """One operator, with the memory of the tensors that it took and gave, and their shapes then."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, torch.Tensor], ...]  # outputs with their own memory, by position
    grad: bool = False  # whether autograd was on: some operators return more then
    pends: bool = False  # a collective of torch.distributed, whose result is waited for

    @classmethod
    def of(
        cls,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Iterable[tuple[int, torch.Tensor]],
        own: Container[int],
    ) -> "Step":
        """Return the step of a call that has ``made`` tensors; ``own``: memory of the graph."""
        saved = tuple((i, as_it_is(tensor, own)) for i, tensor in made)
        pends = getattr(call, "namespace", "") in _COLLECTIVES
        return cls(call, args, kwargs, saved, torch.is_grad_enabled(), pends)

    def again(self) -> None:
        """Run it again, on the same tensors and into the same memory."""
        self.end(self.launch())

    @property
    def seen(self) -> Seen | None:
        """Return the call of a ring that this step repeats, or None."""
        first = self.args[0] if self.args else None
        return first if isinstance(first, Seen) else None

    @property
    def begins(self) -> bool:
        """Return True for a collective, which may run on after its launch."""
        return self.pends or (not hasattr(self.call, "namespace") and self.seen is not None)

    def launch(self) -> Any:
        """Call the operator; returns its result, for ``end``."""
        if not self.grad:
            return self.call(*self.args, **self.kwargs)
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad():
            return self.call(*self.args, **self.kwargs)

    def end(self, result: Any) -> None:
        """Wait for a collective, and copy the result to the recorded memory.

        Raises ``GraphError`` for a result of another shape than at the capture, and for one with
        separate elements where that one had one element several times.
        """
        if isinstance(result, Work):
            result.wait()
        elif self.pends:
            _wait(result)
        if self.made:
            leaves = tensors_in(result)
            for position, tensor in self.made:
                if leaves[position].shape != tensor.shape:
                    raise _other_shape(self.call, leaves[position], tensor)
                if 0 in tensor.stride():
                    _fill(self.call, tensor, leaves[position])
                else:
                    tensor.copy_(leaves[position])


def leaves_in(tree: Any) -> list[Any]:
    """Return the leaves of what an operator takes or returns: of tuples, lists and dicts.

    It is asked several times an operator, and three times as fast as ``tree_leaves``.
    """
    if isinstance(tree, _NESTS):
        leaves = []
        for one in tree.values() if isinstance(tree, dict) else tree:
            if isinstance(one, _NESTS):
                leaves += leaves_in(one)
            else:
                leaves.append(one)
        return leaves
    return [tree]


def map_tensors(change: Callable[[torch.Tensor], Any], tree: Any) -> Any:
    """Return what an operator takes with each tensor changed."""
    if isinstance(tree, torch.Tensor):
        return change(tree)
    if not tree or not isinstance(tree, _NESTS):
        return tree
    if isinstance(tree, dict):
        return {name: map_tensors(change, one) for name, one in tree.items()}
    changed = []
    for x in tree:
        if isinstance(x, torch.Tensor):
            changed.append(change(x))
        else:
            changed.append(map_tensors(change, x) if isinstance(x, _NESTS) else x)
    return type(tree)(changed)


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """Return the tensors of what an operator takes or returns."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in leaves_in(tree) if isinstance(leaf, torch.Tensor)]


def as_it_is(x: torch.Tensor, made: Container[int]) -> torch.Tensor:
    """Return another tensor over the same memory.

    Autograd is to know of writes to what is outside, not of those to memory that a graph has
    ``made``: that is right again when a backward reads it.
    """
    with torch._C.DisableTorchFunctionSubclass():
        return x.data if x.untyped_storage()._cdata in made else x.detach()


def as_they_are(tree: Any, made: Container[int]) -> Any:
    """Return what an operator takes with each tensor ``as_it_is``.

    One that comes twice comes twice again: attention is another kernel where key and value are one.
    """
    return map_tensors(cache(partial(as_it_is, made=made)), tree) if tree else tree


def _fill(call: Callable[..., Any], tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Copy a result to recorded memory that has each repeated element once."""
    if not {*expanded_dims(tensor)} <= {*expanded_dims(result)}:
        raise GraphError(
            f"{call} has returned a tensor of strides {result.stride()} in a replay, and one of "
            f"strides {tensor.stride()}, which repeats elements, at the capture; return a copy of "
            f"it (contiguous()), or mark the part with commlib.graph.eager"
        )
    fill(tensor, result)


def _other_shape(call: Callable[..., Any], now: torch.Tensor, was: torch.Tensor) -> GraphError:
    return GraphError(
        f"{call} has returned a tensor of shape {tuple(now.shape)} in a replay, and one of shape "
        f"{tuple(was.shape)} at the capture; how much it returns may not depend on values: pad "
        f"it, or mark the part with commlib.graph.eager"
    )


def _wait(result: Any) -> None:
    """Wait for what a collective of torch.distributed has returned: tensors, or its work."""
    for leaf in leaves_in(result):
        if isinstance(leaf, torch.Tensor):
            torch.ops._c10d_functional.wait_tensor(leaf)
        elif hasattr(leaf, "wait"):
            leaf.wait()


@contextmanager
def without_autocast() -> Iterator[None]:
    """Run without the caller's autocast inside a ``with`` block."""
    with ExitStack() as off:
        for device in ("cuda", "cpu"):
            if torch.is_autocast_enabled(device):
                off.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def as_recorded() -> Iterator[None]:
    """Run steps inside a ``with`` block: autograd and autocast have done their part already."""
    with torch.no_grad(), without_autocast():
        yield
