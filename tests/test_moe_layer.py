"""examples/moe_layer.py: experts on several ranks train as all of them on one do."""

from typing import Any

import pytest
import torch

import commlib
from commlib import ops
from examples import moe_layer
from tests.support.checks import assert_equal
from tests.support.processes import start
from tests.support.ranks import NewRanks, Ranks


def trained(comm: Any) -> None:
    """The same losses, step by step, and they fall; captured steps have the bits of eager ones."""
    runs = moe_layer.compare(6)
    for number, one in enumerate(runs):
        assert_equal(one.apart <= moe_layer.TOLERANCE, True, f"step {number}: {one}")
        assert_equal(one.counted_captured, one.counted, f"step {number}, counted, captured")
        assert_equal(one.fixed_captured, one.fixed, f"step {number}, fixed shapes, captured")
        near = abs(one.fixed - one.ranks) / one.ranks  # weights are rounded to float32
        assert_equal(near < 1e-6, True, f"step {number}: fixed shapes differ by {near}")
    for losses in zip(*runs, strict=True):
        assert_equal(losses[-1] < losses[0], True, f"the loss falls: {losses}")


def as_one_process(comm: Any, kind: type[moe_layer.Layer]) -> None:
    alone = commlib.new_ring(1 + comm.rank, [comm.rank])
    assert alone is not None
    losses = zip(moe_layer.train(0, 6, kind), moe_layer.train(1 + comm.rank, 6, kind), strict=True)
    for number, (ours, one) in enumerate(losses):
        apart = abs(ours - one) / one
        assert_equal(apart <= moe_layer.TOLERANCE, True, f"step {number}: {ours!r} against {one!r}")
    commlib.close_ring(alone.ring_id)


@pytest.mark.parametrize("kind", [moe_layer.CountedLayer, moe_layer.FixedShapeLayer])
def test_a_layer_as_one_process(ranks: Ranks, kind: type[moe_layer.Layer]) -> None:
    """One process trains a layer with shapes that do not depend on the choices as all ranks do."""
    ranks(as_one_process, kind)


def test_unused_places_of_experts() -> None:
    """The experts of the layer with counts run on the rows that are used, in any distribution."""
    num_local = moe_layer.EXPERTS // 2
    gate = moe_layer.drawn(moe_layer.WIDTH, moe_layer.EXPERTS, seed=1)
    up = moe_layer.drawn(num_local, moe_layer.WIDTH, moe_layer.HIDDEN, seed=2)
    down = moe_layer.drawn(num_local, moe_layer.HIDDEN, moe_layer.WIDTH, seed=3)
    for counts in ([0] * 8, [3, 0, 5, 1, 2, 0, 9, 0], [14, 14, 0, 14, 0, 0, 14, 0]):
        arguments, used = (0, gate, up, down), sum(counts)
        rows = torch.zeros(num_local * moe_layer.CAPACITY, moe_layer.WIDTH, dtype=torch.float64)
        rows[:used] = moe_layer.drawn(max(used, 1), moe_layer.WIDTH, seed=6)[:used]
        global_count = torch.tensor(counts)
        actual = moe_layer.CountedLayer(*arguments).experts(rows, global_count)
        expected = moe_layer.Layer(*arguments).experts(rows[:used], global_count)
        torch.testing.assert_close(actual[:used], expected, rtol=1e-12, atol=1e-12)
        assert not actual[used:].any()


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
