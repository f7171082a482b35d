"""The keys of a captured function's calls: arguments, torch's modes, and what is around it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commlib.graph.calls.cache_key import Arguments, arguments, modes, without_arguments
from commlib.graph.calls.flattening import Flat, flatten
from commlib.graph.calls.grads import Grads
from commlib.graph.calls.key_values import value
from commlib.graph.calls.openable import changed, contents
from commlib.graph.operators.unsupported import check_untransformed
from commlib.graph.python.look_error import look_error
from commlib.graph.surroundings import Surroundings

_EMPTY: Flat = flatten((), {}, frozenset())


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
        self._key = key
        self._empty_call = without_arguments(())  # the last call without arguments

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Return a call with its key.

        Raises ``GraphError`` inside a transform, where tensors have no address, and for an argument
        that no key can hold.
        """
        check_untransformed()
        flat = _EMPTY
        if args or kwargs:
            flat = flatten(args, kwargs, self.closed)
        try:
            own = self.around.key(() if flat.shape.__class__ is int else flat.visible)
        except Exception as error:
            raise look_error(error) from error
        weights = self.around.weights
        if weights and torch.is_grad_enabled():
            own = (*own, *[x.requires_grad for x in weights])
        if self._key is not None:
            own = (*own, value(self._key(*args, **kwargs)))
        if args or kwargs:
            call = arguments(args, kwargs, flat, own, self.closed)
        else:
            key, call = modes() + own, self._empty_call
            if key != call.key:
                call = self._empty_call = without_arguments(key)
        return self.grads.extend(call) if self.grads.leaves else call

    def find(self, leaves: Sequence[Any]) -> None:
        """Look for what is around the function; ``leaves``: the arguments of a call."""
        try:
            self.around.find(leaves)
        except Exception as error:
            raise look_error(error) from error

    def before_call(self, call: Arguments) -> Callable[[], None]:
        """Look at what is around a call, and what its objects hold.

        Returns:
            What to call after it: it leaves out of keys what the call has changed.
        """
        opened = contents(*call.given)
        objects = [*call.leaves, *(x for x, _ in opened)]
        try:
            before = self.around.all_facts(objects, look_again=False)
        except Exception as error:
            raise look_error(error) from error

        def after_call() -> None:
            try:
                self.around.after_call(objects, before)
            except Exception as error:
                raise look_error(error) from error
            self.closed |= set(changed(opened))

        return after_call
