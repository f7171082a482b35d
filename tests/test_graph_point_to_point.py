"""Sends and receives of torch.distributed in a captured function, on two ranks of a CPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from commlib import graph
from tests.support.checks import assert_bits_equal
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, STOCK, initialised

ITEMS = 1 << 18  # more than the buffers between two ranks hold
isend: Any = dist.isend  # typed as if it could return None
irecv: Any = dist.irecv
Program = Callable[[Tensor, int], Tensor]


def send_first(x: Tensor, peer: int) -> Tensor:
    y, mine = torch.empty_like(x), x * 2
    sent, received = isend(mine, peer), irecv(y, peer)
    sent.wait()
    received.wait()
    return y * 1


def receive_first(x: Tensor, peer: int) -> Tensor:
    y, mine = torch.empty_like(x), x * 2
    received = irecv(y, peer)
    again = torch.zeros_like(y)  # takes the shape, and reads no value that is still on its way
    sent = isend(mine, peer)
    received.wait()
    sent.wait()
    return y + again


def in_one_batch(x: Tensor, peer: int) -> Tensor:
    y = torch.empty_like(x)
    pair = [dist.P2POp(dist.isend, x * 2, peer), dist.P2POp(dist.irecv, y, peer)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    return y * 1


def waits_between(x: Tensor, peer: int) -> Tensor:
    """Work that needs none of the memory that is sent, and a read of what is sent."""
    mine, y = x * 2, torch.empty_like(x)
    sent = isend(mine, peer)
    doubled = mine + mine
    received = irecv(y, peer)
    total = doubled.cumsum(0)
    received.wait()
    y.add_(total)
    sent.wait()
    mine.zero_()  # after the wait
    return y + mine


def neighbours(x: Tensor, peer: int) -> Tensor:
    """Exchange the border of one tensor: what is sent and received are parts of the same memory."""
    field = x.repeat(2).view(4, -1)
    works = [isend(field[0], peer), irecv(field[3], peer)]
    works += [isend(field[1], peer), irecv(field[2], peer)]
    for work in reversed(works):
        work.wait()
    return field * 3


def twice(x: Tensor, peer: int) -> Tensor:
    """The second exchange sends what the first has received."""
    return send_first(send_first(x, peer), peer)


def blocking(x: Tensor, peer: int) -> Tensor:
    y, mine = torch.empty_like(x), x * 2
    if peer:
        dist.send(mine, peer)
        mine.zero_()
        dist.recv(y, peer)
    else:
        dist.recv(y, peer)
        dist.send(mine + y, peer)
    return y + mine


def with_a_sum(x: Tensor, peer: int) -> Tensor:
    """A sum of all ranks while an exchange is under way, which is sent in the end."""
    y, mine = torch.empty_like(x), x * 2
    sent = isend(mine, peer)
    total = x * 1
    summed = dist.all_reduce(total, async_op=True)
    received = irecv(y, peer)
    received.wait()
    assert summed is not None
    summed.wait()
    sent.wait()
    return y + send_first(total, peer)


PROGRAMS = [
    send_first,
    receive_first,
    in_one_batch,
    waits_between,
    neighbours,
    twice,
    blocking,
    with_a_sum,
]


@pytest.mark.parametrize("backend", ["stock", "ours"])
@pytest.mark.parametrize("program", PROGRAMS)
@runs_on("cpu_ranks")
def test_exchanges(comm: Any, program: Program, backend: str) -> None:
    """A replay waits when the program's memory is needed, and every result is eager's."""
    with initialised(comm, (STOCK if backend == "stock" else OURS)["cpu"]):
        captured = graph.capture(program, outputs="copy", verify=False)
        for turn in range(5):
            x = torch.arange(float(ITEMS)) % 97 + turn + 10 * comm.rank
            expected = program(x, 1 - comm.rank)
            assert_bits_equal(captured(x, 1 - comm.rank), expected, f"turn {turn}")
        assert captured.entries.replays, "nothing was replayed"
        del captured


@runs_on("cpu_ranks")
def test_exchanges_around_a_ring(comm: Any) -> None:
    """Grouped and single calls of a ring run while an exchange of torch's group is under way."""

    def program(x: Tensor, peer: int) -> Tensor:
        y, mine = torch.empty_like(x), x * 2
        sent = isend(mine, peer)
        with comm.group():
            comm.send(x, peer=peer)
            other = comm.recv(torch.zeros_like(x), peer=peer)
        received = irecv(y, peer)
        received.wait()
        sent.wait()
        with comm.group():
            comm.send(x, peer=peer)
            comm.send(y, peer=peer)
            comm.recv(other, peer=peer)
            third = comm.recv(torch.zeros_like(x), peer=peer)
        begun = comm.send(mine, peer=peer, use_calc_stream=False, sync_op=False)
        fourth = torch.empty_like(x)
        arriving = comm.recv(fourth, peer=peer, use_calc_stream=False, sync_op=False)
        begun.wait()
        arriving.wait()
        return torch.stack([y, other, third, fourth])

    with initialised(comm, STOCK["cpu"]):
        captured = graph.capture(program, outputs="copy", verify=False)
        for turn in range(4):
            x = torch.arange(float(ITEMS)) + turn + 10 * comm.rank
            theirs = torch.arange(float(ITEMS)) + turn + 10 * (1 - comm.rank)
            expected = torch.stack([theirs * 2, theirs, x * 2, theirs * 2])
            assert_bits_equal(captured(x, 1 - comm.rank), expected, f"turn {turn}")
        del captured
