"""The way in which this process ends: normally, or because something failed."""

import sys
from typing import Any, NoReturn

_watching = False
_status: Any = None


def watch_exit() -> None:
    """Remember the argument of ``sys.exit``, which Python does not show to exit handlers."""
    global _watching
    if _watching:
        return
    _watching, original = True, sys.exit

    def exit(status: Any = None, /) -> NoReturn:
        global _status
        _status = status
        original(status)

    exit.__doc__ = original.__doc__
    sys.exit = exit


def is_failing() -> bool:
    """Return True in an exit handler if an exception or ``sys.exit(1)`` ends the process.

    Python sets ``sys.last_exc`` or ``sys.last_value`` before it reports an exception that no code
    caught, KeyboardInterrupt included.
    """
    uncaught = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    return uncaught is not None or _status not in (None, 0)
