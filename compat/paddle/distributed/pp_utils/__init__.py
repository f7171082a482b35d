"""Sends and receives between pipeline stages: ``pp_utils.p2p_communication``."""

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
