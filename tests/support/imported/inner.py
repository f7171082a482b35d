"""A module of settings, and functions that use them."""

from types import SimpleNamespace
from typing import Any

from tests.support import imported

scale = 1.0
box = SimpleNamespace(scale=1.0)


def by_global(x: Any) -> Any:
    """Return a multiple by a number of this module."""
    return x * scale


def by_object(x: Any) -> Any:
    """Return a multiple by an attribute of an object of this module."""
    return x * box.scale


def by_package(x: Any) -> Any:
    """Return a multiple by a number of the package, through a module that leads back."""
    return x * imported.inner.imported.scale  # type: ignore[attr-defined]


def by_relative_import(x: Any) -> Any:
    """Return a multiple by a number of the package."""
    from . import scale

    return x * scale
