"""Calls on a CPU are posted before their launch, and compared with those of the neighbours.

At level 1. It blocks nothing: gloo ends the process of a rank that gets more bytes than it expects,
and mixes data of one size, so a call that differs must never be launched.
"""

from functools import partial
from typing import Any

from commlib.core.call import Call
from commlib.core.call_log import Entry, Facts
from commlib.core.ring import Ring
from commlib.engines.c10d import C10dEngine
from commlib.errors import CommError
from commlib.rendezvous.call_board import CallBoard


def open_board(ring: Ring, engine: C10dEngine) -> None:
    """Set the board up where the members share memory; every member calls it."""
    if not engine.on_host:
        return
    ring._hosts.exchange([])
    ring._board = with_codes(ring._hosts.board)
    if ring._board is not None:
        ring._boards.append(ring._board)
        engine.look = partial(look, ring)


def with_codes(board: CallBoard | None) -> CallBoard | None:
    """Return a board that knows the codes of calls."""
    if board is not None:
        board.code_of = code
    return board


def code(entry: Entry) -> int:
    """Return the code of a call."""
    return Facts.of(entry).code


def post(ring: Ring, call: Call[Any]) -> None:
    """Post a call that is about to be launched; the ring's lock is held.

    Raises:
        MismatchError: A neighbour has made another call there. Nothing is launched.
    """
    board = ring._board if call.order is None else call.order.board
    if board is not None and call.entry is not None:
        other = board.post(call.entry)
        if other is not None:
            raise differs(ring, call, other)


def differs(ring: Ring, call: Call[Any], other: int) -> CommError:
    """Return the error of a call that differs from that of member ``other``."""
    log = ring._call_log if call.order is None else call.order.log
    if log is not None and call.entry is not None:
        log.window.append(call.entry)  # for the text
    return ring._health.differs(call.collective, other)


def look(ring: Ring) -> None:
    """Compare the calls that a waiting rank has posted, in all orders.

    Raises:
        MismatchError: A neighbour has made another call, and launched nothing.
    """
    for board in list(ring._boards):
        other = board.difference()
        if other is not None and ring._health.fault is None:
            raise ring._health.differs(str(ring._last), other)
