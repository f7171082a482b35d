"""Collectives with a choice of the stream: ``paddle.distributed.stream``.

Roots and peers are global ranks. Tensors are written in place, outside autograd: nothing here has a
gradient. ``use_calc_stream=True`` runs on the current stream. ``use_calc_stream=False`` runs on the
group's comm stream, which first waits for the current stream. With ``sync_op=True`` the current
stream then waits for it. With ``sync_op=False`` the caller calls ``wait()`` of the returned
``Task``. On a process that is not a member of the group, a call warns and returns None.
"""

from typing import TYPE_CHECKING, Any

from commlib.compat.paddle.distributed.stream.copies import all_gather, broadcast, gather, scatter
from commlib.compat.paddle.distributed.stream.exchanges import alltoall, alltoall_single, recv, send
from commlib.compat.paddle.distributed.stream.reductions import all_reduce, reduce, reduce_scatter
from commlib.compat.paddle.unported import unported

__all__ = [
    "all_gather",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "broadcast",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Refuse an unknown name, with the nearest one or the reason why it is missing."""
        raise unported(__name__, __all__, name)
