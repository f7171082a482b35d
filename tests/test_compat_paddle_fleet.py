"""compat.paddle.distributed.fleet: signatures, groups of several axes, and settings of upstream."""

from typing import Any

import torch

from commlib.compat.paddle.distributed import fleet
from commlib.compat.paddle.distributed.fleet.meta_optimizers import HybridParallelOptimizer
from tests.support.checks import assert_equal
from tests.support.paddle_groups import own_groups
from tests.support.runs_on import runs_on


def started(**degrees: Any) -> tuple[fleet.DistributedStrategy, fleet.HybridCommunicateGroup]:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)
    return strategy, fleet.get_hybrid_communicate_group()


@runs_on("ranks")
def test_signatures_of_the_optimizer(ring: Any) -> None:
    """It takes the group and the strategy, and ``clear_grad`` sets zeros by default."""
    for degrees in ({"dp_degree": 2}, {"sharding_degree": 2}):
        with own_groups():
            strategy, hybrid = started(**degrees)
            weight = torch.ones(3, device=ring.device, requires_grad=True)
            bare = torch.optim.SGD([weight], 0.5)
            optimizer = HybridParallelOptimizer(bare, hybrid, strategy)
            weight.grad = torch.full_like(weight, 2.0 * ring.rank)
            optimizer.step()
            assert_equal(weight.tolist(), [0.5] * 3, "a step along the mean gradient")
            given = weight.grad
            optimizer.clear_grad()
            assert_equal((weight.grad is given, given.tolist()), (True, [0.0] * 3), "zeros")
            optimizer.clear_grad(set_to_zero=False)
            assert_equal(weight.grad, None, "no gradient")
