"""comm.group(): the calls of a ``with`` block, launched as one operation at its end."""

from typing import Any

import torch

from commlib.errors import ArgumentError
from tests._check import Framed, close, refused, same, sample, until, wide
from tests._formulas import joined, total
from tests._operator import calls
from tests._ranks import Ranks

BOTH: tuple[dict[str, bool], ...] = (
    {},
    {"use_calc_stream": False},
    {"use_calc_stream": False, "sync_op": False},
)
LARGE = 1_000_003


def crossing(comm: Any) -> None:
    """Everybody sends to everybody first and receives then: one by one that could never end."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    mine = sample(comm.rank, (LARGE,), torch.float32).to(comm.device)
    for mode in BOTH:
        outs = {rank: torch.zeros_like(mine) for rank in others}
        with comm.group(**mode) as work:
            for rank in others:
                comm.send(mine, peer=rank, use_calc_stream=not mode)
            for rank, out in outs.items():
                comm.recv(out, peer=rank, use_calc_stream=not mode)
        work.wait()
        for rank, out in outs.items():
            close(out, sample(rank, (LARGE,), torch.float32), f"from {rank}, {mode}")


def test_crossing_sends(ranks: Ranks) -> None:
    ranks(crossing)


def test_crossing_sends_of_three(trio: Ranks) -> None:
    trio(crossing)


def mixed(comm: Any) -> None:
    """Collectives of several kinds, one with a strided output; the Work holds all results."""
    every = [sample(rank, (3, 4), torch.float64) for rank in range(2)]
    x, arrays = every[comm.rank].to(comm.device), [wide(x) for x in every]
    for mode in BOTH:
        frame = Framed((6, 4), torch.float64, comm.device, "stepped")
        summed, cast = torch.zeros_like(x), torch.zeros_like(x)
        before = calls(comm)
        with comm.group(**mode) as work:
            how = {"use_calc_stream": not mode}
            same(comm.all_reduce(summed, x, **how) is summed, True, "result inside the group")
            comm.all_gather(frame.view, x, **how)
            comm.broadcast(cast, x, root=1, **how)
            same(calls(comm), before, "calls launched inside the block")
        same(calls(comm) - before, 3, "calls of the group")
        same([id(r) for r in work.wait()], [id(summed), id(frame.view), id(cast)], "results")
        close(summed, total(arrays, 0), "all_reduce")
        close(frame.view, joined(arrays, 0), "all_gather")
        close(cast, every[1], "broadcast")
        frame.intact()
        until(work.done, "done() after wait()")


def test_collectives(ranks: Ranks) -> None:
    ranks(mixed)


def nothing_launched(comm: Any) -> None:
    """An exception in the block, a wrong call in it and an empty block launch nothing."""
    x = torch.ones(4, device=comm.device)
    before = calls(comm)
    with refused(ZeroDivisionError), comm.group():
        comm.all_reduce(torch.zeros_like(x), x)
        _ = 1 / 0
    with refused(ArgumentError, "open already"), comm.group(), comm.group():
        pass
    with refused(ArgumentError, "use_calc_stream=False"), comm.group(sync_op=False):
        pass
    with comm.group() as work:
        same(work.done(), False, "done() inside the group")
        with refused(ArgumentError, "leave"):
            work.wait()
        with refused(ArgumentError, "ring.group(use_calc_stream=False)"):
            comm.all_reduce(torch.zeros_like(x), x, use_calc_stream=False)
        with refused(ArgumentError, "inside a group"):
            comm.all_reduce(torch.zeros_like(x), x, use_calc_stream=False, sync_op=False)
    same((work.wait(), work.done()), ([], True), "an empty group")
    same(calls(comm), before, "calls launched")
    out = torch.zeros_like(x)
    close(comm.all_reduce(out, x), torch.full((4,), 2.0), "after it all")


def test_nothing_launched(ranks: Ranks) -> None:
    ranks(nothing_launched)


def left_by_an_exception(comm: Any) -> None:
    """The Work of a group that was never launched says so."""
    x, before = torch.ones(3, device=comm.device), calls(comm)
    with refused(ZeroDivisionError), comm.group(use_calc_stream=False, sync_op=False) as work:
        comm.all_reduce(x, x, use_calc_stream=False)
        raise ZeroDivisionError
    with refused(ArgumentError, "an exception left the group"):
        work.wait()
    same((work.done(), calls(comm)), (False, before), "done, calls")


def test_left_by_an_exception(ranks: Ranks) -> None:
    ranks(left_by_an_exception)
