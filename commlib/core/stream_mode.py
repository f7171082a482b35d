"""The stream mode of a call: which stream it runs on, and which streams wait."""

from typing import Any, NamedTuple


class StreamMode(NamedTuple):
    """The order of a collective with the caller's current stream.

    Attributes:
        use_calc_stream: It runs on the current stream; else on the ring's comm stream.
        sync_op: The current stream waits for it; else the call returns a ``Work``.
        fenced: The comm stream waits for the current one first, and is waited for.
        blocks: Most blocks of a push kernel; 0 for no limit.
        seconds: The call's own deadline; None for the ring's.
    """

    use_calc_stream: bool
    sync_op: bool
    fenced: bool
    blocks: int = 0
    seconds: float | None = None


class _Modes(dict[tuple[bool, bool, bool], StreamMode]):
    def __missing__(self, options: tuple[Any, Any, Any]) -> StreamMode:
        """Return the mode of options that are truthy or falsy but not bool."""
        use_calc_stream, sync_op, fenced = options
        return self[bool(use_calc_stream), bool(sync_op), bool(fenced)]


_BOOLS = False, True
# By use_calc_stream, sync_op and fenced; one object per mode without a limit of blocks.
MODES = _Modes({(a, b, c): StreamMode(a, b, c) for a in _BOOLS for b in _BOOLS for c in _BOOLS})
