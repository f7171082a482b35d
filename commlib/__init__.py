"""One set of communicators for eager, compiled and captured code, under the old call sites.

``init()`` makes ring 0, ``new_ring()`` makes others, and ``comm()`` returns a ring. ``ops`` has the
operators, ``graph`` captures functions, ``compat`` has the old dialects, ``errors`` what is raised.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from commlib import errors, flags, ops
from commlib.core import bridge
from commlib.core.context import CommContext
from commlib.core.manager import CommContextManager, comm
from commlib.core.rings.opening import close_ring, init, new_ring, shutdown
from commlib.core.work import Work
from commlib.version import __version__ as __version__

if TYPE_CHECKING:
    from commlib import compat, export, graph
    from commlib.compat.c10d import ring_from_group

__all__ = [
    "CommContext",
    "CommContextManager",
    "Work",
    "close_ring",
    "comm",
    "compat",
    "errors",
    "export",
    "flags",
    "graph",
    "init",
    "new_ring",
    "ops",
    "ring_from_group",
    "shutdown",
]


def _process_group_of(ring: Any) -> Any:
    """Return the process group of a ring; the first call imports the backend "commlib"."""
    return import_module("commlib.compat.c10d").process_group_of(ring)


bridge.use(_process_group_of)


def __dir__() -> list[str]:
    """List the public names, also of the modules that are imported when they are used."""
    return [*__all__, "__version__"]


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Import what `import commlib` leaves out, when it is used."""
        if name == "ring_from_group":
            return import_module("commlib.compat.c10d").ring_from_group
        if name in ("compat", "export", "graph"):
            return import_module(f"commlib.{name}")
        raise AttributeError(f"module 'commlib' has no attribute {name!r}")
