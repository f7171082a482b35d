"""Old dialects over commlib: one module per dialect, one statement per call."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from commlib.compat import c10d, deepspeed, paddle, torch_distributed

__all__ = ["c10d", "deepspeed", "paddle", "torch_distributed"]


def __dir__() -> list[str]:
    """List the dialects, also those that are not imported yet."""
    return [*__all__]


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Import a dialect when it is used."""
        if name in __all__:
            return import_module(f"commlib.compat.{name}")
        raise AttributeError(f"module 'commlib.compat' has no attribute {name!r}")
