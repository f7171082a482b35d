"""One call of a collective: what the user gave, and what the engine is given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch.autograd import graph

from commlib.core.calls.log import Entry
from commlib.core.observers import unwatched
from commlib.core.tensors import dense_copy, is_dense

Tensor = torch.Tensor
Launch = Callable[..., Any]
Result = TypeVar("Result")

# torch's public function wraps this one; it is called in every collective, hence the shorter way.
increment_version = getattr(torch._C, "_increment_version", graph.increment_version)


@dataclass(slots=True, eq=False)
class Call(Generic[Result]):
    """One validated collective: what the user gave, and what the engine is given.

    Attributes:
        collective: Its name.
        launch: The engine's launch; it gets ``out``, ``x`` and ``args``.
        args: What the launch gets in addition to the tensors.
        out: The output; None if this rank has none.
        x: The input; None if this rank has none.
        place: How many elements after the start of ``out`` an ``x`` inside it may begin (negative:
            before it); None if the collective has no in-place form.
        plain: ``is_plain`` holds for the tensors.
        entry: What every member must give alike; None for a call that some members do not make,
            such as a send.
        result: What the caller gets.
        staged: The output and the input as the engine got them; set by ``start``.
        order: The ``CallOrder`` that it belongs to; None for the ring's own.
    """

    collective: str
    launch: Launch
    args: tuple[Any, ...]
    out: Tensor | None
    x: Tensor | None
    place: int | None
    plain: bool
    entry: Entry | None
    result: Result
    staged: tuple[Tensor | None, Tensor | None] = (None, None)
    order: Any = None

    def start(self) -> Any:
        """Stage what the engine can't take as it is, and launch on the current stream."""
        dst, src = self.out, self.x
        if dst is not None and not is_dense(dst):
            dst = torch.empty(dst.shape, dtype=dst.dtype, device=dst.device)
        if src is not None:
            if not is_dense(src):
                src = dense_copy(src)
            elif dst is not None and _collide(dst, src, self.place):
                src = src.clone()
        self.staged = dst, src
        return self.launch(dst, src, *self.args)

    def finish(self) -> None:
        """Put a staged result where the user wants it, and notify autograd of the write."""
        dst, out = self.staged[0], self.out
        if out is None or dst is None:
            return
        if dst is out:
            written(out)
            return
        # A waiter may be in another grad or inference mode than the caller's.
        inference = torch.inference_mode(out.is_inference())
        with unwatched(), inference, torch.no_grad():
            out.copy_(dst)


def nothing(out: Tensor | None, x: Tensor | None, *args: Any) -> None:
    """Launch nothing: empty tensors have nothing to move, on any rank."""


def written(out: Tensor) -> None:
    """Notify autograd that saved values may be gone; inference tensors are never saved."""
    if not out.is_inference():
        increment_version((out,))


def as_they_are(out: Tensor | None, x: Tensor | None, place: int | None) -> bool:
    """Return True if an engine can take both tensors without staging."""
    return (out is None or is_dense(out)) and (x is None or is_dense(x)) and apart(out, x, place)


def apart(out: Tensor | None, x: Tensor | None, place: int | None) -> bool:
    """Return True if dense tensors share no bytes, or share them as the engine allows."""
    if out is x:
        return out is None or place == 0
    return out is None or x is None or not _collide(out, x, place)


def _collide(out: Tensor, x: Tensor, place: int | None) -> bool:
    """Return True if dense tensors share bytes in a way that the engine does not allow."""
    a, b = out.data_ptr(), x.data_ptr()
    if a >= b + x.nbytes or b >= a + out.nbytes:
        return False
    return place is None or b - a != place * out.itemsize
