"""The roll-call by itself: members are threads that meet over one store."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, Store

from commlib.deadlines import Deadline
from commlib.errors import RingOrderError
from commlib.rendezvous.roll_call import RollCall
from tests.support.checks import refused, same

CIRCLE = {0: (20, (0, 1)), 1: (21, (1, 2)), 2: (22, (0, 2))}


_WAIT = timedelta(seconds=60)


class _Slow(Store):
    """A store in which a verdict takes long, as in a far one under load."""

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
    """Run into the circle, then create the same rings in one order."""
    call, deadline = RollCall(store, me), Deadline(60)

    def meet(ring_id: int, members: tuple[int, ...]) -> bytes:
        return call.meet(ring_id, members, deadline, "gloo", lambda: b"id").payload

    with refused(RingOrderError, "ring 20", "ring 21", "ring 22"):
        meet(*CIRCLE[me])
    for ring_id, members in (CIRCLE[i] for i in again):
        if me in members:
            same(meet(ring_id, members), b"id", f"rank {me} in ring {ring_id}")


@pytest.mark.parametrize("again", [[0, 1, 2], [2, 1, 0]], ids=("ascending", "descending"))
def test_nobody_leaves_a_broken_circle_before_every_ring_of_it_is_told(again: list[int]) -> None:
    """The first to leave must not be taken for the one that another ring still waits for."""
    slow = _Slow()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(_member, slow, 1, again)
        time.sleep(0.25)  # so that rank 1, whose verdicts take long, sees the circle first
        others = [pool.submit(_member, slow.fast, me, again) for me in (0, 2)]
        for member in (first, *others):
            member.result(timeout=60)
