"""examples/fsdp_tp.py: sharded times tensor parallelism has the same bits from graphs."""

from typing import Any

import pytest
import torch
import torch._inductor.config

import commlib
from examples import fsdp_tp
from tests.support.checks import assert_equal
from tests.support.launchers import on_gpus
from tests.support.operator import generating
from tests.support.processes import run
from tests.support.ranks import NewRanks

STEPS = 3
SIZES = fsdp_tp.Sizes(layers=1)
# Operators as torch has them, where Inductor knows this setting: no C++ is compiled.
QUICK = "fallback_by_default"
NEAR = 1e-5  # sums of halves, where one process has whole sums


def untrained_loss() -> float:
    """Return the loss of the untrained model on the rings that there are."""
    tokens = torch.arange(SIZES.tokens, device=commlib.comm().device).expand(SIZES.rows, -1)
    with torch.no_grad():
        loss = fsdp_tp.Llama(SIZES)(tokens % SIZES.vocabulary, tokens)
    return float(loss * commlib.comm(fsdp_tp.DATA).size)


def two_by_two(comm: Any, quick: bool) -> None:
    """Two shards of two halves: the bits of Inductor, and the loss of one process."""
    fsdp_tp.make_rings(2)
    split = untrained_loss()
    with torch._inductor.config.patch({QUICK: True} if quick else {}):
        result = fsdp_tp.compare(STEPS, SIZES)
    assert_equal(result.differing, [], "steps with another bit")
    assert_equal(
        result.copied, result.batch, "bytes copied per replay: the batch, and no parameter"
    )
    (row,) = [row for row in result.report if "compiled code" in row["function"]]
    kinds = {text.split()[0] for text in row["collectives"]}
    assert_equal(kinds, {"all_gather", "reduce_scatter", "all_reduce"}, "collectives in the graphs")
    assert_equal((row["replays"], row["segments"]), (STEPS - 1, 2), "replays")
    torch._dynamo.reset()
    for number in (fsdp_tp.DATA, fsdp_tp.TENSOR):
        commlib.close_ring(number)
    commlib.new_ring(fsdp_tp.DATA, [comm.rank])
    commlib.new_ring(fsdp_tp.TENSOR, [comm.rank])
    assert_equal(abs(untrained_loss() - split) < NEAR * split, True, "loss of one process")


def test_two_by_two(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        quick = hasattr(torch._inductor.config, QUICK)
        (ranks if quick else generating(ranks))(two_by_two, quick, deadline=300)


@pytest.mark.gpu
@pytest.mark.parametrize("tensor", [1, 2])
def test_the_program(tensor: int) -> None:
    """Two GPUs: 2 x 1 and 1 x 2, with expandable segments; it exits by itself."""
    code, out, err = run(
        *on_gpus("examples/fsdp_tp.py", "--tensor", str(tensor)),
        seconds=300,  # everything is compiled twice
        fresh=True,  # torch reads the setting while it is loaded
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        FLAGS_dynamic_static_unified_comm="1",
    )
    assert code == 0, out + err
    assert "steps with another bit: 0 of 50" in out
