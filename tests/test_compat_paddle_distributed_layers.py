"""compat.paddle.distributed: mp_ops, parallel layers, topology, fleet, experts, pipelines."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import commlib.compat.paddle.distributed as dist
from commlib.compat.paddle.distributed import fleet, mp_ops, pp_utils
from commlib.compat.paddle.distributed.hybrid_group import _current
from commlib.compat.paddle.distributed.topology import CommunicateTopology
from commlib.errors import ArgumentError, PeerError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.operator import calls
from tests.support.paddle_groups import FIRST_ID, own_groups
from tests.support.runs_on import runs_on

Tensor = torch.Tensor
meta = fleet.meta_parallel


def drawn(seed: int, *shape: int) -> Tensor:
    """Return the same values on every rank."""
    return sample(0, shape, torch.float64, seed)


def whole(ring: Any, part: Tensor, axis: int) -> Tensor:
    """Return the parts of all ranks along ``axis``, without the dialect."""
    every = torch.empty((ring.size, *part.shape), dtype=part.dtype, device=ring.device)
    ring.all_gather(every, part.detach().contiguous())
    return torch.cat(every.unbind(0), axis).requires_grad_()


# -- mp_ops ----------------------------------------------------------------------------------------


@runs_on("ranks")
def test_mp_ops(ring: Any) -> None:
    """Values and gradients, on the world and on a group in which the ranks are the same."""
    with own_groups():
        for group in (None, dist.new_group()):
            x = sample(ring.rank, (3, 4), torch.float64).to(ring.device).requires_grad_()
            every = [sample(rank, (3, 4), torch.float64) for rank in range(2)]
            weights = sample(ring.rank, (3, 8), torch.float64, 5).to(ring.device)
            same: Any = mp_ops._c_identity(x, group)
            (same * weights[:, :4]).sum().backward()
            total = sum(sample(rank, (3, 8), torch.float64, 5)[:, :4] for rank in range(2))
            assert_bits_equal(same.detach(), every[ring.rank], "_c_identity")
            assert_bits_equal(x.grad, total, "its gradient is summed")

            x.grad = None
            summed: Any = mp_ops._mp_allreduce(x, group=group)
            (summed * weights[:, :4]).sum().backward()
            assert_bits_equal(summed.detach(), every[0] + every[1], "_mp_allreduce")
            assert_bits_equal(x.grad, weights[:, :4].clone(), "its gradient passes unchanged")

            x.grad = None
            joined: Any = mp_ops._c_concat(x, group)
            (joined * weights).sum().backward()
            cols = slice(4 * ring.rank, 4 * ring.rank + 4)
            assert_bits_equal(joined.detach(), torch.cat(every, -1), "_c_concat")
            assert_bits_equal(x.grad, weights[:, cols].clone(), "its gradient is this rank's part")

            x.grad = None
            part: Any = mp_ops._c_split(x, group)
            (part * weights[:, :2]).sum().backward()
            both = [sample(rank, (3, 8), torch.float64, 5)[:, :2] for rank in range(2)]
            assert_bits_equal(part.detach(), every[ring.rank].chunk(2, -1)[ring.rank].clone())
            assert_bits_equal(x.grad, torch.cat(both, -1), "its gradient is concatenated")
        with raises(ArgumentError, "expected ReduceOp.SUM"):
            mp_ops._mp_allreduce(x, op=dist.ReduceOp.MAX)


@runs_on("ranks")
def test_cross_entropy(ring: Any) -> None:
    logits = drawn(1, 5, 8).to(ring.device)
    labels = torch.tensor([0, 7, 3, -100, 4], device=ring.device)
    shard = logits.chunk(2, -1)[ring.rank].clone().requires_grad_()
    reference = logits.clone().requires_grad_()
    want = F.cross_entropy(reference, labels, reduction="none")
    want.sum().backward()
    for form in (labels, labels.unsqueeze(-1)):
        shard.grad = None
        loss: Any = mp_ops._c_softmax_with_cross_entropy(shard, form)
        loss.sum().backward()
        assert_bits_equal(loss.detach(), want.detach().unsqueeze(-1), "loss", atol=1e-12)
        part = reference.grad.chunk(2, -1)[ring.rank].clone()  # type: ignore[union-attr]
        assert_bits_equal(shard.grad, part, "gradient", atol=1e-12)
    both: Any = mp_ops._c_softmax_with_cross_entropy(shard, labels, return_softmax=True)
    shares = logits.softmax(-1).chunk(2, -1)[ring.rank].clone()
    assert_bits_equal(both[1], shares, "the loss is first, the softmax second", atol=1e-12)
    with raises(ShapeError, "label has shape (5, 1, 1)"):
        mp_ops._c_softmax_with_cross_entropy(shard, labels.view(5, 1, 1))


@runs_on("ranks")
def test_split(ring: Any) -> None:
    x, weight, bias = (drawn(n, *s).to(ring.device) for n, s in enumerate([(3, 4), (4, 6), (6,)]))
    rows, columns = weight.chunk(2)[ring.rank], weight.chunk(2, 1)[ring.rank]
    own_x, own_bias = x.chunk(2, 1)[ring.rank], bias.chunk(2)[ring.rank]
    want, linear = x @ weight + bias, ((4, 6), "linear")
    by_rows = dist.split(x, *linear, 0, 2, weight_attr=rows, bias_attr=bias)
    assert_bits_equal(by_rows, want, "rows, the input whole", atol=1e-12)
    assert_bits_equal(
        dist.split(own_x, *linear, 0, 2, weight_attr=rows, bias_attr=bias), want, atol=1e-12
    )
    by_columns = dist.split(x, *linear, 1, 2, weight_attr=columns, bias_attr=own_bias)
    assert_bits_equal(by_columns, want, "columns", atol=1e-12)
    part = dist.split(x, *linear, 1, 2, False, columns, own_bias)
    own_want = want.chunk(2, 1)[ring.rank].clone()
    assert_bits_equal(part, own_want, "columns, not gathered", atol=1e-12)
    part = dist.split(own_x, *linear, 0, 2, False, rows, bias)
    assert_bits_equal(part, own_x @ rows, "rows, not summed")
    ids = torch.tensor([0, 3, 2], device=ring.device)
    output = dist.split(ids, (4, 6), "embedding", 0, 2, weight_attr=rows)
    assert_bits_equal(output, weight[ids], "embedding")
    before = calls(ring)
    for arguments, error, words in (
        (((4, 6), "conv"), ArgumentError, "operation='conv'"),
        (((4, 6), "linear", 2), ArgumentError, "axis=2"),
        (((4, 6), "embedding", 1), ArgumentError, "axis=1"),
        (((4, 6), "linear", 0, 1), ArgumentError, "pass num_partitions=2"),
        (((4, 6), "linear", 0, 2), ArgumentError, "use VocabParallelEmbedding"),
        (((5, 6), "linear", 0, 2, True, rows), ShapeError, "a multiple of the 2 ranks"),
        (((8, 6), "linear", 0, 2, True, rows), ShapeError, "expected (4, 6), this rank's part"),
    ):
        with raises(error, words):
            dist.split(x, *arguments)
    assert_equal(calls(ring), before, "calls launched by refused ones")


# -- fleet and the layers --------------------------------------------------------------------------


def started(**configs: Any) -> fleet.HybridCommunicateGroup:
    """Start fleet with these degrees."""
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = configs
    strategy.tensor_parallel_configs = {"tensor_init_seed": 11}
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group()


@runs_on("ranks")
def test_layers(ring: Any) -> None:
    """Forward and gradients as of one linear layer after another with the whole weights."""
    with own_groups():
        started(mp_degree=2)
        words = meta.VocabParallelEmbedding(8, 4)
        up = meta.ColumnParallelLinear(4, 6, has_bias=True, gather_output=False)
        down = meta.RowParallelLinear(6, 4, input_is_parallel=True, fuse_matmul_bias=True)
        wide, narrow = meta.ColumnParallelLinear(4, 6), meta.RowParallelLinear(6, 4)
        layers = torch.nn.ModuleList([words, up, down, wide, narrow]).double()
        with torch.no_grad():
            up.bias.copy_(drawn(3, 6).chunk(2)[ring.rank])  # type: ignore[union-attr]
            down.bias.copy_(drawn(4, 4))  # type: ignore[union-attr]
        ids = torch.tensor([[0, 7], [3, 4]], device=ring.device)
        x = down(F.gelu(up(words(ids))))
        out = narrow(wide(x))
        (out * out).sum().backward()

        axes = {words: 0, up: 1, down: 0, wide: 1, narrow: 0}
        full = {layer: whole(ring, layer.weight, axis) for layer, axis in axes.items()}
        up_bias = whole(ring, up.bias, 0)
        hidden = F.gelu(F.embedding(ids, full[words]) @ full[up] + up_bias)
        x = hidden @ full[down] + drawn(4, 4).to(ring.device)
        want = x @ full[wide] @ full[narrow]
        (want * want).sum().backward()
        assert_bits_equal(out.detach(), want.detach(), "output", atol=1e-12)
        for layer, axis in axes.items():
            grad: Any = full[layer].grad
            part = grad.chunk(2, axis)[ring.rank].contiguous()
            assert_bits_equal(layer.weight.grad, part, type(layer).__name__, atol=1e-12)
            weight: Any = layer.weight
            assert_equal((weight.is_distributed, weight.split_axis), (True, axis), "marks")
        assert_bits_equal(up.bias.grad, up_bias.grad.chunk(2)[ring.rank].clone(), atol=1e-12)  # type: ignore[union-attr]
        assert_equal(down.bias.is_distributed, False, "the bias of rows is whole")  # type: ignore[union-attr]
        assert_equal(wide.bias, None, "has_bias is off by default for columns")
        assert_equal(len(list(layers.parameters())), 8, "weights and biases")


@runs_on("ranks")
def test_parts_of_weights_are_drawn_differently(ring: Any) -> None:
    with own_groups():
        started(mp_degree=2)
        parts = whole(ring, meta.RowParallelLinear(6, 4).weight, 0).chunk(2)
        assert_equal(bool((parts[0] != parts[1]).all()), True, "each rank draws its part")
        replicated = whole(ring, torch.randn(3, device=ring.device), 0).chunk(2)
        assert_bits_equal(replicated[0].detach(), replicated[1].detach(), "the rest is drawn alike")

        def ones(weight: Tensor) -> None:
            torch.nn.init.ones_(weight)

        assert_equal(bool((meta.RowParallelLinear(6, 4, ones).weight == 1).all()), True)
        with raises(ArgumentError, "weight_attr=0.5", "fills a tensor in place"):
            meta.RowParallelLinear(6, 4, 0.5)
        for layer, arguments in (
            (meta.RowParallelLinear, (5, 4)),
            (meta.ColumnParallelLinear, (4, 5)),
            (meta.VocabParallelEmbedding, (5, 4)),
        ):
            with raises(ShapeError, layer.__name__, "=5; expected a multiple of the 2 ranks"):
                layer(*arguments)


@runs_on("ranks")
def test_generator_states(ring: Any) -> None:
    tracker = meta.RNGStatesTracker()
    tracker.add("a", 1)
    torch.manual_seed(5)
    first = torch.rand(3)
    torch.manual_seed(5)
    with tracker.rng_state("a"):
        inside = torch.rand(3)
    assert_bits_equal(torch.rand(3), first, "draws outside go on")
    saved = tracker.get_states_tracker()
    with tracker.rng_state("a"):
        later = torch.rand(3)
    tracker.set_states_tracker(saved)
    with tracker.rng_state("a"):
        assert_bits_equal(torch.rand(3), later, "a state from a checkpoint")
    torch.manual_seed(1)
    assert_bits_equal(torch.cat([inside, later]), torch.rand(6), "as after manual_seed")
    for name, seed in (("a", 2), ("b", 1)):
        with raises(ArgumentError, "the name or the seed is in use"):
            tracker.add(name, seed)
    with raises(ArgumentError, "rng_state('b'): no such state"), tracker.rng_state("b"):
        pass


def test_topology() -> None:
    """A grid of 2 x 2 x 3: the last axis changes fastest."""
    grid = CommunicateTopology(["data", "pipe", "model"], [2, 2, 3])
    assert grid.world_size() == 12
    assert grid.get_dim("model") == grid.get_dim_size("model") == 3
    assert grid.get_hybrid_group_names() == ["data", "pipe", "model"]
    assert [grid.get_rank(data=d, pipe=p, model=2) for d in (0, 1) for p in (0, 1)] == [2, 5, 8, 11]
    assert tuple(grid.get_coord(7)) == (1, 0, 1) and grid.get_coord(7).model == 1
    assert grid.get_axis_list("pipe", 1) == [3, 4, 5, 9, 10, 11]
    assert grid.get_comm_list("pipe") == [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8, 11]]
    assert grid.get_comm_list("model") == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert grid.get_comm_list("data") == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert grid.get_rank_from_stage(7, pipe=1) == 10
    wrong: list[Any] = [
        lambda: grid.get_rank(data=0, pipe=0),
        lambda: grid.get_rank(data=0, pipe=2, model=0),
        lambda: grid.get_coord(12),
        lambda: grid.get_dim("sep"),
        lambda: CommunicateTopology(["data"], [1, 2]),
        lambda: CommunicateTopology(["data"], [0]),
    ]
    for call in wrong:
        with pytest.raises(ArgumentError, match="expected"):
            call()


@runs_on("ranks")
def test_hybrid_groups(ring: Any) -> None:
    """Every axis has a ring; one axis has both ranks."""
    for axis, mode in (("dp", 0), ("mp", 1), ("pp", 2), ("sharding", 3), ("sep", 4)):
        with own_groups():
            hybrid = started(**{f"{axis}_degree": 2})
            assert_equal(hybrid.get_parallel_mode(), mode, f"mode of {axis}")
            name = {"dp": "data", "mp": "model", "pp": "pipe"}.get(axis, axis)
            group: Any = getattr(hybrid, f"get_{name}_parallel_group")()
            assert_equal((group.ranks, group.rank), ([0, 1], ring.rank), f"group of {axis}")
            size: Any = getattr(hybrid, f"get_{name}_parallel_world_size")()
            assert_equal(size, 2, f"size of {axis}")
            if axis != "pp":
                assert_equal(getattr(hybrid, f"get_{name}_parallel_rank")(), ring.rank)
                assert_equal(getattr(hybrid, f"get_{name}_parallel_group_src_rank")(), 0)
            alone = "data" if axis == "mp" else "model"
            other: Any = getattr(hybrid, f"get_{alone}_parallel_group")()
            assert_equal((other.ranks, other.rank), ([ring.rank], 0), f"{alone} beyond {axis}")
            assert_equal(hybrid.get_stage_id(), ring.rank if axis == "pp" else 0, "stage")
            ends = (ring.rank == 0, ring.rank == 1) if axis == "pp" else (True, True)
            assert_equal((hybrid.is_first_stage, hybrid.is_last_stage), ends, "stages")
            check = hybrid.get_check_parallel_group()
            assert_equal(check.ranks, [ring.rank] if axis == "dp" else [0, 1], "check group")
            check = hybrid.get_check_parallel_group(True)
            assert_equal(check.nranks, 1 if axis == "sharding" else 2, "check group, sharding")
            if axis == "pp":
                assert_equal(hybrid._get_p2p_next_rank(), 1 - ring.rank, "next")
                assert_equal(hybrid._get_p2p_prev_rank(), 1 - ring.rank, "previous")
                assert_equal(hybrid.get_rank_from_stage(1), 1, "rank of a stage")
            assert_equal(hybrid.topology().world_size(), 2, "topology")


@runs_on("ranks")
def test_fleet(ring: Any) -> None:
    with own_groups():
        strategy = fleet.DistributedStrategy()
        strategy.hybrid_configs = {"mp_degree": 2, "order": ["mp", "dp", "pp", "sharding", "sep"]}
        names = strategy.topology(2).get_hybrid_group_names()
        assert_equal(names, ["model", "data", "pipe", "sharding", "sep"], "order")
        fleet.init(is_collective=True, strategy=strategy)
        seeds = ring.exchange([torch.initial_seed()])
        assert_equal(seeds[0], seeds[1], "one seed for what is replicated, drawn by rank 0")
        assert_equal((fleet.worker_index(), fleet.worker_num()), (ring.rank, 2), "workers")
        assert_equal(fleet.is_first_worker(), ring.rank == 0, "is_first_worker")
        assert_equal(dist.new_group([0]).id > FIRST_ID + 5, True, "numbers after those of the axes")
        fleet.barrier_worker()
        with raises(ArgumentError, "give 3 ranks; expected 2", f"rank {ring.rank}"):
            started(mp_degree=3)
        with raises(ArgumentError, "unknown settings ['tp_degree']"):
            started(tp_degree=2)
        with raises(ArgumentError, "order=['mp']"):
            started(order=["mp"])
        with raises(ArgumentError, "parameter servers are out of scope"):
            fleet.init()
        small = fleet.HybridCommunicateGroup(CommunicateTopology(["model"], [2]))
        assert_equal(small.get_data_parallel_world_size(), 1, "an axis that is not there")
        for missing in (small.get_data_parallel_group, small.get_check_parallel_group):
            with raises(ArgumentError, "axis 'data'; expected one of ['model']"):
                missing()
        with raises(AttributeError, "amp"):
            setattr(strategy, "amp", True)  # noqa: B010
        saved, _current.group = _current.group, None
        with raises(ArgumentError, "there is no hybrid group", "mp_group="):
            meta.ParallelCrossEntropy()
        layer = meta.ParallelCrossEntropy(dist.new_group())
        assert_equal(layer.world_size, 2, "a layer with its own group")
        _current.group = saved


@runs_on("ranks")
def test_data_parallel_training(ring: Any) -> None:
    """Every rank starts from the weights of rank 0 and takes the mean gradient."""
    with own_groups():
        started(dp_degree=2)
        assert_equal(torch.initial_seed(), 11, "tensor_init_seed without tensor parallelism")
        torch.manual_seed(ring.rank)
        model = torch.nn.Linear(4, 3).double().to(ring.device)
        first = whole(ring, model.weight, 0).detach()[:3]
        fleet.distributed_model(model)
        assert_bits_equal(model.weight.detach(), first, "the weight of rank 0")
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 0.5))
        every = [sample(rank, (5, 4), torch.float64).to(ring.device) for rank in range(2)]
        model(every[ring.rank]).sum().backward()
        optimizer.step()
        mean = (every[0].sum(0) + every[1].sum(0)) / 2
        assert_bits_equal(model.weight.detach(), first - 0.5 * mean, "weight", atol=1e-12)
        optimizer.clear_grad(set_to_zero=False)
        assert_equal(model.weight.grad, None, "clear_grad")
        assert_equal(optimizer.param_groups[0]["lr"], 0.5, "the optimizer's own attributes")


@runs_on("ranks")
def test_weights_that_are_not_split(ring: Any) -> None:
    """All ranks of a tensor-parallel group get those of its first one; parts stay."""
    with own_groups():
        started(mp_degree=2)
        torch.manual_seed(ring.rank)
        model = torch.nn.Sequential(meta.ColumnParallelLinear(4, 6), torch.nn.Linear(6, 3))
        model = model.double().to(ring.device)
        parts = [one.detach().clone() for one in model.parameters()]
        fleet.distributed_model(model)
        split, weight, bias = (one.detach() for one in model.parameters())
        assert_bits_equal(split, parts[0], "a part")
        assert_bits_equal(weight, whole(ring, parts[1], 0).detach()[:3].clone(), "a weight")
        assert_bits_equal(bias, whole(ring, parts[2], 0).detach()[:3].clone(), "a bias")


@runs_on("ranks")
def test_copied_layers_keep_their_parts(ring: Any) -> None:
    with own_groups():
        started(mp_degree=2)
        layer = meta.ColumnParallelLinear(4, 6, has_bias=True)
        torch.nn.init.constant_(layer.bias, ring.rank)
        down: Any = meta.RowParallelLinear(6, 4)
        torch.nn.init.constant_(down.bias, ring.rank)
        model = torch.nn.ModuleList([copy.deepcopy(layer), down])
        parts = [one.detach().clone() for one in model.parameters()]
        fleet.distributed_model(model)
        for part, one in zip(parts[:3], model.parameters(), strict=False):
            assert_bits_equal(one.detach(), part, "a part")
        assert_equal(down.bias.tolist(), [0.0] * 4, "what is whole comes from rank 0")


@runs_on("ranks")
def test_parameters_with_a_gradient_on_one_rank(ring: Any) -> None:
    """Rank r uses layer r alone; the mean counts the other rank as zero."""
    with own_groups():
        started(dp_degree=2)
        layers = [torch.nn.Linear(1, 1, bias=False, device=ring.device) for _ in range(3)]
        model = torch.nn.ModuleList(layers)
        layers[2].requires_grad_(False)
        for one in model.parameters():
            torch.nn.init.zeros_(one)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD(model.parameters(), 1.0))
        layers[ring.rank](torch.full((1, 1), 10.0**ring.rank, device=ring.device)).sum().backward()
        optimizer.step()
        weights = [one.item() for one in model.parameters()]
        assert_equal(weights, [-0.5, -5.0, 0.0], "weights on both ranks")
        assert_equal(layers[2].weight.grad, None, "a frozen parameter")


# -- experts and pipelines -------------------------------------------------------------------------


@runs_on("ranks")
def test_experts(ring: Any) -> None:
    """The documented vector: 2 experts per rank, counts that differ."""
    with own_groups():
        for group in (None, dist.new_group()):
            x = torch.arange(1.0, 11.0, device=ring.device).view(5, 2).requires_grad_()
            counts = torch.tensor([[2, 1, 1, 1], [1, 1, 2, 1]][ring.rank])
            received: Any = dist.global_scatter(x, counts, counts, group)
            rows = [[1, 3, 1, 5, 3], [7, 5, 7, 9, 9]][ring.rank]
            assert_equal(received[:, 0].tolist(), rows, "global_scatter")
            (received * received).sum().backward()
            assert_equal(x.grad.tolist(), (2 * x).tolist(), "its gradient")  # type: ignore[union-attr]
            back: Any = dist.global_gather(x.detach(), counts, counts, group)
            rows = [[1, 3, 7, 1, 7], [5, 9, 3, 5, 9]][ring.rank]
            assert_equal(back[:, 0].tolist(), rows, "global_gather")


@runs_on("ranks")
def test_slices_between_stages(ring: Any) -> None:
    """A tensor in two slices, and one that two does not divide; on both streams."""
    with own_groups():
        other, group = 1 - ring.rank, dist.new_group()
        for count in (6, 5):
            x = torch.arange(float(count), device=ring.device) + 10 * ring.rank
            peer = torch.arange(float(count), device=ring.device) + 10 * other
            for calc in (True, False):
                out = torch.full_like(x, -1.0)
                steps = [
                    lambda x=x, calc=calc: pp_utils.send_partial(x, other, 2, 1, group, calc),
                    lambda out=out, calc=calc: pp_utils.recv_partial(out, other, 2, 1, group, calc),
                ]
                tasks: list[Any] = [
                    step() for step in (steps if ring.rank == 0 else reversed(steps))
                ]
                for task in tasks:
                    task.wait()
                want = torch.cat([torch.full_like(x[:3], -1.0), peer[3:]]) if count == 6 else peer
                assert_bits_equal(out, want, f"{count} elements, use_calc_stream={calc}")
        with raises(ShapeError, "send_partial: tensor has shape (0,)"):
            pp_utils.send_partial(x[:0], other, 2, 0, group)
        with raises(PeerError, "src=9"):
            pp_utils.recv_partial(out, 9, group=group)


@runs_on("ranks")
def test_gathered_slices(ring: Any) -> None:
    with own_groups():
        want = torch.tensor([0.0, 1.0, 12.0, 13.0], device=ring.device)
        for group in (None, dist.new_group()):
            for calc in (True, False):
                x = torch.arange(4.0, device=ring.device) + 10 * ring.rank
                task: Any = pp_utils.allgather_partial(x, 2, ring.rank, group, calc)
                task.wait()
                assert_bits_equal(x, want, f"use_calc_stream={calc}")
        odd = torch.ones(3, device=ring.device)
        assert_equal(pp_utils.allgather_partial(odd, 2, ring.rank) is odd, True, "sent whole")
        for nranks, rank, words in ((4, ring.rank, "nranks=4"), (2, 1 - ring.rank, "rank=")):
            with raises(ArgumentError, words):
                pp_utils.allgather_partial(x, nranks, rank)
        pg = dist.get_group().process_group  # type: ignore[union-attr]
        assert_equal((pg.rank(), pg.size()), (ring.rank, 2), "process_group")
        assert_equal(pg.name(), "NCCL" if ring.device.type == "cuda" else "GLOO", "name")
        pg.barrier().wait()


@runs_on("ranks")
def test_batches_of_stages(ring: Any) -> None:
    """Both ranks send before they receive: together they can't wait for each other."""
    with own_groups():
        group, other = dist.new_group(), 1 - ring.rank
        hybrid: Any = None
        x = torch.arange(4.0, device=ring.device) + 10 * ring.rank
        for enabled in (True, False):
            pp_utils.initialize_p2p_groups(hybrid, enable_partial_send_recv=enabled)
            out = torch.zeros_like(x)
            pp_utils.batch_send_recv_on_calc_stream(
                [
                    pp_utils.P2PonCalcStream(pp_utils._send_on_calc_stream, x, other, group, 2, 0),
                    pp_utils.P2PonCalcStream(
                        pp_utils._recv_on_calc_stream, out, other, group, 2, 0
                    ),
                ]
            )
            peer = [float(i) + 10 * other for i in range(4)]
            assert_equal(out.tolist(), [*peer[:2], 0.0, 0.0] if enabled else peer, "received")
        pp_utils.initialize_p2p_groups(hybrid)
        before = calls(ring)
        two = [
            pp_utils.P2PonCalcStream(pp_utils._send_on_calc_stream, x, other, one)
            for one in (group, None)
        ]
        with raises(ArgumentError, "calls of rings [900, 0]", "use batch_isend_irecv"):
            pp_utils.batch_send_recv_on_calc_stream(two)
        assert_equal(calls(ring), before, "calls launched by refused ones")
        with raises(ArgumentError, "expected a list of one P2PonCalcStream or more"):
            pp_utils.batch_send_recv_on_calc_stream([])
        with raises(ArgumentError, "expected _send_on_calc_stream"):
            pp_utils.P2PonCalcStream(dist.isend, x, other, group)
