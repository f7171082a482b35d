"""Memory from outside that each operator of a run reads, to be compared with another run."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commlib.graph.watching.digest import digests

_TENSOR = "another tensor"
_Place = tuple[int, int]  # the number of an operator, and which of its tensors


class Read(NamedTuple):
    """A tensor from outside that an operator takes.

    Attributes:
        name: The operator.
        key: The key of its memory.
        address: Where it begins.
    """

    name: str
    key: int
    address: int


class OtherRead(NamedTuple):
    """The first operator that two runs give other memory from outside.

    Attributes:
        number: Its number.
        name: Its name.
        what: What is another.
    """

    number: int
    name: str
    what: str

    def __str__(self) -> str:
        return (
            f"operator {self.number} ({self.name}) reads {self.what} at each run, for example from "
            f"an iterator, a queue or a random choice; pass the tensor as an argument"
        )


@dataclass(eq=False)
class OutsideReads:
    """Reads of outside memory by a run's operators; it is kept, so addresses are unique.

    Attributes:
        reads: Each tensor, by its place.
        storages: Their memory by its key.
    """

    reads: dict[_Place, Read] = field(default_factory=dict)
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def note(self, number: int, name: str, tensor: torch.Tensor) -> None:
        """Record that operator ``number`` takes ``tensor``."""
        storage, index = tensor.untyped_storage(), 0
        while (number, index) in self.reads:
            index += 1
        self.reads[number, index] = Read(name, storage._cdata, tensor.data_ptr())
        self.storages[storage._cdata] = storage

    def until(self, end: int, without: Container[int]) -> "OutsideReads":
        """Return the reads of the first ``end`` operators, except of the memory ``without``."""
        return self._those(
            [x for x, at in self.reads.items() if x[0] < end and at.key not in without]
        )

    def among(self, keys: Container[int]) -> "OutsideReads":
        """Return the reads of certain memory."""
        return self._those([site for site, read in self.reads.items() if read.key in keys])

    def _those(self, places: Iterable[_Place]) -> "OutsideReads":
        """Return some of the reads; the tensors of an operator are numbered among these alone."""
        result = OutsideReads()
        for number, index in places:
            read = self.reads[number, index]
            free = next(i for i in count() if (number, i) not in result.reads)
            result.reads[number, free] = read
            result.storages[read.key] = self.storages[read.key]
        return result

    def join(self, other: "OutsideReads", begin: int) -> None:
        """Add the reads of a run that goes on after ``begin`` operators."""
        for (number, index), read in other.reads.items():
            self.reads[number + begin, index] = read
        self.storages |= other.storages


def first_other(
    before: OutsideReads, after: OutsideReads, *, made: Container[int], lasting: Container[int]
) -> OtherRead | None:
    """Return the first operator that reads other memory in a run than in the one before it.

    Each run may make a tensor of the same constant, as of an array: memory that only ``before``
    still holds counts by its content. It is released here.

    Args:
        before: What the first of the runs has read.
        after: What the run after it has read.
        made: Memory that the first run has made itself and the next one reads, such as a table.
        lasting: Memory that the program can reach: it has to be the same.
    """
    others: list[OtherRead] = []
    constants: list[tuple[_Place, Read, Read]] = []
    for site in sorted(before.reads.keys() | after.reads.keys()):
        was, now = before.reads.get(site), after.reads.get(site)
        if was is None or now is None:
            read = was or now
            if read is not None and (read is was or read.key not in made):
                others.append(OtherRead(site[0], read.name, _TENSOR))
        elif was.address != now.address:
            if was.key in lasting or now.key in lasting:
                others.append(OtherRead(site[0], now.name, _TENSOR))
            else:
                constants.append((site, was, now))
    if constants:
        others += _not_the_same(constants, before, after)
    before.storages.clear()
    return min(others, default=None)


def _not_the_same(
    constants: Sequence[tuple[_Place, Read, Read]], before: OutsideReads, after: OutsideReads
) -> Iterator[OtherRead]:
    """Yield what is held elsewhere, or holds other bits, in two runs."""
    ones = [before.storages[was.key] for _, was, _ in constants]
    others = [after.storages[now.key] for _, _, now in constants]
    same = [
        one.nbytes() == other.nbytes() and a == b
        for one, other, a, b in zip(ones, others, digests(ones), digests(others), strict=True)
    ]
    held = [StorageWeakRef(one) for one in ones]
    ones.clear()
    before.storages.clear()
    for (site, _, now), reference, is_same in zip(constants, held, same, strict=True):
        gone = reference.expired()
        if not (is_same and gone):
            yield OtherRead(site[0], now.name, "other values" if gone else _TENSOR)


def keys_of(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Return the keys of the memory of tensors."""
    return {x.untyped_storage()._cdata for x in tensors}
