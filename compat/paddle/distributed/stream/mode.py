"""The stream options of a legacy call."""

from commlib.core.collectives.options import Either
from commlib.core.context import CommContext
from commlib.errors import ArgumentError


def stream_mode(name: str, ring: CommContext, sync_op: bool, use_calc_stream: bool) -> Either:
    """Return the stream options of a call.

    Raises:
        ArgumentError: ``use_calc_stream`` without ``sync_op``.
    """
    if use_calc_stream and not sync_op:
        raise ArgumentError(
            f"{ring._describe(name)}: use_calc_stream can only be true in sync op behavior: there "
            f"is nothing to wait for on the caller's own stream; pass use_calc_stream=False"
        )
    return {"use_calc_stream": use_calc_stream, "sync_op": sync_op}
