"""The stream mode of a call: which stream it runs on, and which streams wait."""

from typing import NamedTuple


class StreamMode(NamedTuple):
    """How a collective is ordered with the caller's current stream.

    Attributes:
        use_calc_stream: It runs on the current stream; else on the ring's comm stream.
        sync_op: The current stream waits for it; else the call returns a ``Work``.
        fenced: The comm stream waits for the current one first, and is waited for.
        blocks: Most blocks of a push kernel; 0 for no limit.
    """

    use_calc_stream: bool
    sync_op: bool
    fenced: bool
    blocks: int = 0


CALC = StreamMode(True, True, True)  # the default: on the caller's current stream
_BOOLS = False, True
_MODES = {(a, b, c): StreamMode(a, b, c) for a in _BOOLS for b in _BOOLS for c in _BOOLS}


def stream_mode(
    use_calc_stream: bool, sync_op: bool, fenced: bool = True, blocks: int = 0
) -> StreamMode:
    """Return the stream mode of a call; one object per mode without a limit of blocks."""
    mode = _MODES[bool(use_calc_stream), bool(sync_op), bool(fenced)]
    return mode._replace(blocks=blocks) if blocks else mode
