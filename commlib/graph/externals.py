"""Tensors from outside that a graph reads: their memory stays, and their end is noticed."""

import weakref
from collections.abc import Callable, Collection

import torch

from commlib.graph.ledger import Ledger


class Externals:
    """What a graph reads in addition to its arguments.

    A tensor that the program releases was replaced by another, as a rule: a checkpoint was
    loaded, a cache was reordered. The graph still reads the old one's memory.
    """

    def __init__(self, ledgers: Collection[Ledger], arguments: Collection[int]) -> None:
        """Let ``ledgers`` keep memory in place of tensors; ``arguments``: memory that is given."""
        self.gone = False
        found = []
        for ledger in ledgers:
            for key, tensor in ledger.externals.items():
                if key not in arguments:
                    found.append(weakref.ref(tensor, self._note))
                ledger.externals[key] = tensor.detach()
            tensor = torch.empty(0)  # no name of a tensor is left
        # One that nobody holds was made on the way, as p.data is.
        there = ((reference, reference()) for reference in found)
        self._places = [(one, x.data_ptr()) for one, x in there if x is not None]
        self.gone = False

    def _note(self, _: object) -> None:
        self.gone = True

    def forget(self) -> None:
        """Point to none of them any more."""
        self._places = []

    def moved(self) -> list[torch.Tensor]:
        """Return the tensors whose memory is elsewhere now."""
        known = ((reference(), at) for reference, at in self._places)
        return [x for x, at in known if x is not None and x.data_ptr() != at]


def _equal_one_by_one(
    tensors: list[torch.Tensor], pointers: list[int], positions: list[int]
) -> bool:
    return all(tensors[i].data_ptr() == pointers[i] for i in positions)


# Compares addresses in one step, where torch has it.
at_addresses: Callable[[list[torch.Tensor], list[int], list[int]], bool] = getattr(
    torch._C, "_tensors_data_ptrs_at_indices_equal", _equal_one_by_one
)
