"""What a roll call counts: members that have registered, and members that are ready."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import HashStore

from commlib.deadlines import Deadline
from commlib.errors import CommTimeout
from commlib.rendezvous.meeting import Meeting
from commlib.rendezvous.roll_call import RollCall

RING, MEMBERS = 20, (0, 1)


def meet(call: RollCall, deadline: Deadline) -> Meeting:
    return call.meet(RING, MEMBERS, deadline, "gloo", "the call")


def test_a_ring_is_built_only_when_every_member_is_ready() -> None:
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, RollCall(store, me), Deadline(30)) for me in MEMBERS]
        ready, _ = (one.result(timeout=30) for one in met)

    with pytest.raises(CommTimeout, match=r"ranks \[1\]"):
        ready.finish(None, Deadline(0.3))


class InterruptedWait(Deadline):
    """A deadline whose check is interrupted once the member has registered."""

    __slots__ = ("call",)

    def __init__(self, call: RollCall) -> None:
        super().__init__(30)
        self.call = call

    def passed(self) -> bool:
        if self.call.unfinished:
            raise KeyboardInterrupt
        return super().passed()


def test_a_member_that_was_interrupted_counts_once() -> None:
    """Counted twice, it would be taken for the missing member."""
    store = HashStore()
    call = RollCall(store, 0)
    with pytest.raises(KeyboardInterrupt):
        meet(call, InterruptedWait(call))
    with pytest.raises(CommTimeout, match=r"ranks \[1\]"):
        meet(call, Deadline(0.2))

    with ThreadPoolExecutor(2) as pool:
        met = [pool.submit(meet, one, Deadline(30)) for one in (call, RollCall(store, 1))]
        assert [one.result(timeout=30).ranks for one in met] == [MEMBERS, MEMBERS]
