"""examples/moe_layer.py: experts on several ranks train as all of them on one do."""

from typing import Any

import commlib
from commlib import ops
from examples import moe_layer
from tests.support.checks import assert_equal
from tests.support.processes import start
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on


def trained(comm: Any) -> None:
    """The same losses, step by step, and they fall; captured steps have the bits of eager ones."""
    found = moe_layer.compare(6)
    for number, one in enumerate(found):
        apart = abs(one.ranks - one.one_process) / one.one_process
        assert_equal(apart <= moe_layer.TOLERANCE, True, f"step {number}: {one}")
        assert_equal(one.captured, one.eager, f"step {number}, captured and eager")
        near = abs(one.eager - one.ranks) / one.ranks  # weights are rounded to float32
        assert_equal(near < 1e-6, True, f"step {number}: fixed shapes differ by {near}")
    assert_equal(found[-1].captured < found[0].captured, True, f"the loss falls: {found}")


@runs_on("ranks")
def test_fixed_shapes_as_one_process(comm: Any) -> None:
    """One process trains the layer with fixed shapes as all ranks do."""
    alone = commlib.new_ring(1 + comm.rank, [comm.rank])
    assert alone is not None
    kind = moe_layer.FixedShapeLayer
    losses = zip(moe_layer.train(0, 6, kind), moe_layer.train(1 + comm.rank, 6, kind), strict=True)
    for number, (ours, one) in enumerate(losses):
        apart = abs(ours - one) / one
        assert_equal(apart <= moe_layer.TOLERANCE, True, f"step {number}: {ours!r} against {one!r}")
    commlib.close_ring(alone.ring_id)


def test_the_capacity_drops_tokens() -> None:
    """Else the layer would be compared without the part that ranks have to agree on."""
    x = moe_layer.drawn(moe_layer.TOKENS, moe_layer.WIDTH, seed=4)
    gate = moe_layer.drawn(moe_layer.WIDTH, moe_layer.EXPERTS, seed=1)
    chosen = (x @ gate).topk(2, dim=1).indices
    assert ops.number_count(chosen, moe_layer.EXPERTS).max() > moe_layer.CAPACITY


def test_trains_as_one_process(ranks: Ranks) -> None:
    ranks(trained)


def test_trains_on_four_ranks(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
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
    assert "captured steps that differ from eager ones: none" in out
    assert "Warning" not in err
