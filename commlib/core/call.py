"""One call of a collective: what the user gave, and what the engine is given."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import graph

from commlib.core.observers import unwatched
from commlib.core.tensors import dense_copy, is_dense

Launch = Callable[..., Any]

# torch's public function wraps this one; it is asked at every call, hence the shorter way.
_increment_version = getattr(torch._C, "_increment_version", graph.increment_version)


class Call:
    """One collective: what the user gave, and what the engine is given.

    Attributes:
        collective: Its name.
        launch: The engine's launch; it gets ``out``, ``x`` and ``args``.
        place: How many elements after the start of ``out`` an ``x`` inside it may begin (negative:
            before it); None if the collective has no in-place form.
        dense: Both tensors are known to be dense and to require no gradient.
        result: What the caller gets.
    """

    __slots__ = (
        "args",
        "collective",
        "dense",
        "dst",
        "launch",
        "out",
        "place",
        "result",
        "src",
        "x",
    )

    def __init__(
        self,
        collective: str,
        launch: Launch,
        args: tuple[Any, ...],
        out: torch.Tensor | None,
        x: torch.Tensor | None,
        place: int | None,
        dense: bool,
        result: Any,
    ) -> None:
        self.collective, self.launch, self.args, self.out, self.x = collective, launch, args, out, x
        self.place, self.dense, self.result = place, dense, result

    def start(self) -> Any:
        """Stage what the engine can't take as it is, and launch on the current stream."""
        out, src = self.out, self.x
        dst = out
        if out is not None and not is_dense(out):
            dst = torch.empty(out.shape, dtype=out.dtype, device=out.device)
        if src is not None:
            if not is_dense(src):
                src = dense_copy(src)
            elif dst is not None and _collide(dst, src, self.place):
                src = src.clone()
        self.dst, self.src = dst, src
        return self.launch(dst, src, *self.args)

    def finish(self) -> None:
        """Put a staged result where the user wants it, and let autograd know of the write."""
        if self.out is None or self.dst is None:
            return
        if self.dst is self.out:
            written(self.out)
            return
        # A waiter may be in another grad or inference mode than the caller's.
        inference = torch.inference_mode(self.out.is_inference())
        with unwatched(), inference, torch.no_grad():
            self.out.copy_(self.dst)


def written(out: torch.Tensor) -> None:
    """Let autograd know that saved values may be gone; inference tensors are never saved."""
    if not out.is_inference():
        _increment_version((out,))


def as_they_are(out: torch.Tensor | None, x: torch.Tensor | None, place: int | None) -> bool:
    """Return True if an engine can take both tensors without staging."""
    return (out is None or is_dense(out)) and (x is None or is_dense(x)) and apart(out, x, place)


def apart(out: torch.Tensor | None, x: torch.Tensor | None, place: int | None) -> bool:
    """Return True if dense tensors share no bytes, or share them as the engine allows."""
    if out is x:
        return out is None or place == 0
    return out is None or x is None or not _collide(out, x, place)


def _collide(out: torch.Tensor, x: torch.Tensor, place: int | None) -> bool:
    """Return True if dense tensors share bytes in a way that the engine does not allow."""
    a, b = out.data_ptr(), x.data_ptr()
    if a >= b + x.nbytes or b >= a + out.nbytes:
        return False
    return place is None or b - a != place * out.itemsize
