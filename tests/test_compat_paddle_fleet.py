"""compat.paddle.distributed.fleet: signatures, groups of several axes, and settings of upstream."""

import copy
from typing import Any

import torch

from commlib.compat.paddle.distributed import fleet
from commlib.compat.paddle.distributed.fleet.meta_optimizers import HybridParallelOptimizer
from commlib.errors import ArgumentError
from tests.support.checks import assert_equal, raises
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


def test_settings() -> None:
    """Details of upstream are accepted and kept; what changes results is refused."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = {
        "dp_degree": 1,
        "ep_degree": 1,
        "mp_configs": {"mp_async_allreduce": True, "sync_param": False},
        "pp_configs": {"delay_scale_loss": True},
        "enable_optimizer_timer": True,
    }
    strategy.hybrid_configs["sharding_configs"].tensor_fusion = True
    assert_equal(strategy.hybrid_configs["pp_configs"].delay_scale_loss, True)
    assert_equal(strategy.hybrid_configs["sharding_configs"], {"tensor_fusion": True})
    strategy.tensor_parallel_configs = {"tensor_parallel_degree": 2}
    assert_equal(copy.deepcopy(strategy).topology(1).world_size(), 1)
    with raises(ArgumentError, "pp_configs=1; expected a dict of settings"):
        strategy.hybrid_configs = {"pp_configs": 1}
    with raises(AttributeError, "'use_timer' is not set"):
        assert strategy.hybrid_configs["pp_configs"].use_timer
    for configs, word in (
        ({"mp_configs": {"sync_param": True}}, "mp_configs['sync_param']=True"),
        ({"ep_degree": 2}, "ep_degree=2"),
    ):
        other: Any = fleet.DistributedStrategy()
        other.hybrid_configs = configs
        with raises(ArgumentError, word, "not ported"):
            other.topology(1)
    for name, reason in (
        ("pipeline_configs", "train a PipelineLayer"),
        ("amp", "torch.autocast"),
        ("nccl_comm_num", "leave it away"),
    ):
        with raises(AttributeError, f"no setting {name!r}", reason):
            getattr(strategy, name)
        with raises(AttributeError, f"no setting {name!r}", reason):
            setattr(strategy, name, {})
