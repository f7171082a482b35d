"""Names outside a function that each call binds, and that a replay binds in its place."""

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from commlib.core.tensors import is_wrapper
from commlib.errors import GraphError
from commlib.graph.calls.lasting import Lasting, hides
from commlib.graph.calls.leaves import leaves_of
from commlib.graph.calls.no_gradient import no_gradient
from commlib.graph.calls.outputs import Outputs, flat, leads_back
from commlib.graph.operators.schema import memory
from commlib.graph.python.changes import Change, Place
from commlib.graph.python.user_names import kind_name
from commlib.graph.watching.recorder import Recorder


class Kept(NamedTuple):
    """A value that the first call has bound to a name, and that later runs have left there.

    Attributes:
        where: In which object.
        name: Under which name.
        place: How it is bound.
        position: Which argument it is, or None.
        value: A plain value, or a weak reference to a tensor of the program.
    """

    where: int
    name: str
    place: Place
    position: int | None
    value: Any


def kept(change: Change, given: Sequence[torch.Tensor]) -> Kept:
    """Return what a call with the tensors ``given`` has bound."""
    now = change.now
    if not isinstance(now, torch.Tensor):
        return Kept(change.where, change.name, change.place, None, now)
    position = next((i for i, x in enumerate(given) if x is now), None)
    value = weakref.ref(now) if position is None else None
    return Kept(change.where, change.name, change.place, position, value)


def holds_tensor(x: Any) -> bool:
    """Return True for a tensor, and for what unfolds into tensors among others."""
    return any(isinstance(leaf, torch.Tensor) for leaf in leaves_in(x))


def leaves_in(x: Any) -> list[Any]:
    """Return the leaves of what a name is bound to."""
    if isinstance(x, torch.Tensor):
        return [x]
    try:
        return flat(x)[0]
    except GraphError:  # an object that holds itself
        return [x]


def check_hidden(changes: Sequence[Change], own: Callable[[torch.Tensor], bool]) -> None:
    """Raise ``GraphError`` for a name bound to an object that hides tensors of the graph."""
    for x in changes:
        for leaf in leaves_in(x.now):
            plain = isinstance(leaf, (torch.Tensor, Iterator))
            if not plain and hides(leaf, own):
                raise GraphError(
                    f"the function binds {x.name} to a {kind_name(leaf)}, in which no "
                    f"replay could put new tensors; bind the tensors themselves, or return them"
                )


def check_gradients(
    result: Iterable[object],
    changes: Iterable[Change],
    inputs: Sequence[torch.Tensor],
    recorder: Recorder,
) -> None:
    """Raise ``GraphError`` for a tensor whose ``grad`` the program would miss after a replay.

    Args:
        result: The leaves of what the function returns.
        changes: What it binds to names.
        inputs: What it was given.
        recorder: What it has touched.
    """
    handed = [("returns", x) for x in result]
    handed += [(f"binds {each.name} to", x) for each in changes for x in leaves_in(each.now)]
    tensors = [(does, x) for does, x in handed if isinstance(x, torch.Tensor) and x.requires_grad]
    touched, input_ids = recorder.memory, {id(x) for x in inputs}
    storages = {*touched.made, *map(memory, inputs)}
    reached = {id(x) for x in leaves_of(x for _, x in tensors if leads_back(x))}
    for does, x in tensors:
        if x.retains_grad:
            raise GraphError(
                f"the function {does} a tensor whose gradient it retains, and a replay would not; "
                f"return the tensor, and call retain_grad() on what the call returns"
            )
        made = id(x) not in input_ids and (memory(x) in storages or touched.has_given(x))
        if made and x.is_leaf and (x.grad is not None or id(x) in reached):
            raise GraphError(
                f"the function {does} a leaf that it makes, and a replay would not give it the "
                f"gradient that the function gives it; pass it as an argument that requires grad, "
                f"or hand out x.detach()"
            )


class Bindings:
    """Names that each call binds, with their values."""

    def __init__(
        self,
        made: Sequence[Change],
        left: Sequence[Kept],
        inputs: Sequence[torch.Tensor],
        own: Callable[[torch.Tensor], bool],
        lasting: Lasting,
    ) -> None:
        """Store what is bound.

        Args:
            made: What the capture has bound otherwise than the run before it.
            left: What the first call has bound, and the runs after it have left.
            inputs: What stood for the arguments in the capture.
            own: Says whether a tensor's memory is the graph's.
            lasting: The objects of the program.
        """
        names = {(x.where, x.name) for x in made}
        left = [x for x in left if (x.where, x.name) not in names]
        values = [_own_past(x.now) for x in made]
        bound = [(x.place, value) for x, value in zip(made, values, strict=True)]
        bound += [(x.place, inputs[x.position]) for x in left if x.position is not None]
        others = [x for x in left if x.position is None]
        self._others = [x for x in others if isinstance(x.value, weakref.ref)]
        self._plain = [x for x in others if not isinstance(x.value, weakref.ref)]
        self._places = [binding for binding, _ in bound]
        self.names = names | {(x.where, x.name) for x in left}
        # The program may keep what a name was bound to.
        named = [now for _, now in bound]
        self._named = Outputs(named, inputs, own, lasting, copy=True) if named else None
        self._lead = [] if self._named is None else _leading(made, values, self._named.made(named))

    def tensors(self) -> list[torch.Tensor | None]:
        """Return the program's tensors that are to be bound; None for one that it has released."""
        return [x.value() for x in self._others]

    def memory(self) -> Iterator[int]:
        """Yield keys of the memory of these tensors."""
        for tensor in self.tensors():
            if tensor is not None:
                yield memory(tensor)

    def now(self) -> list[Any]:
        """Return what the names are bound to."""
        places = (*self._places, *(x.place for x in (*self._others, *self._plain)))
        return [binding.read() for binding in places]

    def check(self, before: Sequence[Any]) -> None:
        """Raise ``GraphError`` if an eager part has bound one of the names since ``before``."""
        if any(now is not was for now, was in zip(self.now(), before, strict=True)):
            raise GraphError(
                "the function and an eager part of it both bind a name outside; bind it in one of "
                "them. The effects of the call were kept: do not repeat it",
                done=True,
            )

    def bind(self, tensors: Sequence[torch.Tensor], result: Any) -> None:
        """Bind all of it, as a call with ``tensors`` does that returns ``result``."""
        if self._named is not None:
            join = functools.partial(self._join, result) if any(self._lead) else None
            named = self._named.give(tensors, "", join)
            for binding, tensor in zip(self._places, named, strict=True):
                binding.bind(tensor)
        for x in self._others:
            _bind(x.place, x.value())
        for x in self._plain:
            _bind(x.place, x.value)

    def _join(self, result: Any, made: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return what a replay has made, with what requires grad as in eager code."""
        sources = [x for x in flat(result)[0] if leads_back(x)]
        pairs = zip(made, self._lead, strict=True)
        return [no_gradient(x, name, sources) if name else x for x, name in pairs]


def _leading(
    made: Sequence[Change], values: Sequence[Any], tensors: Sequence[torch.Tensor]
) -> list[str]:
    """Return the names of those ``tensors`` through which gradients flow in eager code.

    Args:
        made: What the capture has bound.
        values: The same, where a wrapper has no past.
        tensors: What a replay makes for it; "" is the name of one without gradients.
    """
    names = {}
    for change, value in zip(made, values, strict=True):
        for leaf, value_leaf in zip(leaves_in(change.now), leaves_in(value), strict=True):
            if leads_back(leaf):
                names[id(value_leaf)] = change.name
    return [names.get(id(tensor), "") for tensor in tensors]


def _own_past(x: Any) -> Any:
    """Return a wrapper without its past, which no replay could give it."""
    return x.detach() if isinstance(x, torch.Tensor) and is_wrapper(x) else x


def _bind(place: Place, what: object) -> None:
    if place.read() is not what:
        place.bind(what)
