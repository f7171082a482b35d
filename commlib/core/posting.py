"""Calls on a CPU are posted before their launch, and compared with those of the neighbours.

This happens at level 1, and it blocks nothing. gloo ends the process of a rank that gets more bytes
than it expects, and it mixes data of one size. So a call that differs must never be launched.
"""

from functools import partial
from typing import Any

from commlib.core.calls.call import Call
from commlib.core.calls.log import Entry, Facts
from commlib.core.ring import Ring
from commlib.engines.c10d.engine import C10dEngine
from commlib.errors import CommError, MismatchError
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


def post_all(ring: Ring, name: str, calls: list[Call[Any]]) -> None:
    """Post calls that are about to be launched; the ring's lock is held.

    Raises:
        MismatchError: The calls of two members differ. Nothing is launched.
    """
    try:
        for call in calls:
            _post(ring, call)
    except Exception:
        raise
    except BaseException:  # a call may be posted that is never launched
        ring._health.interrupted(name)
        raise


def _post(ring: Ring, call: Call[Any]) -> None:
    board = ring._board if call.order is None else call.order.board
    if board is not None and call.entry is not None:
        other = board.post(call.entry)
        if other is not None:
            raise differs(ring, call.collective, call.entry, call.order, other)


def differs(ring: Ring, collective: str, entry: Entry, order: Any, other: int) -> CommError:
    """Return the error of a call that differs from that of member ``other``."""
    ring._health.begin_mismatch(collective)  # first: a signal may end what follows
    log = ring._call_log if order is None else order.log
    if log is not None:
        log.window.append(entry)  # for the text
    return _mismatch(ring, collective, other)


def _mismatch(ring: Ring, collective: str, other: int) -> CommError:
    """Mark the boards for the other members; return the error of every call from now on."""
    health, boards = ring._health, list(ring._boards)
    health.begin_mismatch(collective)
    pair = next(filter(None, (board.marked() for board in boards)), (ring.rank, other))
    for board in boards:
        if board.marked() is None:
            board.mark(*pair)
    return health.differs(collective, pair)


def look(ring: Ring) -> None:
    """Compare the calls that a waiting rank has posted, in all orders.

    Raises:
        MismatchError: The calls of two members differ. A late one has launched nothing.
    """
    if ring._health.mismatch is not None:
        raise MismatchError(ring._health.mismatch)
    for board in list(ring._boards):
        marked = board.marked()
        other = board.difference() if marked is None else marked[0]
        if other is not None:
            raise _mismatch(ring, str(ring._last), other)
