"""The options of `capture`, and what it takes."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

import torch

from commlib.errors import GraphError
from commlib.graph.python.user_names import function_name

First: TypeAlias = Literal["once", "warmup"]
Memory: TypeAlias = Literal["borrow", "copy"]
Gradients: TypeAlias = Literal["accumulate", "borrow", "copy"]
OnFail: TypeAlias = Literal["raise", "eager"]


_CHOICES = {
    "first": ("once", "warmup"),
    "inputs": ("borrow", "copy"),
    "outputs": ("borrow", "copy"),
    "gradients": ("accumulate", "borrow", "copy"),
    "on_fail": ("raise", "eager"),
}
_WHOLE = {
    "warmup": "1 or more runs before the capture",
    "max_graphs": "1 or more",
    "slots": "1 or more, or None",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """The checked options of one captured function; ``capture`` documents them."""

    key: Callable[..., Any] | None = None
    warmup: int = 2
    first: First = "once"
    inputs: Memory = "borrow"
    outputs: Memory = "borrow"
    gradients: Gradients = "copy"
    agree: int | None = None
    on_fail: OnFail = "raise"
    verify: bool | int | str | None = None
    tolerance: tuple[float, float] | None = None
    max_graphs: int = 64
    slots: int | None = None

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                *others, last = map(repr, choices)
                expected = f"{', '.join(others)} or {last}"
                raise GraphError(f"{name}={value!r}: expected {expected}")
        if self.tolerance is not None and not _are_two_numbers(self.tolerance):
            raise GraphError(f"tolerance={self.tolerance!r}: expected (rtol, atol), both 0 or more")
        for name, expected in _WHOLE.items():
            value = getattr(self, name)
            is_int = isinstance(value, int) and not isinstance(value, bool)
            if not (is_int and value >= 1) and not (name == "slots" and value is None):
                raise GraphError(f"{name}={value!r}: expected {expected}")

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Options":
        """Return the options of a program. Raises ``GraphError`` for an unknown one."""
        names = [field.name for field in fields(cls)]
        for name in options:
            if name not in names:
                raise GraphError(f"capture() has no option {name!r}; it has {', '.join(names)}")
        return cls(**options)


def _are_two_numbers(x: Any) -> bool:
    if not isinstance(x, (tuple, list)) or len(x) != 2:
        return False
    return all(isinstance(each, (int, float)) and each >= 0 for each in x)


def check_function(fn: Any) -> None:
    """Raise ``GraphError`` for what can't be called, and for what is async."""
    if not callable(fn):
        raise GraphError(f"capture({fn!r}): expected a function or a module")
    while isinstance(fn, functools.partial):
        fn = fn.func
    kind: Any = type(fn)
    for each in (fn, fn.forward if isinstance(fn, torch.nn.Module) else kind.__call__):
        if inspect.iscoroutinefunction(each) or inspect.isasyncgenfunction(each):
            raise GraphError(
                f"{function_name(fn)} is an async function, whose steps no graph can hold; capture "
                f"the function that it awaits"
            )
