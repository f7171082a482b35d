"""Reports of devices: each is raised once, whatever happens between the report and the check."""

from random import Random
from typing import Any, cast

import pytest
import torch

import commlib
from commlib.core.device_reports import DeviceReports, Record
from commlib.errors import CapacityError, PeerTimeout
from commlib.p2p.channel import ExpertKernels
from commlib.p2p.experts.tables import Overflow
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on

WORDS = "expert 1 of rank 0 got 5 rows (2 from rank 0, 3 from rank 1)"


class Kernels:
    """What a channel has recorded, which is read once."""

    def __init__(self, record: Overflow | None = None) -> None:
        self.record = record

    def overflow(self) -> Overflow | None:
        record, self.record = self.record, None
        return record


def watching(reports: DeviceReports, record: Overflow | None) -> None:
    reports.watch(cast(ExpertKernels, Kernels(record)))


@runs_on("cpu_ranks")
def test_each_report_is_raised_once(comm: Any) -> None:
    reports, record = DeviceReports(comm._identity), Overflow(1, 0, 4, (2, 3))
    watching(reports, record)
    watching(reports, None)  # the channel was freed, and another one set up
    with raises(CapacityError, WORDS, "ranks may raise it in different calls", "ring.check() at"):
        reports.check()
    reports.check()
    watching(reports, record)
    with pytest.raises(PeerTimeout), reports.raised_after():
        raise PeerTimeout("the call inside fails")
    with raises(CapacityError, WORDS), reports.raised_after():
        pass
    with reports.raised_after():
        watching(reports, record)  # what the call itself reports is for the next one
    assert_equal(isinstance(reports.error(), CapacityError), True, "kept for the next look")
    reports.check()


@runs_on("cpu_ranks")
def test_closing_raises_what_is_left(comm: Any) -> None:
    """The ring is closed all the same."""
    ring = commlib.new_ring(93, [0, 1])
    assert ring is not None
    watching(ring._device_reports, Overflow(1, 0, 4, (2, 3)))
    with raises(CapacityError, "ring 93", WORDS):
        commlib.close_ring(93)
    assert_equal(commlib.CommContextManager.instance().has(93), False, "still open")


def errors(*_: Any) -> CapacityError:
    return CapacityError("of the test")


@pytest.mark.parametrize("backwards", [False, True])
@pytest.mark.parametrize("before", [[1, 5, 6], [0, 7, 8]])  # a report, or none
def test_a_report_that_is_half_written_is_not_read(before: list[int], backwards: bool) -> None:
    """A read at any time of a copy finds all of a report or nothing, whichever end comes first."""
    record = Record(3, torch.device("cpu"), errors)
    record.note(torch.tensor(before))
    report = record.read()
    assert_equal(report, before[1:] if before[0] else None, "the report before")
    old = record.copy.clone()
    record.note(torch.tensor([1, 3, 4]))
    new = record.copy.clone()
    order = range(len(new) - 1, -1, -1) if backwards else range(len(new))
    record.copy.copy_(old)
    for element in order:
        assert_equal(record.read(), None, f"before element {element} is written")
        record.copy[element] = new[element]
    assert_equal(record.read(), [3, 4], "complete")
    assert_equal(record.read(), None, "once")


class WhileRead:
    """The copy of a record that a device writes while the host reads it, element by element."""

    def __init__(self, order: list[int], random: Random) -> None:
        """Some elements of ``order``, drawn each time, are written after each read."""
        self.values, self.order, self.random = [1, 5, 6, 1], list(order), random

    def __getitem__(self, element: int) -> int:
        value = self.values[element]
        for _ in range(self.random.choice((0, 0, 0, 1, 2, 3, 4))):
            if self.order:
                written = self.order.pop(0)
                self.values[written] = [2, 3, 4, 2][written]
        return value

    def tolist(self) -> list[int]:
        return [self[element] for element in range(4)]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0]])
def test_a_report_is_not_read_while_it_is_written(order: list[int]) -> None:
    """Whenever elements are written, a read finds one of the reports or none."""
    random, reports = Random(1), []
    for _ in range(2000):
        record = Record(3, torch.device("cpu"), errors)
        record._host = cast(Any, WhileRead(order, random))
        reports.append(record.read())
    wrong = [one for one in reports if one not in (None, [5, 6], [3, 4])]
    assert_equal(wrong, [], "parts of two reports")
    assert_equal([one in reports for one in (None, [5, 6])], [True, True], "both are met")
