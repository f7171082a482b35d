"""Captured functions as methods: each owner gets its own one, with its own graphs."""

import types
from typing import Any


def bound(captured: Any, owner: Any, of_classes: dict[type, Any]) -> Any:
    """Return a captured function bound to ``owner``, where the next look-up finds it, too.

    A module's graphs go when the module goes, and its parameters are found through it.
    ``of_classes``: those bound by ``classmethod``, to which this adds.
    """
    method = types.MethodType(captured.fn, owner)
    if isinstance(owner, type):  # ``classmethod`` binds to a class, whose attribute it is
        if owner not in of_classes:
            of_classes[owner] = type(captured)(method, captured.options)
        return of_classes[owner]
    bound_fn = type(captured)(method, captured.options)
    try:  # found before the descriptor from now on
        object.__setattr__(owner, captured.fn.__name__, bound_fn)
    except AttributeError:
        return bound_fn  # no place for it: each access captures again
    return bound_fn
