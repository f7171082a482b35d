"""Reports of devices: each is raised once, whatever happens between the report and the check."""

from typing import Any, cast

import pytest

import commlib
from commlib.core.device_reports import DeviceReports
from commlib.errors import CapacityError, PeerTimeout
from commlib.p2p.channel import ExpertKernels
from commlib.p2p.expert_tables import Overflow
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
    with raises(CapacityError, WORDS):
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
