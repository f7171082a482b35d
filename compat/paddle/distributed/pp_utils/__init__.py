"""Sends and receives between pipeline stages: ``pp_utils.p2p_communication``."""

from typing import TYPE_CHECKING, Any

from commlib.compat.paddle.distributed.pp_utils.slices import (
    P2PonCalcStream,
    _recv_on_calc_stream,
    _send_on_calc_stream,
    all_gather_partial,
    allgather_partial,
    batch_send_recv_on_calc_stream,
    initialize_p2p_groups,
    recv_partial,
    send_partial,
)
from commlib.compat.paddle.distributed.pp_utils.stages import P2pHelper
from commlib.compat.paddle.unported import unported

__all__ = [
    "P2PonCalcStream",
    "P2pHelper",
    "_recv_on_calc_stream",
    "_send_on_calc_stream",
    "all_gather_partial",
    "allgather_partial",
    "batch_send_recv_on_calc_stream",
    "initialize_p2p_groups",
    "recv_partial",
    "send_partial",
]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Refuse an unknown name, with the nearest one or the reason why it is missing."""
        raise unported(__name__, __all__, name)
