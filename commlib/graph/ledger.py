"""What one run of a function touches: tensors from outside, writes, random numbers, collectives."""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from commlib import _observers
from commlib._ring import Ring
from commlib.graph.generators import Drawn, default_generator
from commlib.graph.overlap import Span, span
from commlib.graph.refuse import (
    Values,
    refuse_borrowed,
    refuse_reshaping,
    refuse_seeding,
    refuse_stray,
    refuse_sync,
    user_line,
)

_aten = torch.ops.aten
_NO_KERNEL = {
    _aten.empty.memory_format,
    _aten.empty_strided.default,
    _aten.empty_like.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_BY_OUTPUT = ("scatter", "broadcast")  # the input is the root's alone
_OWN_ITEMS = ("all_to_all", "exchange_rows", "send", "recv")  # differ between ranks
PEER_TO_PEER = ("send", "recv")  # the other ranks do not make them


class Step(NamedTuple):
    """One operator, with the memory of the tensors that it took and gave, and their shapes then."""

    call: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[tuple[int, torch.Tensor], ...]  # outputs with memory of their own, by position
    grad: bool = False  # whether autograd was on: some operators return more then


class Collective(NamedTuple):
    """One call of a ring's verb, in the terms that all ranks must share."""

    ring: Ring
    verb: str
    dtype: str
    items: int
    rest: str  # reduction, root or peer
    where: str

    def __str__(self) -> str:
        return f"{self.verb} of {self.items} x {self.dtype}{self.rest} on ring {self.ring.ring_id}"


class Ledger(TorchDispatchMode):
    """Records a run; ``with Ledger(device) as seen: fn()``.

    Refuses what can't stand in a graph before it runs: ``GraphError`` with operator and line. With
    ``keep=True`` every step stays, with its tensors, to be run again. Before the first write to a
    tensor from outside its memory is copied: ``restore()`` puts it back.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        keep: bool = False,
        drawn: Sequence[torch.Generator] | None = None,
    ) -> None:
        """``drawn``: the generators that the run before has drawn from, where there was one."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._drawn = drawn
        self.device, self.keep = device, keep
        self.names: list[str] = []  # operators, in order
        self.launches = 0  # those that compute something, as views and new memory don't
        self.steps: list[Step] = []
        self.collectives: list[Collective] = []
        self.externals: dict[int, torch.Tensor] = {}  # by memory
        self.saved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage | None]] = {}
        self.generators: dict[int, tuple[torch.Generator, torch.Tensor | None]] = {}
        self.made: dict[int, StorageWeakRef] = {}
        self.leaves: dict[int, weakref.ref[torch.Tensor]] = {}  # that want a gradient, by id
        self.computed: list[torch.Tensor] = []  # those from outside that autograd has made
        self._without_grad: list[weakref.ref[torch.Tensor]] = []
        self._nested = self._capturing = False
        self._save = True
        self._borrowed: set[int] = set()  # memory of arrays that the function has made tensors of
        self._given: dict[int, weakref.ref[torch.Tensor]] = {}  # by an operator of this run, by id
        self._left: dict[int, Drawn] = {}  # by generator
        self.read: dict[int, Span] = {}  # addresses, by memory that is touched and not just viewed
        self.wrote: dict[int, Span] = {}
        reading = Values() if device.type == "cpu" else nullcontext()
        self._reading: AbstractContextManager[object] = reading

    # -- watching ----------------------------------------------------------------------------------

    def __enter__(self) -> "Ledger":
        if not self._capturing:
            for generator in (default_generator(self.device), *(self._drawn or ())):
                self._leave(generator)
        _observers.observers.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        self._reading.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reading.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        _observers.observers.remove(self)
        if kind is None and not self._capturing:
            for generator, _ in self.generators.values():
                self._check_generator(generator)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _aten.lift_fresh.default:
            func = self._literal(args[0])
        tensors = list(_tensors((args, kwargs)))
        refuse_sync(func, args, kwargs, self.device)
        for tensor in tensors:
            self._know(tensor)
        reshapes = torch.Tag.inplace_view in func.tags
        if reshapes and not self._own(args[0]):
            refuse_reshaping(func)
        written = list(_written(func, args, kwargs))
        if not _only_views(func):
            for tensor in tensors:
                self._touch(self.read, tensor)
        for tensor in written:
            self._touch(self.wrote, tensor)
            if tensor.untyped_storage()._cdata in self._borrowed:
                refuse_borrowed(func)
            self._before_write(tensor)
        generator = self._note_random(func, kwargs)
        given = args, kwargs
        if self.keep:  # as they are now: the function may give them another shape later
            given = tree_map_only(torch.Tensor, self._as_it_is, given)
        with self._inside():
            result = func(*args, **kwargs)
        if generator is not None:
            self._leave(generator)
        made = tuple((i, t) for i, t in enumerate(_tensors(result)) if self._new(t, tensors))
        if self._capturing:
            refuse_stray(func, (*(tensor for _, tensor in made), *written))
        for _, tensor in made:
            memory = tensor.untyped_storage()
            self.made[memory._cdata] = StorageWeakRef(memory)
        if func is not _aten.detach.default:  # torch makes some more where a result is held
            self.names.append(str(func))
        if func not in _NO_KERNEL and any(t.numel() for t in (*(t for _, t in made), *written)):
            self.launches += 1
        for tensor in _tensors(result):
            self._given[id(tensor)] = weakref.ref(tensor)
        if self.keep and not reshapes:
            kept = tuple((i, self._as_it_is(tensor)) for i, tensor in made)
            self.steps.append(Step(func, *given, kept, torch.is_grad_enabled()))
        return result

    def before(self, call: _observers.Seen) -> None:
        """Note a collective; the gate says so before it launches."""
        for known in _tensors((call.x, call.out, call.args)):
            self._know(known)
            self._touch(self.read, known)
        if call.out is not None:
            self._touch(self.wrote, call.out)
            self._before_write(call.out)
        tensor = call.out if call.x is None or call.verb in _BY_OUTPUT else call.x
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        items = 0 if tensor is None or call.verb in _OWN_ITEMS else tensor.numel()
        rest = "".join(f", {part}" for part in _shared(call.args))
        found = Collective(call.ring, call.verb, dtype, items, rest, user_line())
        self.collectives.append(found)
        if self.keep and not self._nested:
            self.steps.append(Step(call.again, (), {}, ()))

    def _literal(self, x: torch.Tensor) -> Any:
        """Return the operator that makes the tensor of ``torch.tensor([...])`` at each call.

        It copies from what nobody can write to. Memory that is shared (``torch.as_tensor`` of an
        array) may be new or not: it is read where it lies.
        """
        if x.untyped_storage().resizable():
            return _aten.clone.default
        self._borrowed.add(x.untyped_storage()._cdata)
        return _aten.lift_fresh.default

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """While an operator runs, a collective inside it is no step of its own."""
        before, self._nested = self._nested, True
        try:
            with _observers.still_watched(self):
                yield
        finally:
            self._nested = before

    # -- memory ------------------------------------------------------------------------------------

    def _know(self, tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key in self.made:
            return
        if tensor.is_leaf and tensor.requires_grad:
            self._know_leaf(tensor)
        computed = tensor.grad_fn is not None and self._save and not self._own(tensor)
        if computed and all(tensor is not other for other in self.computed):
            self.computed.append(tensor)
        if key not in self.externals:  # its memory is what counts, not what it was computed from
            self.externals[key] = tensor if tensor.grad_fn is None else tensor.detach()

    def _touch(self, spans: dict[int, Span], tensor: torch.Tensor) -> None:
        key = tensor.untyped_storage()._cdata
        if key not in self.made and tensor.numel():
            begin, end = span(tensor)
            low, high = spans.get(key, (begin, end))
            spans[key] = min(low, begin), max(high, end)

    def _own(self, tensor: torch.Tensor) -> bool:
        """Whether an operator of this run has given the tensor, if only a view."""
        known = self._given.get(id(tensor))
        return known is not None and known() is tensor

    def _as_it_is(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return another tensor over the same memory, for a replay.

        Autograd is to know of writes to what lies outside, not of those to the graph's own memory:
        that is right again when a backward reads it.
        """
        with torch._C.DisableTorchFunctionSubclass():
            own = tensor.untyped_storage()._cdata in self.made
            return tensor.data if own else tensor.detach()

    def _know_leaf(self, tensor: torch.Tensor) -> None:
        """Several leaves may lie in one memory, as in flat buffers; the function's own go again."""
        known = self.leaves.get(id(tensor))
        if known is None or known() is None:
            self.leaves[id(tensor)] = reference = weakref.ref(tensor)
            if tensor.grad is None:
                self._without_grad.append(reference)

    def _new(self, tensor: torch.Tensor, given: Iterable[torch.Tensor]) -> bool:
        key = tensor.untyped_storage()._cdata
        return all(key != other.untyped_storage()._cdata for other in given)

    def _before_write(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.made or storage._cdata in self.saved:
            return
        self.saved[storage._cdata] = storage, storage.clone() if self._save else None

    def in_capture(self) -> "Ledger":
        """Note writes but copy nothing, and refuse what runs on a stream outside the capture."""
        self._capturing = True
        return self.without_saving()

    def without_saving(self) -> "Ledger":
        """Note writes but copy nothing: what this run does is to stay."""
        self._save = False
        return self

    def save_again(self) -> None:
        """Take once more what ``restore()`` puts back, for a run that is not watched."""
        self.saved = {key: (memory, memory.clone()) for key, (memory, _) in self.saved.items()}
        self.generators = {key: (x, x.get_state()) for key, (x, _) in self.generators.items()}

    def new_grads(self) -> list[torch.Tensor]:
        """Return the leaves whose ``grad`` was None before the run and is not now."""
        known = (reference() for reference in self._without_grad)
        return [tensor for tensor in known if tensor is not None and tensor.grad is not None]

    def new_history(self) -> list[torch.Tensor]:
        """Return the tensors from outside that the run has made a part of its autograd graph."""
        written = self.saved.keys() - self.made.keys()  # an operator has written what it returns
        return [x for key, x in self.externals.items() if key in written and x.grad_fn]

    def restore(self) -> None:
        """Put back what memory from outside, and generators, held before the run."""
        for storage, content in self.saved.values():
            # An out= that a result did not fit into has other memory now, all of it written.
            if content is not None and content.nbytes() == storage.nbytes():
                storage.copy_(content, non_blocking=True)
        self.saved = {key: (storage, None) for key, (storage, _) in self.saved.items()}
        for generator, state in self.generators.values():
            if state is not None:
                generator.set_state(state)
        for tensor in self.new_grads():
            tensor.grad = None
        for tensor in self.new_history():
            base = tensor._base
            (tensor if base is None else base).detach_()

    @property
    def rings(self) -> list[Ring]:
        """The rings of the collectives, by number."""
        found = {call.ring.ring_id: call.ring for call in self.collectives}
        return [found[number] for number in sorted(found)]

    def _note_random(self, func: Any, kwargs: Any) -> torch.Generator | None:
        """Return the generator of an operator that draws numbers, and know its state before.

        None in a capture, where it has no state that could be asked.
        """
        generator = kwargs.get("generator")
        if generator is None and torch.Tag.nondeterministic_seeded in func.tags:
            generator = default_generator(kwargs.get("device") or self.device)
        if not isinstance(generator, torch.Generator):
            return None
        if not self._capturing:
            if self._drawn is not None and id(generator) not in self._left:
                refuse_seeding()  # the function makes one at each call
            self._check_generator(generator)
        if id(generator) not in self.generators:
            state = generator.get_state() if self._save else None
            self.generators[id(generator)] = generator, state
        return None if self._capturing else generator

    def _leave(self, generator: torch.Generator) -> None:
        self._left.setdefault(id(generator), Drawn(generator)).leave()

    def _check_generator(self, generator: torch.Generator) -> None:
        """Refuse a run that sets a generator it draws from: a graph draws on from where it is."""
        drawn = self._left.get(id(generator))
        if drawn is not None and drawn.was_set():
            self.generators.setdefault(id(generator), (generator, drawn.begun))  # to be put back
            refuse_seeding()


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _only_views(func: Any) -> bool:
    """Whether an operator gives its input in another form, and reads none of it."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    returned = [each.alias_info for each in func._schema.returns]
    return any(returned) and not any(alias is not None and alias.is_write for alias in aliases)


_STATISTICS = ("running_mean", "running_var")  # that batch norms write, and most don't say so


def _written(func: Any, args: Sequence[Any], kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator writes to, by its schema and beside it."""
    arguments = func._schema.arguments
    values = {
        argument.name: args[i] if i < len(args) else kwargs.get(argument.name)
        for i, argument in enumerate(arguments)
    }
    learns = values.get("training", values.get("train", True))
    for argument in arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes or (argument.name in _STATISTICS and learns):
            yield from _tensors(values[argument.name])


def _shared(args: Sequence[Any]) -> Iterator[str]:
    """Yield what of a call's arguments all ranks have in common: root, reduction."""
    for arg in args:
        if isinstance(arg, int):
            yield str(arg)
        elif hasattr(arg, "op"):
            yield f"op {getattr(arg, 'name', None) or str(arg.op).rpartition('.')[2].lower()}"
