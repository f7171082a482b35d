"""examples/pipeline_gpt.py: captured stages train to the same losses and weights, bit for bit."""

from itertools import accumulate
from typing import Any

import pytest

import commlib
from commlib import graph
from examples import pipeline_gpt
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.processes import start
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on


def compare(comm: Any, *arguments: str, steps: int = 7) -> list[int]:
    """Train both ways; returns how many forwards were captured after each number of microbatches.

    The rings of the example are closed at the end.
    """
    chosen = pipeline_gpt.options(["--steps", str(steps), *arguments])
    manager = commlib.CommContextManager.instance()
    before = {*manager.rings()}
    layout = pipeline_gpt.layout_of(chosen.parallel)
    eager, captured = (pipeline_gpt.train(layout, chosen, mode) for mode in ("no", chosen.capture))
    for number, (one, want) in enumerate(zip(captured.weights, eager.weights, strict=True)):
        assert_bits_equal(one, want, f"weight {number} with {arguments}")
    assert_equal(captured.losses, eager.losses, f"losses with {arguments}")
    if layout.place == layout.depth - 1:
        assert_equal(len(eager.losses), steps * sum(chosen.microbatches), "number of losses")
        assert_equal(eager.losses[-1] < eager.losses[0], True, f"the loss falls: {eager.losses}")
    for ring_id in {*manager.rings()} - before:
        commlib.close_ring(ring_id)
    return captured.graphs


def most_in_flight(rank: int, microbatches: int) -> list[int]:
    """Return the most microbatches between forward and backward, for each stage of a rank."""
    order = graph.PipelineSchedule.one_f_one_b(2, microbatches, chunks=2).orders[rank]
    steps = [(action.stage, 1 if action.kind == "forward" else -1) for action in order]
    return [
        max(accumulate(step for at, step in steps if at == stage)) for stage in (rank, rank + 2)
    ]


@runs_on("ranks", deadline=120)
def test_virtual_stages(comm: Any) -> None:
    """Forwards are captured for the most microbatches in flight so far, and never again."""
    counts, most, expected = (4, 8, 3), [0, 0], []
    for microbatches in counts:
        most = list(map(max, most, most_in_flight(comm.rank, microbatches)))
        expected.append(sum(most))
    assert_equal(compare(comm, "--chunks", "2"), expected, f"forwards after {counts} microbatches")


@runs_on("unified_ranks", deadline=120)
def test_one_stage_per_rank(comm: Any) -> None:
    """With GPipe all microbatches are in flight, so that 8 need more slots than 4."""
    assert_equal(compare(comm, "--schedule", "gpipe", steps=2), [4, 8, 8], "captured forwards")


@pytest.mark.parametrize("capture", ["layer", "step"])
@runs_on("unified_ranks", deadline=120)
def test_other_ways_to_capture(comm: Any, capture: str) -> None:
    """The legacy PipelineLayer; and whole steps, one graph per number of microbatches."""
    graphs = compare(comm, "--capture", capture, "--chunks", "2", steps=3)
    if capture == "step":
        assert_equal(graphs, [1, 2, 3], "graphs")


def _on_four(comm: Any) -> None:
    schedule = graph.PipelineSchedule.one_f_one_b(4, 5, chunks=2)
    edges = schedule.connect(500, pipeline_gpt.SHAPE)
    assert_equal(len(edges.rings), 4, "edges of this rank: both ways to two neighbours")
    for edge, ring in edges.rings.items():
        assert_equal(ring.report()["communicator"], True, f"edge {edge} is connected")
    edges.close()
    for more in (["--parallel", "2"], ["--capture", "step"], ["--chunks", "2"], []):
        compare(comm, *more, "--microbatches", "5", "3", steps=3)


def test_four_ranks(new_ranks: NewRanks) -> None:
    """Two stages of two tensor-parallel ranks, four stages, and eight stages of four ranks."""
    with new_ranks(4) as ranks:
        ranks(_on_four, deadline=240)


def test_the_program() -> None:
    """As its first lines say, through the launcher."""
    process = start(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("examples/pipeline_gpt.py", "--steps", "2", "--microbatches", "2", "3"),
        FLAGS_dynamic_static_unified_comm="1",
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert out.splitlines()[-1] == "bit for bit the same"
    assert "after steps of 3 microbatches: 1" in out
