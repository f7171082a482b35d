"""examples/moe_layer.py: experts on several ranks train as all of them on one do."""

from typing import Any

from examples import moe_layer
from tests._check import same
from tests._programs import start
from tests._ranks import Ranks, World


def trained(comm: Any) -> None:
    """The same losses, step by step; they fall, and the capacity has dropped tokens."""
    pairs = moe_layer.compare(6)
    for number, (ours, one) in enumerate(pairs):
        apart = abs(ours - one) / one
        same(apart <= moe_layer.TOLERANCE, True, f"step {number}: {ours!r} against {one!r}")
    same(pairs[-1][0] < pairs[0][0], True, f"the loss falls: {pairs}")


def test_trains_as_one_process(ranks: Ranks) -> None:
    ranks(trained)


def test_trains_on_four_ranks(world: World) -> None:
    with world(4) as ranks:
        ranks(trained)


def test_the_program() -> None:
    """As its first lines say, through the launcher."""
    process = start(
        *("-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", "2", "examples/moe_layer.py", "--steps", "2"),
        FLAGS_dynamic_static_unified_comm="1",
    )
    try:
        out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert "step   loss of 2 ranks   loss of one process" in out
    assert "largest difference" in out
