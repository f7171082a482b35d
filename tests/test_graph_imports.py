"""Settings in modules that a captured function names, or imports where it runs."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from commlib import graph
from tests.support import imported
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.imported import inner


def named(x: Any) -> Any:
    """Read a number of a global module."""
    return x * imported.scale


def chain(x: Any) -> Any:
    """Read a number through modules."""
    return x * imported.inner.scale


def dotted(x: Any) -> Any:
    """Import a module by a name with dots, which names its package."""
    import tests.support.imported.inner

    return x * tests.support.imported.inner.scale


def package_of_dotted(x: Any) -> Any:
    """Read what the import has made readable on the way."""
    import tests.support.imported.inner

    return x * tests.support.imported.scale


def renamed(x: Any) -> Any:
    """Import a module under another name."""
    import tests.support.imported.inner as other

    return x * other.scale


def taken(x: Any) -> Any:
    """Import a number."""
    from tests.support.imported.inner import scale

    return x * scale


def function(x: Any) -> Any:
    """Call a function through its module."""
    return inner.by_global(x)


def imported_function(x: Any) -> Any:
    """Import a function that reads an object."""
    from tests.support.imported.inner import by_object

    return by_object(x)


def relative(x: Any) -> Any:
    """Call a function that imports from its own package."""
    return inner.by_relative_import(x)


def back(x: Any) -> Any:
    """Read through modules that lead to each other."""
    return inner.by_package(x)


def in_closure() -> Callable[[Any], Any]:
    """Return a function that reads a module of its closure."""
    module = imported
    return lambda x: x * module.scale


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    yield
    imported.scale = inner.scale = inner.box.scale = 1.0


@pytest.mark.parametrize(
    ("fn", "where"),
    [
        (named, imported),
        (chain, inner),
        (dotted, inner),
        (package_of_dotted, imported),
        (renamed, inner),
        (taken, inner),
        (function, inner),
        (imported_function, inner.box),
        (relative, imported),
        (back, imported),
        (in_closure(), imported),
    ],
)
def test_settings_of_modules(fn: Any, where: Any) -> None:
    g = graph.capture(fn, outputs="copy", verify=False)
    for value in (1.0, 1.0, 1.0, 3.0, 3.0, 1.0):
        where.scale = value
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), value), f"value {value}")
    assert_equal((len(g.entries), g.entries.replays), (2, 4), "graphs and replays")


def test_a_module_that_the_first_call_imports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not there when the search for settings begins."""
    (tmp_path / "imported_late.py").write_text("scale = 1.0")
    monkeypatch.syspath_prepend(tmp_path)

    def f(x: Any) -> Any:
        import imported_late  # type: ignore[import-not-found]

        return x * imported_late.scale

    g = graph.capture(f, outputs="copy", verify=False)
    for turn in range(6):
        value = 3.0 if turn > 2 else 1.0
        if turn:
            sys.modules["imported_late"].scale = value  # type: ignore[attr-defined]
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), value), f"value {value}")
