"""How a manager closes its rings: their order, errors, and a creation that failed elsewhere."""

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

import commlib
from commlib.core.context import CommContext
from commlib.deadlines import Deadline
from commlib.errors import EngineError
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on


@pytest.fixture
def three_rings() -> Iterator[commlib.CommContextManager]:
    """Return a manager of rings 3, 1 and 2, created in this order in this process alone."""
    manager = commlib.CommContextManager()
    for ring_id in (3, 1, 2):
        manager.create(ring_id, [0], device="cpu")
    yield manager
    manager.close()


def test_rings_close_in_reverse_order(
    three_rings: commlib.CommContextManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[int] = []
    close = CommContext._close

    def note(ring: CommContext, deadline: Deadline) -> None:
        closed.append(ring.ring_id)
        close(ring, deadline)

    monkeypatch.setattr(CommContext, "_close", note)

    three_rings.close()

    assert closed == [2, 1, 3]


def test_an_error_of_one_ring_closes_the_others_and_is_raised(
    three_rings: commlib.CommContextManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings = [three_rings.get(ring_id) for ring_id in (3, 1, 2)]
    close = CommContext._close

    def fail(ring: CommContext, deadline: Deadline) -> None:
        close(ring, deadline)
        if ring.ring_id == 2:
            raise EngineError("ring 2 can't be closed")

    monkeypatch.setattr(CommContext, "_close", fail)

    with pytest.raises(EngineError, match="ring 2 can't be closed"):
        three_rings.close()

    assert three_rings.rings() == []
    assert all(ring._health.ended for ring in rings)


@runs_on("cpu_ranks")
def test_a_ring_that_another_member_could_not_set_up_is_aborted(comm: Any) -> None:
    """Rank 1 fails after it has connected; rank 0 has a whole ring by then, and must free it."""
    rings: list[CommContext] = []
    connect = CommContext._open

    def fail_on_rank_1(ring: CommContext, *arguments: Any) -> None:
        rings.append(ring)
        connect(ring, *arguments)
        if comm.rank == 1:
            raise MemoryError("of one rank")

    failing = mock.patch.object(CommContext, "_open", fail_on_rank_1)
    with failing, raises(EngineError, "ring 72", "rank 1: MemoryError: of one rank"):
        commlib.new_ring(72, [0, 1], timeout=20)

    assert_equal([ring._health.ended for ring in rings], [True], "the ring is aborted")


@runs_on("cpu_ranks")
def test_an_interrupted_creation_aborts_the_ring(comm: Any) -> None:
    rings: list[CommContext] = []
    connect = CommContext._open

    def interrupted_on_rank_1(ring: CommContext, *arguments: Any) -> None:
        rings.append(ring)
        connect(ring, *arguments)
        if comm.rank == 1:
            raise KeyboardInterrupt

    with mock.patch.object(CommContext, "_open", interrupted_on_rank_1):
        try:
            commlib.new_ring(73, [0, 1], timeout=20)
        except (KeyboardInterrupt, EngineError):
            ended = [ring._health.ended for ring in rings]
        else:
            ended = []
    assert_equal(ended, [True], "the ring is aborted")
