"""The parameters and buffers of a captured module, by name: which are others since the capture."""

import weakref
from collections.abc import Sequence

import torch

from commlib.errors import GraphError
from commlib.graph.replaying.captured_call import CapturedCall


class UsedTensors:
    """The tensors of a captured module at its last capture."""

    def __init__(self) -> None:
        self._known: dict[str, weakref.ref[torch.Tensor]] = {}

    def note(self, module: torch.nn.Module | None) -> None:
        """Record what ``module`` has now."""
        named = {} if module is None else _named(module)
        self._known = {name: weakref.ref(x) for name, x in named.items()}

    def check(
        self, function: str, module: torch.nn.Module | None, entries: Sequence[CapturedCall]
    ) -> None:
        """Raise ``GraphError`` for a captured ``function`` whose graphs read replaced tensors."""
        gone = self._replaced(module, entries)
        if gone:
            raise GraphError(
                f"{function}: {', '.join(gone[:5])} is not where the graph reads it any more; "
                f"write into the old memory (copy_), or call reset() to capture again"
            )

    def _replaced(
        self, module: torch.nn.Module | None, entries: Sequence[CapturedCall]
    ) -> list[str]:
        """Return the names of tensors that are others now, or have other memory."""
        now = _named(module)
        gone = [name for name, x in self._known.items() if now.get(name) is not x()]
        names = {id(x()): name for name, x in self._known.items()}
        moved = [x for entry in entries for x in entry.moved()]
        return gone + [names.get(id(x), f"a {tuple(x.shape)} tensor") for x in moved]


def _named(module: torch.nn.Module | None) -> dict[str, torch.Tensor]:
    if module is None:
        return {}
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
