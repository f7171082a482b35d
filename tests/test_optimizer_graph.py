"""examples/optimizer_graph.py: a captured optimizer step trains to the same losses, bit for bit."""

from typing import Any

from examples import optimizer_graph
from tests.support.checks import assert_equal
from tests.support.processes import start
from tests.support.runs_on import runs_on


@runs_on("unified_ranks", deadline=120)
def test_trains_as_eager(comm: Any) -> None:
    pairs, graphs = optimizer_graph.compare(4)
    names = [line.partition(":")[0] for line in graphs]  # other tests may have left some
    methods = [name for name in names if name.startswith("Optimizer.")]
    assert_equal(methods, ["Optimizer.accumulate", "Optimizer.step"], graphs)
    for number, (eager, captured) in enumerate(pairs):
        assert_equal(captured, eager, f"loss of backward {number}")
    assert_equal(pairs[-1][0] < pairs[0][0], True, f"the loss falls: {pairs}")


def test_the_program() -> None:
    """As its first lines say, through the launcher."""
    process = start(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("examples/optimizer_graph.py", "--steps", "3"),
        FLAGS_dynamic_static_unified_comm="1",
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    *_, verdict, accumulate, step = out.splitlines()
    assert verdict == "bit for bit the same"
    assert "accumulate: " in accumulate and "step: " in step and step.endswith(" 2 replays")
