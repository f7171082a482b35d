"""The interpreter's exit with rings still open: no hang, no abort, nothing printed."""

import pytest

from tests._programs import run


@pytest.mark.parametrize(("flag", "rounds"), [("1", 25), ("0", 5)], ids=["unified", "legacy"])
def test_exits_in_a_row(flag: str, rounds: int) -> None:
    code, out, err = run(
        "-m", "tests._exits", str(rounds), FLAGS_dynamic_static_unified_comm=flag, seconds=240
    )
    assert (code, out, err) == (0, "all ended well\n", "")


def test_a_rank_that_fails_does_not_hold_the_other() -> None:
    """Rank 1 raises; rank 0, which serves the store, ends within its close deadline."""
    program = (
        "import os, torch, commlib\n"
        "commlib.init('gloo')\n"
        "commlib.ops.barrier()\n"
        "if commlib.comm().rank == 1: os._exit(3)\n"
    )
    from tests._exits import free_port
    from tests._programs import start

    there = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        start("-c", program, RANK=str(rank), FLAGS_comm_close_timeout_s="2", **there)
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=60) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 3]
    assert ends[0] == ("", "")
