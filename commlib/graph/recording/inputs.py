"""Addresses of the arguments that graphs read: the first caller's tensors, or copies."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from commlib.core.memory import Span, span
from commlib.errors import GraphError
from commlib.graph.calls.cache_key import Arguments, of_tensor
from commlib.graph.calls.leaves import Tensors
from commlib.graph.operators.layout import copy_of, elements, fill, in_memory, is_packed
from commlib.graph.operators.overlap import overlaps
from commlib.graph.operators.unsupported import check_unreadable
from commlib.graph.recording.eager_parts import EagerSegment
from commlib.graph.recording.segments import Segments


class Touched(NamedTuple):
    """Use that a function makes of the memory of its arguments, and of memory outside.

    Attributes:
        written: Positions of the arguments that it writes to.
        outside: Memory from outside that it touches, and where.
        outside_written: Memory from outside that it writes, and where.
    """

    written: Sequence[int] = ()
    outside: Sequence[tuple[int, Span]] = ()
    outside_written: Sequence[tuple[int, Span]] = ()

    @classmethod
    def by(cls, segments: Segments, given: Tensors) -> "Touched":
        """Return what the graphs do so far with the arguments ``given``."""
        memories = [recorder.memory for recorder in segments.recorders]
        written = {key for memory in memories for key in memory.written}
        eager = [part for part in segments.parts if isinstance(part, EagerSegment)]
        written |= {key for part in eager for key in part.written}
        places = [x.untyped_storage()._cdata for x in given]
        read = [item for memory in memories for item in memory.read.items()]
        wrote = [item for memory in memories for item in memory.wrote.items()]
        return cls(
            [i for i, key in enumerate(places) if key in written],
            [(key, at) for key, at in read if key not in places],
            [(key, at) for key, at in wrote if key not in places],
        )


class Inputs:
    """The tensors that the graphs of a call read, by the position of the argument.

    A graph reads the first caller's tensors in place. One that comes from somewhere else gets
    memory of the graph's own, once, by capturing again; from then on it is copied there.

    Attributes:
        copies: Memory of the graphs' own, by position.
        pointers: Where the graphs read each argument.
        touched: What the function does with them.
    """

    def __init__(self) -> None:
        self.copies: dict[int, torch.Tensor] = {}
        self.pointers: list[int] = []
        self.touched = Touched()
        self._targets: dict[int, torch.Tensor] = {}  # the copies, to be written to
        # Those of them that have gaps, or elements twice, or that are conjugate or negative views.
        self._odd: set[int] = set()
        self._read: list[torch.Tensor] = []  # kept alive
        self._written_by_parts: list[int] = []  # positions, in the last replay

    def make_room(self, call: Arguments, positions: Iterable[int]) -> None:
        """Give the graphs their own copies of some arguments; the same ones share one."""
        shared: dict[Any, torch.Tensor] = {}
        for i in positions:
            tensor = call.tensors[i]
            empty = not tensor.numel()  # it has no address
            key = id(tensor) if empty else (tensor.data_ptr(), *of_tensor(tensor))
            self.copies[i] = shared.setdefault(key, copy_of(tensor))
            if not is_packed(tensor) or tensor.is_conj() or tensor.is_neg():
                self._odd.add(i)
            # What a replay puts there is not a change of what a backward has saved of the last.
            self._targets[i] = self._elements(i, self.copies[i].data)

    def of(self, call: Arguments) -> Tensors:
        """Return the tensors that the graphs read in place of a call's tensors."""
        return [self.copies.get(i, tensor) for i, tensor in enumerate(call.tensors)]

    def fix(self, given: Tensors) -> None:
        """Record where graphs that were just captured read what they were ``given``."""
        self._read = [tensor.detach() for tensor in given]
        self.pointers = [tensor.data_ptr() for tensor in given]

    def put(self, call: Arguments, positions: Sequence[int]) -> None:
        """Copy some arguments to where the graphs read them."""
        if positions:
            with torch.no_grad():
                torch._foreach_copy_(
                    [self._targets[i] for i in positions],
                    [self._elements(i, call.tensors[i]) for i in positions],
                )

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy what a replay has written from the graphs' memory to the caller's tensors."""
        for i in {*self.touched.written, *self._written_by_parts}:
            if i in self.copies:
                with torch.no_grad():
                    fill(tensors[i], self.copies[i])

    @contextmanager
    def noting_writes(self) -> Iterator[None]:
        """Note which copies eager parts write to inside a ``with`` block, as some calls may do."""
        copies = [(i, x) for i, x in self.copies.items() if not x.is_inference()]
        before = [x._version for _, x in copies]
        yield
        pairs = zip(copies, before, strict=True)
        self._written_by_parts = [i for (i, x), count in pairs if x._version != count]

    def _elements(self, i: int, tensor: torch.Tensor) -> torch.Tensor:
        return elements(in_memory(tensor)) if i in self._odd else tensor

    def check(self, tensors: Tensors, pointers: Sequence[int]) -> None:
        """Raise ``GraphError`` for arguments that the graphs can't take, before anything runs."""
        if 0 in pointers:
            check_unreadable(tensors)
        self.check_overlaps(tensors, pointers)

    def check_overlaps(self, tensors: Tensors, pointers: Sequence[int] = ()) -> None:
        """Raise ``GraphError`` for written memory that is shared outside, but not in the graph.

        ``pointers``: addresses of a call's arguments. Moved ones get memory of the graph.
        """
        touched = self.touched
        if not (touched.written or touched.outside_written):
            return
        mem_ids: dict[int, object] = {i: id(copy) for i, copy in self.copies.items()}
        for i, at in enumerate(pointers):
            if at != self.pointers[i]:
                mem_ids.setdefault(i, (at, of_tensor(tensors[i])))
        for i in mem_ids if touched.outside else ():
            key, (begin, end) = tensors[i].untyped_storage()._cdata, span(tensors[i])
            others = touched.outside if i in touched.written else ()
            for other, (low, high) in (*touched.outside_written, *others):
                if other == key and low < end and begin < high:
                    raise GraphError(
                        f"argument tensor {i} shares memory with a tensor that the function uses "
                        f"without receiving it, and one of them is written; pass the other tensor "
                        f"too, or pass a copy"
                    )
        if not touched.written:
            return
        written = set(touched.written)
        for i, j in overlaps(tensors):
            if mem_ids.get(i) != mem_ids.get(j) and (i in written or j in written):
                raise GraphError(
                    f"tensors {i} and {j} of the arguments overlap, and the function writes one; "
                    f"give it one of them, and slice inside"
                )
