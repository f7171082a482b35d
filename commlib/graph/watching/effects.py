"""Changes that a graph makes outside itself, in memory, generators and gradients."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from commlib.graph.operators.generators import put_state

TOGETHER = 1 << 26  # bytes that are copied, and compared, at once


class Held(NamedTuple):
    """The content of all that a graph changes, at one time.

    Attributes:
        buffers: Copies of memory, side by side; None for what the memory itself holds.
        generators: Their states.
        grads: What leaves have as their gradients.
        versions: How often autograd has counted writes.
    """

    buffers: list[torch.Tensor] | None
    generators: list[torch.Tensor]
    grads: list[torch.Tensor | None]
    versions: list[int]


class _Chunk(NamedTuple):
    """Pieces of memory that are copied and compared together.

    Attributes:
        members: Their numbers.
        pieces: Their words.
        sizes: How many.
    """

    members: list[int]
    pieces: list[torch.Tensor]
    sizes: list[int]

    def room(self) -> torch.Tensor:
        """Return memory for copies of all pieces side by side."""
        return self.pieces[0].new_empty(sum(self.sizes))

    def read(self, room: torch.Tensor) -> torch.Tensor:
        """Copy the pieces to ``room`` and return it."""
        torch._foreach_copy_(list(room.split(self.sizes)), self.pieces)
        return room

    def write(self, buffer: torch.Tensor) -> None:
        """Copy the pieces from ``buffer``."""
        torch._foreach_copy_(self.pieces, list(buffer.split(self.sizes)))


class Effects:
    """All that a graph changes outside itself.

    Copies are packed into few buffers, so that hundreds of tensors are copied and compared in a
    few launches.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        generators: Iterable[torch.Generator],
        leaves: Iterable[torch.Tensor],
    ) -> None:
        """Store what is changed.

        Args:
            tensors: One for each piece of memory that is written.
            generators: Those that are drawn from.
            leaves: Those whose ``grad`` may be another one afterwards.
        """
        self.tensors = list(tensors)
        self.generators, self.leaves = list(generators), list(leaves)
        self._chunks = _chunks([_words(tensor) for tensor in self.tensors])
        self._counted = [tensor for tensor in self.tensors if not tensor.is_inference()]

    def now(self) -> Held:
        """Return copies of what all of it holds now."""
        buffers = [chunk.read(chunk.room()) for chunk in self._chunks]
        return self.here()._replace(buffers=buffers)

    def here(self) -> Held:
        """Return what all of it holds now, without copies of memory: until that is written."""
        return Held(
            None,
            [generator.get_state() for generator in self.generators],
            [leaf.grad for leaf in self.leaves],
            [tensor._version for tensor in self._counted],
        )

    def put(self, held: Held) -> None:
        """Restore all of it to its state in ``held``."""
        assert held.buffers is not None
        for buffer, chunk in zip(held.buffers, self._chunks, strict=True):
            chunk.write(buffer)
        self._put_rest(held)

    def exchange(self, held: Held) -> Held:
        """Restore all of it to ``held``; return its present state, in the memory of ``held``.

        What is allocated is allocated first, and is as large as the largest chunk.
        """
        assert held.buffers is not None
        spare: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}
        for buffer in sorted(held.buffers, key=torch.Tensor.numel):
            spare[buffer.device, buffer.dtype] = buffer
        spare = {kind: torch.empty_like(buffer) for kind, buffer in spare.items()}
        now = self.here()._replace(buffers=held.buffers)
        for buffer, chunk in zip(held.buffers, self._chunks, strict=True):
            current = chunk.read(spare[buffer.device, buffer.dtype][: buffer.numel()])
            chunk.write(buffer)
            buffer.copy_(current)
        self._put_rest(held)
        return now

    def _put_rest(self, held: Held) -> None:
        for generator, state in zip(self.generators, held.generators, strict=True):
            put_state(generator, state)
        for leaf, grad in zip(self.leaves, held.grads, strict=True):
            if leaf.grad is not grad:
                leaf.grad = grad
        self.put_versions(held)

    def put_versions(self, held: Held) -> None:
        """Let autograd count the writes so far as it did then: the content is that of then."""
        set_versions(self._counted, held.versions)

    def pairs(self, one: Held, other: Held) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield each piece of memory whose bits differ, as its number and both contents."""
        for number, chunk in enumerate(self._chunks):
            before, after = (self._content(number, held) for held in (one, other))
            if torch.equal(before, after):  # bits are words here, and no number is NaN
                continue
            halves = zip(before.split(chunk.sizes), after.split(chunk.sizes), strict=True)
            for i, (a, b) in zip(chunk.members, halves, strict=True):
                if not torch.equal(a, b):
                    dtype = self.tensors[i].dtype
                    yield i, a.view(torch.uint8).view(dtype), b.view(torch.uint8).view(dtype)

    def _content(self, number: int, held: Held) -> torch.Tensor:
        if held.buffers is not None:
            return held.buffers[number]
        chunk = self._chunks[number]
        return chunk.read(chunk.room())


def _chunks(pieces: Sequence[torch.Tensor]) -> list[_Chunk]:
    """Return all pieces with those of one device and width side by side, up to ``TOGETHER`` bytes.

    A larger piece is alone.
    """
    chunks: list[_Chunk] = []
    last: dict[tuple[torch.device, torch.dtype], tuple[_Chunk, int]] = {}
    for i, piece in enumerate(pieces):
        kind = piece.device, piece.dtype
        chunk, nbytes = last.get(kind, (None, 0))
        if chunk is None or nbytes + piece.nbytes > TOGETHER:
            chunk, nbytes = _Chunk([], [], []), 0
            chunks.append(chunk)
        last[kind] = chunk, nbytes + piece.nbytes
        chunk.members.append(i)
        chunk.pieces.append(piece)
        chunk.sizes.append(piece.numel())
    return chunks


def set_versions(tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """Let autograd count ``counts`` writes to ``tensors``."""
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(counts))


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory of a tensor as whole numbers, of four bytes where it has such a size."""
    storage = tensor.untyped_storage()
    dtype = torch.uint8 if storage.nbytes() % 4 else torch.int32
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage)
