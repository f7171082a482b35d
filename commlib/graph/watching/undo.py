"""Changes that a run makes outside itself, recorded to restore or compare them."""

import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from commlib.graph.operators.generators import put_state
from commlib.graph.operators.history import node_of
from commlib.graph.watching.effects import Effects, set_versions

Shape = tuple[torch.Size, tuple[int, ...], int]
_Memory = dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]]
_Generators = dict[int, tuple[torch.Generator, torch.Tensor]]
_Grads = dict[int, tuple[weakref.ref[torch.Tensor], torch.Tensor | None]]


def shape_of(tensor: torch.Tensor) -> Shape:
    """Return size, strides and offset."""
    return tensor.size(), tensor.stride(), int(tensor.storage_offset())


def _reshape(tensor: torch.Tensor, shape: Shape) -> None:
    if shape_of(tensor) != shape:
        with torch.no_grad():
            tensor.as_strided_(*shape)


@dataclass(eq=False)
class UndoLog:
    """Memory, generators and gradients as they were before a run; ``restore()`` gives them back.

    Each storage is copied before the first write to it: the copies take as much memory as the run
    writes.
    """

    _memory: _Memory = field(default_factory=dict)
    _generators: _Generators = field(default_factory=dict)
    _grads: _Grads = field(default_factory=dict)
    _versions: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    _shapes: dict[int, tuple[torch.Tensor, Shape]] = field(default_factory=dict)
    _plain: dict[int, torch.Tensor] = field(default_factory=dict)  # that no operator had made

    def note_write(self, tensor: torch.Tensor) -> None:
        """Copy the memory of ``tensor``, and keep how often it was written to, unless known."""
        self.note_memory(tensor.untyped_storage())
        if not tensor.is_inference() and id(tensor) not in self._versions:
            self._versions[id(tensor)] = tensor, tensor._version
        if not tensor.requires_grad or node_of(tensor) is None:
            self._plain[id(tensor)] = tensor

    def note_shape(self, tensor: torch.Tensor) -> None:
        """Keep the shape and place of ``tensor`` unless that was done before."""
        if id(tensor) not in self._shapes:
            self._shapes[id(tensor)] = tensor, shape_of(tensor)

    @property
    def tied(self) -> list[torch.Tensor]:
        """Those tensors that have become a part of an autograd graph."""
        return [x for x in self._plain.values() if x.requires_grad and node_of(x)]

    def note_memory(self, storage: torch.UntypedStorage) -> None:
        """Copy ``storage`` unless that was done before."""
        if storage._cdata not in self._memory:
            self._memory[storage._cdata] = storage, storage.clone()

    def has_noted(self, key: int) -> bool:
        """Return True if the memory that ``key`` names was copied."""
        return key in self._memory

    def note_generator(self, generator: torch.Generator, state: torch.Tensor | None = None) -> None:
        """Keep ``state``, or the present one, of ``generator`` unless that was done before."""
        if id(generator) not in self._generators:
            state = generator.get_state() if state is None else state
            self._generators[id(generator)] = generator, state

    def note_leaf(self, leaf: torch.Tensor) -> None:
        """Keep the ``grad`` of ``leaf`` unless that was done before."""
        entry = self._grads.get(id(leaf))
        if entry is None or entry[0]() is not leaf:
            self._grads[id(leaf)] = weakref.ref(leaf), leaf.grad

    @property
    def generators(self) -> Iterable[tuple[torch.Generator, torch.Tensor]]:
        """Each noted generator with the state that it had."""
        return self._generators.values()

    @property
    def grads(self) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Each noted leaf with the ``grad`` that it had."""
        for reference, grad in self._grads.values():
            leaf = reference()
            if leaf is not None:
                yield leaf, grad

    def effects(self) -> Effects:
        """Return what has changed since it was noted, to be held and put back as it is now."""
        tensors = {x.untyped_storage()._cdata: x for x, _ in self._versions.values()}
        generators = [generator for generator, _ in self._generators.values()]
        leaves = [leaf for leaf, grad in self.grads if leaf.grad is not grad]
        return Effects(tensors.values(), generators, leaves)

    def swap(self) -> None:
        """Swap the contents of memory, generators and shapes with those in the log.

        Storages that were resized since keep their content: all of it is new.
        """
        for key, (storage, other) in self._memory.items():
            if storage.nbytes() == other.nbytes():
                now = storage.clone()
                storage.copy_(other, non_blocking=True)
                self._memory[key] = storage, now
        noted = self._generators
        drawn = {number: (one, one.get_state()) for number, (one, _) in noted.items()}
        self._put_generators()
        self._generators = drawn
        if self._shapes:
            shapes = {key: (x, shape_of(x)) for key, (x, _) in self._shapes.items()}
            self._put_shapes()
            self._shapes = shapes
        before = {key: (tensor, tensor._version) for key, (tensor, _) in self._versions.items()}
        if before:
            self._put_versions()
        self._versions = before

    def _put_shapes(self) -> None:
        for tensor, shape in self._shapes.values():
            _reshape(tensor, shape)

    def _put_versions(self) -> None:
        """Put back all counts, the first that was noted last: a view shares that of its base."""
        entries = list(reversed(self._versions.values()))
        set_versions([x for x, _ in entries], [count for _, count in entries])

    def _put_generators(self) -> None:
        """Put back all states, the first that was noted last: two may stand for one generator."""
        for generator, state in reversed(self._generators.values()):
            put_state(generator, state)

    def restore(self) -> None:
        """Restore memory, generators and leaves, and clear the log."""
        for storage, content in self._memory.values():
            if storage.nbytes() == content.nbytes():
                storage.copy_(content, non_blocking=True)
        if self._generators:
            self._put_generators()
        for reference, grad in self._grads.values():
            leaf = reference()
            if leaf is not None and leaf.grad is not grad:
                leaf.grad = grad
        for tensor in self._plain.values():
            if tensor.requires_grad and node_of(tensor):  # ``tied``
                base = tensor._base
                (tensor if base is None else base).detach_()
        if self._shapes:
            self._put_shapes()
        if self._versions:
            self._put_versions()
        self.__init__()  # type: ignore[misc]
