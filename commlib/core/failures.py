"""Failures of the library below, in our words; its own text is only the cause of our errors."""

from collections.abc import Sequence

from commlib.errors import CommError

_LATE = ("timed out", "timeout", "time out")
_GONE = (
    *("connection closed", "connection reset", "connection was closed", "socket closed"),
    *("broken pipe", "connection refused", "remote process exited", "failed to recv"),
)


def is_late(error: Exception) -> bool:
    """Return True if a library reports that a wait took too long."""
    text = str(error).lower()
    return any(sign in text for sign in _LATE)


def is_gone(error: Exception) -> bool:
    """Return True if a library reports that a peer has closed its connection."""
    text = str(error).lower()
    return any(sign in text for sign in _GONE)


def named(positions: Sequence[int], ranks: Sequence[int]) -> str:
    """Name members by global rank and by position: ``rank 5 (position 1 in the ring)``."""
    if len(positions) == 1:
        return f"rank {ranks[positions[0]]} (position {positions[0]} in the ring)"
    return f"ranks {[ranks[at] for at in positions]} (positions {list(positions)} in the ring)"


def late(
    suspects: Sequence[int], ranks: Sequence[int], own: int, seconds: float, verdict: str
) -> str:
    """Say who is late, or that nothing says it; ``own`` is this rank's position."""
    text = f"did not finish within {seconds:g} s"
    if suspects:
        text += f" while waiting for {named(suspects, ranks)}"
    elif not verdict:
        others = _without(own, ranks)
        text += f"; nothing says which of the ranks {others} is late: look at their logs"
    return text


def gone(suspects: Sequence[int], ranks: Sequence[int], own: int) -> str:
    """Say who has closed a connection, as far as it is known; ``own`` is this rank's position."""
    if suspects:
        who = f"{named(suspects, ranks)} closed its connection"
    else:
        who = f"one of the ranks {_without(own, ranks)} closed its connection"
    return f"{who}: it has ended or gave up an earlier call, see its log"


def _without(own: int, ranks: Sequence[int]) -> list[int]:
    return [rank for at, rank in enumerate(ranks) if at != own]


def other(error: Exception, engine: str) -> str:
    """Name any other failure: ours in full, a library's by its kind."""
    if isinstance(error, CommError) or not isinstance(error, RuntimeError):
        return f"{type(error).__name__}: {error}"
    return f"{engine} reported a failure, {type(error).__name__}; its text is this error's cause"
