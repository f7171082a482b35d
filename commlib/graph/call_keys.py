"""The keys of a captured function's calls: arguments, torch's modes, and what is around it."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from commlib.graph.calls.cache_key import Arguments, arguments, modes, without_arguments
from commlib.graph.calls.flattening import Flat, flatten
from commlib.graph.calls.grads import Grads
from commlib.graph.calls.key_values import value
from commlib.graph.calls.openable import Contents, changed
from commlib.graph.calls.tensor_places import AllPlaces, Places
from commlib.graph.operators.unsupported import check_untransformed
from commlib.graph.python.look_error import look_error
from commlib.graph.surroundings.surroundings import Surroundings

_NO_CALL = without_arguments(())
# Arguments that have separate surroundings, as the function has.
_SURROUNDED = (FunctionType, MethodType, partial, type, torch.nn.Module, torch.optim.Optimizer)


class Reach(NamedTuple):
    """Objects that a call can reach.

    Attributes:
        weights: Leaves.
        modules: Modules.
        stepped: Leaves of optimizers.
    """

    weights: Sequence[torch.Tensor]
    modules: Sequence[torch.nn.Module]
    stepped: Sequence[torch.Tensor]


class CallKeys:
    """Cache keys of the calls of one function.

    Attributes:
        around: Settings that the function reads from where it can reach.
        grads: The leaves whose gradients it uses: further inputs of each call.
        closed: Types of arguments that it changes: such an object counts as itself.
    """

    def __init__(
        self, fn: Callable[..., Any], key: Callable[..., Any] | None, max_graphs: int
    ) -> None:
        """``key``: the program's own part of the key."""
        self.around, self.grads = Surroundings(fn, max_graphs), Grads()
        self.closed: frozenset[type] = frozenset()
        self._fn, self._key, self._most = fn, key, max_graphs
        self._given: dict[Any, Surroundings] = {}  # of arguments, the last found at the end
        self._empty_call = _NO_CALL  # the last call without arguments

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return a call with its key.

        Raises ``GraphError`` inside a transform, where tensors have no address, and for an argument
        that no key can hold.
        """
        check_untransformed()
        flat: Flat | None = None
        leaves: Sequence[Any] = ()
        if args or kwargs:
            flat = flatten(args, kwargs, self.closed)
            is_plain = flat.shape.__class__ is int
            if not is_plain or any(getattr(x, "__dict__", 0) for x in flat.leaves):
                leaves = flat.visible
        weights = self.around.weights
        try:
            call_key = self.around.key(leaves)
            if self._given and leaves:
                for part in self._parts(leaves):
                    call_key, weights = (*call_key, *part.key(())), [*weights, *part.weights]
        except Exception as error:
            raise look_error(error) from error
        if weights and torch.is_grad_enabled():
            call_key = (*call_key, bytes([x.requires_grad for x in weights]))  # fast to hash
        if self._key is not None:
            call_key = (*call_key, value(self._key(*args, **kwargs)))
        if flat is not None:
            call = arguments(args, kwargs, flat, call_key, self.closed)
        else:
            key, call = modes() + call_key, self._empty_call
            if key != call.key:
                call = self._empty_call = without_arguments(key)
        return self.grads.extend(call) if self.grads.leaves else call

    def _parts(self, leaves: Iterable[Any]) -> list[Surroundings]:
        """Return what is around the functions and modules among the arguments of a call."""
        parts = (self._given.get(_identity(x)) for x in leaves if isinstance(x, _SURROUNDED))
        return [each for each in parts if each is not None]

    def find(self, leaves: Sequence[Any]) -> Reach:
        """Look for what is around the function; ``leaves``: the arguments of a call."""
        parts = [self.around]
        try:
            self.around.find(leaves)
            parts += [self._find_given(x, leaves) for x in leaves if isinstance(x, _SURROUNDED)]
        except Exception as error:
            raise look_error(error) from error
        weights = chain(*(each.weights for each in parts), self.grads.leaves)
        modules = chain(*(each.modules for each in parts))
        return Reach([*weights], [*modules], [*chain(*(each.stepped for each in parts))])

    def _find_given(self, x: Any, leaves: Sequence[Any]) -> Surroundings:
        """Look for what is around an argument; it counts in calls that get this argument."""
        name = _identity(x)
        part = self._given.get(name) or Surroundings(x, self._most)
        part.find((self._fn, *leaves))
        if part.is_needed:
            self._given[name] = part
        if len(self._given) > 2 * self._most:  # calls with the first one are captured again
            self._given.pop(next(iter(self._given)))
        return part

    def places(self, call: Arguments, uses: Callable[[int], bool]) -> Places:
        """Return where tensors are now; ``uses``: returns True for memory that counts."""
        addrs = self.around.places(call.tensors, uses)
        if not self._given:
            return addrs
        return AllPlaces([addrs, *(x.places(call.tensors, uses) for x in self._parts(call.leaves))])

    def before_call(self, call: Arguments, opened: Contents) -> Callable[[], None]:
        """Look at what is around a call.

        Args:
            call: The call.
            opened: Its objects that can be opened, with what they hold now.

        Returns:
            What to call after it: it leaves out of keys what the call has changed.
        """
        objects = [*call.leaves, *(x for x, _ in opened)]
        looks = [(self.around, objects), *((x, ()) for x in self._parts(call.leaves))]
        try:
            before = [x.all_facts(contents, look_again=False) for x, contents in looks]
        except Exception as error:
            raise look_error(error) from error

        def after_call() -> None:
            try:
                for (x, contents), facts in zip(looks, before, strict=True):
                    x.after_call(contents, facts)
            except Exception as error:
                raise look_error(error) from error
            self.closed |= set(changed(opened))

        return after_call


def _identity(x: Any) -> Any:
    """Return what tells an argument from another; Python makes a method at each access."""
    return (id(x.__self__), id(x.__func__)) if isinstance(x, MethodType) else id(x)
