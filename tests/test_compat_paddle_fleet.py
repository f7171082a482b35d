"""compat.paddle.distributed.fleet: signatures, groups of several axes, and settings of upstream."""

import copy
from typing import Any

import torch

from commlib.compat import paddle
from commlib.compat.paddle import distributed as dist
from commlib.compat.paddle.distributed import fleet, mp_ops
from commlib.compat.paddle.distributed.fleet import meta_parallel as meta
from commlib.compat.paddle.distributed.fleet.meta_optimizers import HybridParallelOptimizer
from commlib.compat.paddle.distributed.topology import CommunicateTopology
from commlib.errors import ArgumentError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
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
            grad = weight.grad
            optimizer.clear_grad()
            assert_equal((weight.grad is grad, grad.tolist()), (True, [0.0] * 3), "zeros")
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


def test_ranks_over_several_axes() -> None:
    grid = CommunicateTopology(dims=[2, 2, 1, 1, 2])
    assert grid.get_fused_ranks(["data", "sep"]) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert grid.get_fused_ranks(["pipe", "model"]) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert grid.get_fused_ranks(["model", "pipe"]) == [[0, 2, 1, 3], [4, 6, 5, 7]]
    with raises(ArgumentError, "axis 'mp'; expected one of"):
        grid.get_fused_ranks(["mp"])


def summed(group: dist.Group, ring: Any) -> float:
    """Return the sum of 10 to the power of the rank over a group."""
    value = torch.tensor([10.0**ring.rank], device=ring.device)
    dist.all_reduce(value, group=group)
    return float(value)


@runs_on("four_ranks")
def test_groups_over_several_axes(ring: Any) -> None:
    with own_groups():
        hybrid = started(sep_degree=2, mp_degree=2)[1]
        across, along = [ring.rank % 2, ring.rank % 2 + 2], [0, 1] if ring.rank < 2 else [2, 3]
        group = hybrid.get_dp_sep_parallel_group()
        assert_equal((group.ranks, summed(group, ring)), (across, sum(10.0**n for n in across)))
        group = hybrid.get_pp_mp_parallel_group()
        assert_equal((group.ranks, summed(group, ring)), (along, sum(10.0**n for n in along)))
        ranks, group = hybrid.create_fuse_group(["sep", "model"])
        assert_equal((ranks, group.ranks, summed(group, ring)), ([0, 1, 2, 3], ranks, 1111.0))
        with raises(ArgumentError, "fused_strategy_list=[]"):
            hybrid.create_fuse_group([])
        with raises(ArgumentError, "get_p2p_groups: one stage"):
            hybrid.get_p2p_groups()


@runs_on("four_ranks")
def test_pairs_of_stages(ring: Any) -> None:
    """A group per direction: what one stage sends to, the other one receives from."""
    with own_groups():
        hybrid = started(pp_degree=4)[1]
        after, before = (
            sorted([ring.rank, (ring.rank + 1) % 4]),
            sorted([ring.rank, (ring.rank - 1) % 4]),
        )
        groups = hybrid.get_p2p_groups()
        assert_equal([one.ranks for one in groups], [after, before, after, before], "pairs")
        assert hybrid.get_p2p_groups() is groups
        every = ring.exchange([one.id for one in groups])
        follower = every[(ring.rank + 1) % 4]
        assert_equal((groups[0].id, groups[2].id), (follower[3], follower[1]), "directions")
        assert_equal(len({one.id for one in groups}), 4, "one group per direction")
        with raises(ArgumentError, "('data', 'sep') exist with a sep axis", "create_fuse_group"):
            hybrid.get_dp_sep_parallel_group()


@runs_on("ranks")
def test_attributes_of_layers(ring: Any) -> None:
    """Attributes that programs read."""
    with own_groups():
        started(mp_degree=2)
        embedding = meta.VocabParallelEmbedding(8, 3, name="table")
        columns = meta.ColumnParallelLinear(3, 4, fuse_matmul_bias=True)
        rows = meta.RowParallelLinear(4, 5, name="rows")
        loss = meta.ParallelCrossEntropy(None, "loss")
        assert_equal((embedding.origin_num_embeddings, embedding.num_embeddings), (8, 8))
        assert_equal((columns.fuse_matmul_bias, rows.fuse_matmul_bias), (True, False))
        assert_equal((rows.in_features, rows.out_features), (4, 5))
        names = [layer.name for layer in (embedding, columns, rows, loss)]
        assert_equal(names, ["table", None, "rows", "loss"])


@runs_on("ranks")
def test_loss_of_several_labels(ring: Any) -> None:
    """It is the operator's, over the group; one label per row needs no dim."""
    logits = sample(ring.rank, (4, 3), torch.float32).to(ring.device)
    label = torch.tensor([[0, 5], [1, 1], [4, -100], [2, 3]], device=ring.device)
    weight = torch.tensor([[0.5, 0.25]] * 4, device=ring.device)
    call: Any = mp_ops._c_softmax_with_multi_label_cross_entropy
    operator = paddle.c_softmax_with_multi_label_cross_entropy
    softmax, loss = operator(logits, label, weight)
    assert_bits_equal(call(logits, label, weight), loss)
    for got, want in zip(call(logits, label, weight, None, True), (loss, softmax), strict=True):
        assert_bits_equal(got, want)
    each = operator(logits, label, weight, sum_multi_label_loss=False)[1]
    assert_bits_equal(call(logits, label, weight, sum_multi_label_loss=False), each)
    expected = operator(logits, label[:, :1], weight[:, :1])[1]
    assert_bits_equal(call(logits, label[:, 0], weight[:, 0]), expected)
    with raises(ShapeError, "label has shape (4, 2, 1)", "as many"):
        call(logits, label[..., None], weight)
    for mark in (mp_ops._set_var_distributed, mp_ops.set_var_distributed):
        marked = torch.ones(2)
        mark(marked)
        mark(None)
        assert vars(marked) == {"is_distributed": True}


@runs_on("ranks")
def test_weights_that_share_memory(ring: Any) -> None:
    """A model may tie its weights by their memory, and a buffer may be a part of another one."""
    with own_groups():
        started(dp_degree=2)
        first, second = (torch.nn.Linear(4, 4, device=ring.device) for _ in range(2))
        second.weight.data = first.weight.data
        table = torch.full((6,), float(ring.rank), device=ring.device)
        model = torch.nn.Sequential(first, second)
        model.register_buffer("table", table)
        model.register_buffer("part", table[1:3])
        with torch.no_grad():
            first.weight.fill_(5.0 + ring.rank)
        fleet.distributed_model(model)
        assert_bits_equal(second.weight.detach(), [[5.0] * 4] * 4, "the weight of rank 0")
        assert_equal(first.weight.data_ptr(), second.weight.data_ptr(), "one memory")
        assert_bits_equal(table, [0.0] * 6, "the buffer of rank 0")
