"""ops.DistributedFusedLamb: settings, states and single ranks that are wrong; nobody waits."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import ops
from commlib.errors import ArgumentError, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.lamb import Case, bits_of, give, optimizer, parameters, small, train
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

Lamb: Any = ops.DistributedFusedLamb
SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"lr": float("nan")}, "lr of group 0 is nan; expected a number >= 0"),
    ({"lr": float("inf")}, "lr of group 0 is inf"),
    ({"lr": "x"}, "lr of group 0 is 'x'"),
    ({"lr": True}, "lr of group 0 is True"),
    ({"lr": torch.tensor(1)}, "lr of group 0 is (torch.int64,)"),
    ({"weight_decay": float("nan")}, "weight_decay of group 0 is nan"),
    ({"eps": None}, "eps of group 0 is None"),
    ({"betas": 0.9}, "betas of group 0 is 0.9; expected two numbers in [0, 1)"),
    ({"betas": ("a", 0.9)}, "betas of group 0 is ('a', 0.9)"),
    ({"max_grad_norm": "x"}, "max_grad_norm is 'x'; expected a number >= 0"),
    ({"max_grad_norm": float("nan")}, "max_grad_norm is nan"),
    ({"gradient_accumulation_steps": True}, "gradient_accumulation_steps is True"),
    ({"clip_after_allreduce": "no"}, "clip_after_allreduce is 'no'; expected True or False"),
    ({"exclude_from_weight_decay": 3}, "exclude_from_weight_decay raised TypeError"),
    ({"exclude_from_weight_decay": lambda p: p == 1}, "raised RuntimeError for parameter 0"),
]


def ones(comm: Any, *shape: int) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape, device=comm.device))


@runs_on("cpu_ranks")
def test_settings(comm: Any) -> None:
    for kwargs, text in SETTINGS:
        with raises(ArgumentError, f"DistributedFusedLamb on ring 0 (rank {comm.rank}", text, ";"):
            Lamb([ones(comm, 2, 2)], comm, **kwargs)
    one = ones(comm, 2, 2)
    tied = torch.nn.Parameter(one.data)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for params, text in (
            ([one, ones(comm, 3), one], "parameter 2 is the same as parameter 0"),
            ([("a", one), ("b", one)], "parameter 1 is the same as parameter 0"),
            ([{"params": [one]}, {"params": [one]}], "more than one parameter group"),
            ([one, tied], "parameter 1 is in the memory of parameter 0"),
        ):
            with raises(ArgumentError, text):
                Lamb(params, comm)
    one.grad = torch.ones(2, 2).to_sparse().to(comm.device)
    with raises(ArgumentError, "gradient of parameter 0 has torch.sparse_coo", "sparse=False"):
        Lamb([one], comm)
    with raises(RingError, "ring_id=True", "a bool is none"):
        Lamb([ones(comm, 2)], True)


@runs_on("ranks")
def test_ranks_that_differ(comm: Any) -> None:
    """Rates, decays, groups and exclusions are compared over the ranks, as other settings are."""
    rank = comm.rank
    one, other = ones(comm, 2), ones(comm, 3)
    grouped = [{"params": [one]}, {"params": [other]}] if rank else [{"params": [one, other]}]
    for params, kwargs, text in (
        ([one, other], {"lr": 0.1 + rank}, "lr of group 0: "),
        ([one, other], {"lr": torch.tensor(0.1 + rank)}, "lr of group 0: "),
        ([one, other], {"weight_decay": 0.1 + rank}, "weight_decay of group 0: "),
        (grouped, {}, "number of parameter groups: 1 on ranks [0], 2 on ranks [1]"),
        (
            [one, other],
            {"exclude_from_weight_decay": lambda p: bool(rank)},
            "parameters with weight decay: 2 on ranks [0], 0 on ranks [1]",
        ),
        (
            [one, other],
            {"exclude_from_weight_decay": lambda p: len(p) == 2 + rank},
            "hash of exclude_from_weight_decay's answers: ",
        ),
    ):
        with raises(ArgumentError, text, "expected the same on every rank"):
            Lamb(params, comm, **kwargs)
    with raises(ArgumentError, "ValueError" if rank else "invalid arguments on ranks [1]"):
        Lamb([one], comm, exclude_from_weight_decay=failing if rank else None)
    rate = torch.tensor(0.1, device=comm.device) if rank else 0.1
    Lamb([one, other], comm, lr=rate).step()


def failing(param: torch.Tensor) -> bool:
    raise ValueError("no such name")


def alone(comm: Any, case: Case) -> None:
    """What one rank gets wrong in a step is its error; all skip, and nobody waits."""
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    train(case, made, params, comm.rank, 0, 1)
    weights, state = bits_of(params), made.state_dict()["state"]
    for change, text in WRONG:
        give(case, params, comm.rank, 2)
        began = time.monotonic()
        undo = change(made) if comm.rank == 1 else None
        if undo is None:
            made.step()
        else:
            with raises(ArgumentError, text):
                made.step()
            undo()
        took = time.monotonic() - began
        assert took < comm.timeout / 2, f"no rank waits: {text}, {took:.1f} s of {comm.timeout:g} s"
        assert_equal(made.skipped.item(), True, text)
    for param, weight in zip(params, weights, strict=True):
        assert_bits_equal(param, weight, "weights")
    for name, value in made.state_dict()["state"][0].items():
        assert_bits_equal(value, state[0][name], name)
    train(case, made, params, comm.rank, 1, 2)
    assert_equal(made.skipped.item(), False, "the next step")


def without_gradients(made: Any) -> Callable[[], None]:
    made.zero_grad(set_to_none=True)
    clear: Callable[[], None] = made.zero_grad
    return clear


def with_sparse_gradient(made: Any) -> Callable[[], None]:
    param = made.param_groups[0]["params"][0]
    param.grad = torch.ones(3, 5).to_sparse().to(param.device)
    clear: Callable[[], None] = made.zero_grad
    return clear


def setting(name: str, value: Any) -> Callable[[Any], Callable[[], None]]:
    def change(made: Any) -> Callable[[], None]:
        (group,) = made.param_groups
        old, group[name] = group[name], value
        return lambda: group.update({name: old})

    return change


WRONG: list[tuple[Callable[[Any], Callable[[], None]], str]] = [
    (without_gradients, "no parameter has a gradient"),
    (with_sparse_gradient, "has torch.sparse_coo"),
    (setting("lr", float("nan")), "lr of group 0 is nan"),
    (setting("lr", -1.0), "lr of group 0 is -1.0"),
    (setting("weight_decay", "x"), "weight_decay of group 0 is 'x'"),
]


@pytest.mark.parametrize("clips_after", [True, False])
def test_one_rank_alone(ranks: Ranks, clips_after: bool) -> None:
    case = Case(torch.float16, max_grad_norm=0.3, clip_after_allreduce=clips_after)
    ranks(alone, small(case))


def test_one_rank_alone_with_own_state(ranks: Ranks) -> None:
    """Each rank has a whole copy of the state; all copies skip."""
    ranks(alone, small(Case(shards=1)))


@runs_on("ranks")
def test_scales_and_rates(comm: Any) -> None:
    """Scales and rates in tensors that are not positive numbers skip the step on every rank."""
    for shards in (0, 1):
        case = small(Case(shards=shards))
        params = parameters(case, comm.device)
        made = optimizer(comm, case, params)
        train(case, made, params, comm.rank, 0, 1)
        weights = bits_of(params)
        for scale in (0.0, -1.0, float("nan"), float("inf")):
            give(case, params, comm.rank, 2)
            value = scale if comm.rank == 1 else 2.0
            made.grad_scale = torch.tensor(value, device=comm.device)
            made.step()
            assert_equal(made.skipped.item(), True, f"scale {scale}")
        del made.grad_scale
        for rate in (float("nan"), -1.0, float("inf")):
            give(case, params, comm.rank, 2)
            value = rate if comm.rank == 1 else 0.1
            made.param_groups[0]["lr"] = torch.tensor(value, device=comm.device)
            made.step()
            assert_equal(made.skipped.item(), True, f"lr {rate}")
        give(case, params, comm.rank, 2)
        made.param_groups[0]["lr"] = 0.1
        made.found_inf = torch.ones(1, device=comm.device) if comm.rank == 1 else None
        made.step()
        assert_equal(made.skipped.item(), True, "found_inf of one rank")
        for param, weight in zip(params, weights, strict=True):
            assert_bits_equal(param, weight, "weights")
        made.grad_scale, made.found_inf = 2.0, 0  # numbers
        made.step()
        assert_equal(made.skipped.item(), False, "the next step")
        made.grad_scale = torch.ones(2)
        with raises(ArgumentError, "grad_scale is (2,); expected a number", "grad_scale = None"):
            made.step()
        made.grad_scale = "x"
        with raises(ArgumentError, "grad_scale is 'x'"):
            made.step()


@runs_on("ranks")
def test_a_skipped_step_after_a_change(comm: Any) -> None:
    """What the program wrote to 16-bit weights stays, though the float32 copies do not know it."""
    torch.manual_seed(1)
    param = torch.nn.Parameter(torch.randn(5, 7).to(comm.device, torch.float16))
    made: Any = ops.DistributedFusedLamb([param], ring_id=comm)
    param.grad = torch.ones_like(param)
    made.step()
    with torch.no_grad():
        param.mul_(2)
    before = param.detach().clone()
    param.grad = torch.full_like(param, torch.nan)
    made.step()
    assert_equal(made.skipped.item(), True, "NaN gradients")
    assert_bits_equal(param.detach(), before, "the weight")
