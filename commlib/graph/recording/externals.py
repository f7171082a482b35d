"""Tensors from outside that a graph reads: their memory is kept and their release is detected."""

import weakref
from collections.abc import Collection, Iterable

import torch

from commlib.graph.watching.recorder import Recorder


class Externals:
    """The tensors that a graph reads in addition to its arguments.

    If the program releases such a tensor, it has usually replaced it: it loaded a checkpoint, or
    reordered a cache. The graph still reads the old tensor's memory.
    """

    def __init__(self, recorders: Collection[Recorder], arguments: Collection[int]) -> None:
        """Let ``recorders`` keep memory in place of tensors, except the memory of ``arguments``."""
        self.gone = False
        self._more: list[weakref.ref[torch.Tensor]] = []
        references = []
        for recorder in recorders:
            for key, tensor in recorder.memory.externals.items():
                if key not in arguments:
                    references.append(weakref.ref(tensor, self._note))
                recorder.memory.externals[key] = tensor.detach()
            tensor = torch.empty(0)  # drops the last reference of this frame
        # A tensor that is already released was temporary, such as p.data.
        pairs = ((reference, reference()) for reference in references)
        self._addresses = [(each, x.data_ptr()) for each, x in pairs if x is not None]
        self.gone = False

    def _note(self, _: object) -> None:
        self.gone = True

    def watch(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Detect the release of more tensors; None for one that is released already."""
        for tensor in tensors:
            if tensor is None:
                self.gone = True
            else:
                self._more.append(weakref.ref(tensor, self._note))

    def forget(self) -> None:
        """Drop all references."""
        self._addresses = []
        self._more = []

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors whose memory has moved."""
        pairs = ((reference(), address) for reference, address in self._addresses)
        return [x for x, address in pairs if x is not None and x.data_ptr() != address]
