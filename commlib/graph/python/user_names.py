"""Names in messages: those that the program has given, not those of wrappers."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from commlib.graph.python.reach import is_captured

_wraps: Callable[[type], bool] = lru_cache(maxsize=10_000)(is_captured)


def users_own(x: Any) -> Any:
    """Return the function or module that a captured one wraps, else ``x`` itself."""
    while _wraps(type(x)):
        x = x.__commlib_captures__
    return x


def function_name(fn: Any) -> str:
    """Return the name of a function, or of the class of a module."""
    fn = users_own(fn) if _wraps(type(fn)) else fn
    return str(getattr(fn, "__qualname__", type(fn).__qualname__))


def kind_name(x: Any) -> str:
    """Return the name of an object's class."""
    kind = type(x)
    return type(users_own(x)).__name__ if _wraps(kind) else kind.__name__
