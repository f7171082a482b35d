"""barrier: no rank continues before every rank has arrived."""

from typing import Literal, overload

from commlib.core.manager import comm
from commlib.core.work import Work
from commlib.ops.arguments import Ring, ring_number
from commlib.ops.registered.library import register, traced


@overload
def barrier(
    ring_id: Ring = ..., *, use_calc_stream: bool = ..., sync_op: Literal[True] = True
) -> None: ...
@overload
def barrier(
    ring_id: Ring = ..., *, use_calc_stream: bool = ..., sync_op: Literal[False]
) -> Work[None]: ...
@overload
def barrier(
    ring_id: Ring = ..., *, use_calc_stream: bool = ..., sync_op: bool
) -> Work[None] | None: ...


def barrier(
    ring_id: Ring = 0, *, use_calc_stream: bool = True, sync_op: bool = True
) -> Work[None] | None:
    """Wait until every rank of the ring has called ``barrier``.

    Args:
        ring_id: The ring, its id or its name.
        use_calc_stream: Hold the caller's current stream. False: hold the ring's stream.
        sync_op: False, which needs ``use_calc_stream=False``: return a ``Work`` instead.

    Returns:
        None, or a ``Work`` with ``sync_op=False``. On a CPU the host blocks, at most for the
        ring's timeout. On a GPU the stream waits and the host does not;
        ``torch.cuda.current_stream().synchronize()`` makes the host wait too.

    Raises:
        RingError: The ring does not exist, or it has failed.
        CommTimeout: Ranks are missing at the ring's timeout (CPU).
    """
    ring_id = ring_number("barrier", ring_id)
    if traced("barrier", use_calc_stream, sync_op):
        _registered_op(ring_id, use_calc_stream)
        return None if sync_op else Work(None)
    return comm(ring_id).barrier(use_calc_stream=use_calc_stream, sync_op=sync_op)


def _run(ring_id: int, use_calc_stream: bool) -> None:
    comm(ring_id).barrier(use_calc_stream=use_calc_stream)


def _fake(ring_id: int, use_calc_stream: bool) -> None:
    return None


_registered_op = register("barrier(int ring_id, bool use_calc_stream) -> ()", _run, _fake)
