"""Docstrings of the public names: Google sections for arguments and results."""

import inspect
from collections.abc import Iterator
from typing import Any

import commlib
from commlib import compat, export, flags, graph, ops
from commlib.compat import c10d, deepspeed, paddle
from commlib.ops import inference

MODULES: Any = (commlib, c10d, compat, deepspeed, export, flags, graph, inference, ops, paddle)
NOTHING = (None, "None", inspect.Signature.empty)


def functions() -> Iterator[tuple[str, Any]]:
    """Yield the functions of every ``__all__``, and the public methods of its classes."""
    for module in MODULES:
        for name in module.__all__:
            public = getattr(module, name)
            yield f"{module.__name__}.{name}", public
            if inspect.isclass(public):
                methods = [method for method in dir(public) if not method.startswith("_")]
                yield from ((f"{name}.{method}", getattr(public, method)) for method in methods)


def checked() -> dict[str, Any]:
    """Return each function of commlib once, without its decorators."""
    names: dict[Any, str] = {}
    for name, public in functions():
        function = inspect.unwrap(public) if callable(public) else public
        module = getattr(function, "__module__", "") or ""
        if inspect.isfunction(function) and module.startswith("commlib"):
            names.setdefault(function, name)
    return {name: function for function, name in names.items()}


def test_sections() -> None:
    """A headline that begins with Return says what is returned."""
    for name, function in checked().items():
        text, signature = inspect.getdoc(function) or "", inspect.signature(function)
        has_result = signature.return_annotation not in NOTHING
        assert "Args:" in text or not {*signature.parameters} - {"self"}, name
        returns = "Returns:" in text or "Yields:" in text or text.startswith("Return ")
        assert returns or not has_result, name
