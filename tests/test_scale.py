"""The load of a rendezvous: counts of requests, and the keys that remain."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

import commlib
from commlib import ops
from tests.programs.scale import ManyRanks, load
from tests.support.checks import assert_equal, until
from tests.support.ranks import Ranks


@pytest.fixture(autouse=True)
def _small_stacks() -> Iterator[None]:
    before = threading.stack_size(512 * 1024)
    yield
    threading.stack_size(before)


def test_waiting_costs_a_request_per_ring_and_not_per_member() -> None:
    """56 of 64 members wait for 3 s: the first member per ring sends requests, the others none."""
    seen = load(members=64, rings=8, seconds=3, timeout=120)
    assert_equal(seen["ended"], {"met": 64}, seen)
    # Per ring and second: at most 20 checks, and 2 searches of 3 requests.
    assert seen["requests while waiting"] <= 8 * 26 * (seen["seconds"] + 1), seen
    assert seen["requests per member"] <= 40, seen


def test_a_deadline_costs_each_member_a_few_requests() -> None:
    # torch prints a trace per member that waits too long: more of them in one process are too slow.
    many = ManyRanks(members=16, rings=2, timeout=4)
    many.join_rings(many.early())
    assert_equal(dict(many.join()), {"CommTimeout": 14}, "the members that joined")
    # Register, search while waiting, and read or write the verdict.
    most = 14 * 16 + 2 * 26 * 6
    assert many.requests() <= most, many.counts


def keys_of_closed_rings(comm: Any, port: int) -> None:
    server = TCPStore("127.0.0.1", port, wait_for_workers=False)
    counts = []
    for _ in range(30):
        ring = commlib.new_ring(70, comm.ranks)
        assert ring is not None
        ring.exchange([1])
        ops.all_reduce(torch.ones(4), 70)
        commlib.CommContextManager.instance().close(70)
        counts.append(server.num_keys())
    # Deletions are not waited for: those of the last rings may still be under way.
    until(lambda: server.num_keys() <= counts[0] + 20, f"keys after each ring: {counts}")


def test_closed_rings_leave_no_keys(cpu_ranks: Ranks) -> None:
    cpu_ranks(nothing)
    cpu_ranks(keys_of_closed_rings, cpu_ranks.store.port)


def nothing(comm: Any) -> None:
    """Start the ranks, so that their store has a port."""
