"""The end of groups of the backend "commlib": the server of the store ends with them."""

import time

import pytest

from commlib import flags
from tests.support.ports import free_port
from tests.support.processes import start

ROUNDS = 6
SECONDS = 100  # of all ranks of a program
BEGIN = """
import gc, os, time
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
import commlib
import commlib.compat.c10d

gc.collect()
gc.disable()
rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])

def served():
    rows = [row.split() for name in ("tcp", "tcp6")
            for row in Path("/proc/net", name).read_text().splitlines()[1:]]
    return any(row[3] == "0A" and int(row[1].split(":")[1], 16) == port for row in rows)

def begin():
    dist.init_process_group("commlib", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    dist.barrier()

"""
# What a program does between the first barrier and the end of its groups.
PARTS = {
    "nothing": "",
    "groups": (
        "again, alone = dist.new_group([0, 1]), dist.new_group([rank], "
        "use_local_synchronization=True)\n"
        "halves, turned = dist.split_group(split_ranks=[[0], [1]]), dist.new_group([1, 0])\n"
        "dist.all_reduce(torch.ones(1), group=again)\n"
        "dist.destroy_process_group(turned)\n"
        "del again, alone, halves, turned\n"
    ),
    "a ring": "ring = commlib.ring_from_group()\n",
    "a failed call": (
        "try: dist.monitored_barrier(timeout=timedelta(seconds=0.01)) if rank == 0 else None\n"
        "except commlib.errors.CommTimeout: pass\n"
        "commlib.comm(0).abort()\n"
    ),
}


def outcomes(program: str) -> list[tuple[int | None, str, str]]:
    """Run two ranks of a program to their ends: exit code, output and error output of each."""
    more = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    more |= {flags.UNIFIED: "1", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [start("-c", BEGIN + program, RANK=str(rank), **more) for rank in range(2)]
    end, results = time.monotonic() + SECONDS, []
    try:
        for one in ranks:
            out, err = one.communicate(timeout=max(1.0, end - time.monotonic()))
            results.append((one.returncode, out, err))
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
    return results


@pytest.mark.parametrize("part", PARTS)
def test_the_server_ends_with_the_groups(part: str) -> None:
    """Without a collection of cycles, as with torch's own backends."""
    end = "dist.destroy_process_group()\nif rank == 0: print(served())\n"
    first, second = outcomes(f"begin()\n{PARTS[part]}{end}")
    assert (first[:2], second[0]) == ((0, "False\n"), 0), (first, second)


def test_the_server_ends_with_the_abort_of_the_groups() -> None:
    """Without ``destroy_process_group``."""
    end = "dist.distributed_c10d._abort_process_group()\nif rank == 0: print(served())\n"
    first, second = outcomes(f"begin()\ndist.barrier()\n{end}")
    assert (first[:2], second[0]) == ((0, "False\n"), 0), (first, second)


def test_groups_again_at_the_same_port() -> None:
    """A collection of cycles on rank 0 ends no server that another rank has connected to.

    Rank 1 begins before it, but not at once: with any backend, it could meet the server that
    rank 0 is about to end.
    """
    program = (
        f"for _ in range({ROUNDS}):\n"
        "    begin()\n"
        "    dist.destroy_process_group()\n"
        "    time.sleep(0.4 if rank == 0 else 0.15)\n"
        "    gc.collect()\n"
        "    if rank == 0: time.sleep(0.1)\n"  # what the collection has freed is gone
        "print('all')\n"
    )
    results = outcomes(program)
    assert [result[:2] for result in results] == [(0, "all\n")] * 2, results


def test_a_late_rank_ends_its_groups_quietly() -> None:
    """The server has ended before: nothing is asked, so that torch prints no stack trace."""
    program = (
        "begin()\n"
        "end = time.monotonic() + 30\n"
        "while rank == 1 and served() and time.monotonic() < end: time.sleep(0.01)\n"
        "time.sleep(0.2 * rank)\n"
        "dist.destroy_process_group()\n"
        "print(served())\n"
    )
    results = outcomes(program)
    assert results == [(0, "False\n", "")] * 2, results
