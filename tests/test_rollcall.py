"""The roll-call alone: members are threads that share one store."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from commlib.deadlines import Deadline
from commlib.errors import RingOrderError
from commlib.rendezvous.roll_call import RollCall
from tests.support.checks import assert_equal, raises

CYCLE = {0: (20, (0, 1)), 1: (21, (1, 2)), 2: (22, (0, 2))}
_WAIT = timedelta(seconds=60)


class _Slow(Store):
    """A store in which verdicts are slow, as in a remote store under load."""

    def __init__(self) -> None:
        super().__init__()
        self.fast = HashStore()

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        time.sleep(0.2)
        return self.fast.compare_set(key, expected, desired)

    def set(self, key: str, value: str) -> None:
        self.fast.set(key, value)

    def get(self, key: str) -> bytes:
        return self.fast.get(key)

    def add(self, key: str, amount: int) -> int:
        return self.fast.add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self.fast.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _WAIT) -> None:
        self.fast.wait(keys, timeout)

    def append(self, key: str, value: str) -> None:
        fast: Any = self.fast  # torch's stubs lack append
        fast.append(key, value)

    def delete_key(self, key: str) -> bool:
        return self.fast.delete_key(key)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self.fast.multi_get(keys)


def _member(store: Store, me: int, again: list[int]) -> None:
    """Create rings in a cycle, then the same rings in one order."""
    call, deadline = RollCall(store, me), Deadline(60)

    def meet(ring_id: int, members: tuple[int, ...]) -> str:
        return call.meet(ring_id, members, deadline, "gloo", "the call").prefix

    with raises(RingOrderError, "ring 20", "ring 21", "ring 22"):
        meet(*CYCLE[me])
    for ring_id, members in (CYCLE[i] for i in again):
        if me in members:
            prefix = f"creating ring {ring_id} of ranks {list(members)} on rank {me}"
            assert_equal(meet(ring_id, members), prefix, f"rank {me} in ring {ring_id}")


@pytest.mark.parametrize("again", [[0, 1, 2], [2, 1, 0]], ids=("ascending", "descending"))
def test_members_leave_a_broken_cycle_once_all_its_rings_have_the_verdict(
    again: list[int],
) -> None:
    """The first member to leave must not count as the one that another ring still waits for."""
    slow = _Slow()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(_member, slow, 1, again)
        time.sleep(0.25)  # so that rank 1, whose verdicts are slow, finds the cycle first
        others = [pool.submit(_member, slow.fast, me, again) for me in (0, 2)]
        for member in (first, *others):
            member.result(timeout=60)
