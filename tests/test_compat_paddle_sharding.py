"""compat.paddle.distributed.fleet: optimizer states that are divided over the sharding ring."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from commlib.compat.paddle.distributed import fleet
from commlib.compat.paddle.distributed.fleet.meta_optimizers import DygraphShardingOptimizer
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.operator import calls
from tests.support.paddle_groups import own_groups
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on

Tensor = torch.Tensor
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
SHAPES = ((3, 4), (5,), (), (6, 2), (7, 3))  # 12, 5, 1, 12 and 21 elements; a frozen 12 follow
OWN = {2: ([4], [0, 1, 2, 3]), 3: ([4], [0], [1, 2, 3])}  # trained, of each rank
STEPS = 3


def started(**degrees: int) -> fleet.HybridCommunicateGroup:
    strategy = fleet.DistributedStrategy()
    strategy.hybrid_configs = degrees
    fleet.init(is_collective=True, strategy=strategy)
    return fleet.get_hybrid_communicate_group()


def weights(ring: Any) -> list[Tensor]:
    """Return parameters, the same on every rank. The last one is frozen."""
    every = [sample(0, shape, torch.float32, n) for n, shape in enumerate((*SHAPES, (3, 4)))]
    placed = [one.to(ring.device) for one in every]
    return [one.requires_grad_(one is not placed[-1]) for one in placed]


def grouped(parameters: list[Tensor]) -> list[dict[str, Any]]:
    """Return two groups with two learning rates."""
    return [{"params": parameters[:2], "lr": 0.5}, {"params": parameters[2:]}]


def gradient(ring: Any, rank: int, step: int, index: int) -> Tensor:
    return sample(rank, SHAPES[index], torch.float32, 100 * step + index).to(ring.device)


def train(ring: Any, parameters: list[Tensor], optimizer: Any, steps: range) -> None:
    """Take steps; the third parameter has a gradient on rank 0 alone."""
    for step in steps:
        for index, one in enumerate(parameters[:-1]):
            if index != 2 or ring.rank == 0:
                one.grad = gradient(ring, ring.rank, step, index)
        optimizer.step()
        optimizer.clear_grad(set_to_zero=False)
        assert_equal([one.grad for one in parameters], [None] * 6, "gradients")


def alone(ring: Any, make: Make, steps: int = STEPS) -> tuple[list[Tensor], dict[str, Any]]:
    """Return the weights and states of the bare optimizer, from the mean of all gradients."""
    parameters = weights(ring)
    optimizer = make(grouped(parameters))
    for step in range(steps):
        for index, one in enumerate(parameters[:-1]):
            present = range(ring.size if index != 2 else 1)
            total = sum(gradient(ring, rank, step, index) for rank in present)
            one.grad = total / ring.size
        optimizer.step()
    return parameters, optimizer.state_dict()


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, 0.1)


def momentum(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, 0.1, momentum=0.9, weight_decay=0.1)


def assert_weights_equal(parameters: list[Tensor], want: list[Tensor]) -> None:
    for index, (one, other) in enumerate(zip(parameters, want, strict=True)):
        assert_bits_equal(one.detach(), other.detach(), f"parameter {index}")


@runs_on("ranks")
def test_bits_of_one_optimizer(ring: Any) -> None:
    """Weights and states are those of the bare optimizer on the mean gradients."""
    for make in (adamw, momentum):
        with own_groups():
            started(sharding_degree=2)
            parameters = weights(ring)
            optimizer = fleet.distributed_optimizer(make(grouped(parameters)))
            train(ring, parameters, optimizer, range(STEPS))
            want, full_state = alone(ring, make)
            assert_weights_equal(parameters, want)
            saved = optimizer.state_dict()
            assert_equal(sorted(saved["state"]), OWN[2][ring.rank], "states on this rank")
            assert_equal(saved["param_groups"], full_state["param_groups"], "all parameters")
            for index, state in saved["state"].items():
                for name, value in state.items():
                    assert_bits_equal(value, full_state["state"][index][name], f"{name} of {index}")


def resume(ring: Any, parameters: list[Tensor], saved: dict[str, Any]) -> None:
    """Load ``saved`` into a new optimizer, take the last step, and compare the weights."""
    optimizer = fleet.distributed_optimizer(adamw(grouped(parameters)))
    entries = list(saved["state"])
    optimizer.set_state_dict(saved)
    assert_equal(list(saved["state"]), entries, "what was loaded does not change")
    held = sorted(optimizer.state_dict()["state"])
    assert_equal(held, list(OWN[ring.size][ring.rank]), "states on this rank")
    train(ring, parameters, optimizer, range(STEPS - 1, STEPS))
    assert_weights_equal(parameters, alone(ring, adamw)[0])


@runs_on("ranks")
def test_resumed_training(ring: Any) -> None:
    """From this rank's states, from those of all ranks, and from a bare optimizer's."""
    with own_groups():
        started(sharding_degree=2)
        parameters = weights(ring)
        optimizer = fleet.distributed_optimizer(adamw(grouped(parameters)))
        train(ring, parameters, optimizer, range(STEPS - 1))
        my_state = copy.deepcopy(optimizer.state_dict())
        every = ring.all_gather_object(my_state["state"])
        for saved in (
            my_state,
            {**my_state, "state": {**every[0], **every[1]}},
            alone(ring, adamw, STEPS - 1)[1],
        ):
            resume(
                ring,
                [one.detach().clone().requires_grad_(one.requires_grad) for one in parameters],
                saved,
            )
        other = {**my_state, "state": every[1 - ring.rank]}
        with raises(
            ArgumentError,
            f"the states are those of parameters {list(OWN[2][1 - ring.rank])}",
            f"without {list(OWN[2][ring.rank])}; load the states of all ranks, joined in one dict",
            f"rank {ring.rank}",
        ):
            optimizer.load_state_dict(other)
        optimizer.set_state_dict({**my_state, "state": {}})
        assert_equal(optimizer.state_dict()["state"], {}, "states of an optimizer without a step")


@runs_on("ranks")
def test_calls_of_upstream(ring: Any) -> None:
    """The class by itself, as upstream's trainers use it."""
    with own_groups():
        hybrid = started(sharding_degree=2)
        parameters = weights(ring)
        optimizer = DygraphShardingOptimizer(momentum(grouped(parameters)), hybrid)
        expected = [parameters[index] for index in OWN[2][ring.rank]]
        actual = optimizer.filter_parameters(parameters[:-1], hybrid)
        assert_equal(
            [id(one) for one in actual], [id(one) for one in expected], "filter_parameters"
        )
        grads = [gradient(ring, ring.rank, 0, index) for index in range(5)]
        for one, value in zip(parameters, grads, strict=False):
            one.grad = value.clone()
        parameters[1].grad = None  # on both ranks: it takes no part
        saved = parameters[1].detach().clone()
        optimizer.reduce_gradients(parameters, hybrid)
        for index, one in enumerate(parameters[:-1]):
            if index in OWN[2][ring.rank] and index != 1:
                mean = (gradient(ring, 0, 0, index) + gradient(ring, 1, 0, index)) / 2
                assert_bits_equal(one.grad, mean, f"the mean gradient {index}")
        before = [one.grad for one in parameters]
        optimizer.step()
        same = [one.grad is gradient for one, gradient in zip(parameters, before, strict=True)]
        assert_equal(same, [True] * 6, "gradients are where they were")
        assert_bits_equal(parameters[1].detach(), saved, "a parameter without a gradient")
        optimizer.clear_grad()
        same = [one.grad is gradient for one, gradient in zip(parameters, before, strict=True)]
        assert_equal(same, [True] * 6, "zeros in the same memory")
        assert_equal(sum(float(one.grad.abs().sum()) for one in parameters if one.grad is not None
                         ), 0.0, "zeros")  # fmt: skip


@runs_on("ranks")
def test_parameters_that_are_added(ring: Any) -> None:
    """The rank with fewer elements gets them; a failed step leaves all gradients."""
    with own_groups():
        started(sharding_degree=2)
        first = torch.ones(3, device=ring.device, requires_grad=True)
        optimizer = fleet.distributed_optimizer(torch.optim.SGD([first], 1.0, momentum=0.5))
        added = torch.ones(2, device=ring.device, requires_grad=True)
        optimizer.add_param_group({"params": [added]})
        first.grad, added.grad = torch.full_like(first, 2.0), torch.full_like(added, ring.rank)
        optimizer.step()
        assert_equal((first.tolist(), added.tolist()), ([-1.0] * 3, [0.5] * 2), "weights")
        assert_equal(sorted(optimizer.state_dict()["state"]), [ring.rank], "one state per rank")

        def fail(*_: object) -> None:
            raise RuntimeError("no step")

        optimizer.register_step_pre_hook(fail)
        before, gradients = calls(ring), (first.grad, added.grad)
        with raises(RuntimeError, "no step"):
            optimizer._inner_opt.step()
        assert_equal(calls(ring), before, "calls launched")
        assert_equal((first.grad is gradients[0], added.grad is gradients[1]), (True, True))


def three(ring: Any) -> None:
    """Bits of an optimizer whose states are not divided; states of all ranks, and of two ranks."""
    trained: list[list[Tensor]] = []
    for degrees in ({"sharding_degree": 3}, {"dp_degree": 3}):
        with own_groups():
            started(**degrees)
            trained.append(weights(ring))
            optimizer = fleet.distributed_optimizer(adamw(grouped(trained[-1])))
            train(ring, trained[-1], optimizer, range(STEPS))
    assert_weights_equal(*trained)
    with own_groups():
        started(sharding_degree=3)
        optimizer = fleet.distributed_optimizer(adamw(grouped(weights(ring))))
        saved = alone(ring, adamw)[1]
        optimizer.set_state_dict(saved)
        held = optimizer.state_dict()["state"]
        assert_equal(sorted(held), list(OWN[3][ring.rank]), "states on this rank")
        part = {index: saved["state"][index] for index in OWN[2][1]}  # as a program of two saves
        if ring.rank == 0:
            with raises(ArgumentError, "expected [4], the parameters of this rank"):
                optimizer.set_state_dict({**saved, "state": part})


def test_three_ranks(new_ranks: NewRanks) -> None:
    with new_ranks(3) as ranks:
        ranks(three)


def four(ring: Any) -> None:
    """Two of the replicas are data-parallel, or of the sep axis, and have the same states."""
    for axis in ("dp", "sep"):
        with own_groups():
            started(**{"sharding_degree": 2, f"{axis}_degree": 2, "dp_degree": -1})
            one = torch.zeros(4, device=ring.device, requires_grad=True)
            two = torch.zeros(2, device=ring.device, requires_grad=True)
            optimizer = fleet.distributed_optimizer(torch.optim.SGD([one, two], 1.0, momentum=0.5))
            one.grad = torch.full_like(one, 2.0**ring.rank)
            two.grad = torch.full_like(two, 10.0 * 2**ring.rank)
            optimizer.step()
            assert_equal((one.tolist(), two.tolist()), ([-3.75] * 4, [-37.5] * 2), axis)
            sharding = fleet.get_hybrid_communicate_group().get_sharding_parallel_rank()
            assert_equal(sorted(optimizer.state_dict()["state"]), [sharding], "states")


def test_four_ranks(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        ranks(four)
