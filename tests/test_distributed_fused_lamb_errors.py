"""ops.DistributedFusedLamb: wrong parameters, settings, rings, gradients and states are errors."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import commlib
from commlib import ops
from commlib.errors import ArgumentError, CommError, DeviceError, DtypeError, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.lamb import Case, bits_of, optimizer, parameters, small, train
from tests.support.operator import ABSENT_RING
from tests.support.runs_on import runs_on

Lamb: Any = ops.DistributedFusedLamb
HALF, BRAIN = torch.float16, torch.bfloat16


def weights(*dtypes: torch.dtype, device: Any = "cpu", grad: bool = True) -> list[torch.Tensor]:
    return [torch.ones(4, dtype=d, device=device, requires_grad=grad) for d in dtypes]


Wrong = tuple[type[CommError], Any, dict[str, Any], str]


def wrong_parameters(known: list[torch.Tensor]) -> list[Wrong]:
    device = known[0].device
    double = weights(torch.float64, device=device)
    frozen = weights(torch.float32, device=device, grad=False)
    groups = [{"params": known}, {"params": weights(HALF, device=device), "eps": 1e-3}]
    return [
        (ArgumentError, [], {}, "empty parameter list"),
        (ArgumentError, [known[0], known[0] * 2], {}, "can't optimize a non-leaf Tensor"),
        (DtypeError, double, {}, "parameter 0 is torch.float64"),
        (DtypeError, weights(HALF, BRAIN, device=device), {}, "expected one 16-bit dtype"),
        (DeviceError, weights(torch.float32, device="meta"), {}, "parameter 0 is on meta"),
        (ArgumentError, frozen, {}, "parameter 0 does not require grad"),
        (ArgumentError, groups, {}, "group 1 has betas=(0.9, 0.999), eps=0.001; expected"),
    ]


def wrong_settings(known: list[torch.Tensor]) -> list[Wrong]:
    steps = "gradient_accumulation_steps"
    return [
        (ArgumentError, known, {"eps": 0.0}, "eps of group 0 is 0.0; expected a number > 0"),
        (ArgumentError, known, {"betas": (0.9, 1.0)}, "expected two numbers in [0, 1)"),
        (ArgumentError, known, {"lr": -1.0}, "lr of group 0 is -1.0"),
        (ArgumentError, known, {"lr": torch.ones(2)}, "expected a tensor of one element"),
        (ArgumentError, known, {"weight_decay": -0.1}, "weight_decay of group 0 is -0.1"),
        (ArgumentError, known, {"max_grad_norm": -2.0}, "max_grad_norm is -2.0"),
        (ArgumentError, known, {steps: 0}, f"{steps} is 0; expected a whole number >= 1"),
    ]


@pytest.mark.parametrize("wrong", [wrong_parameters, wrong_settings])
@runs_on("ranks")
def test_arguments(comm: Any, wrong: Callable[[list[torch.Tensor]], list[Wrong]]) -> None:
    """Arguments that every rank gets wrong; the ring stays usable."""
    valid = weights(torch.float32, device=comm.device)
    prefix = f"DistributedFusedLamb on ring 0 (rank {comm.rank} of {comm.size}"
    for error, params, kwargs, text in wrong(valid):
        with raises(error, prefix, text, ";"):
            Lamb(params, comm, **kwargs)
    with raises(RingError, str(ABSENT_RING)):
        Lamb(valid, ABSENT_RING)
    assert_bits_equal(valid[0], torch.ones(4), "parameters after errors")
    Lamb(valid, comm).step()


@runs_on("ranks")
def test_ranks_that_differ(comm: Any) -> None:
    """What one rank alone gets wrong is an error on every rank."""
    rank = comm.rank
    for kwargs in ({"max_grad_norm": 1.0 + rank}, {"betas": (0.5, 0.5 + rank / 8)}):
        with raises(ArgumentError, "on ranks [0]", "on ranks [1]", "expected the same"):
            Lamb(weights(torch.float32, device=comm.device), comm, **kwargs)
    for params, text in (
        (weights(*[torch.float32] * (1 + rank), device=comm.device), "number of parameters: 1 on"),
        ([torch.ones(2 + rank, 6 // (2 + rank), requires_grad=True)], "hash of the parameters"),
        (weights(BRAIN if rank else HALF, device=comm.device), "16-bit dtype of parameters"),
        (weights(torch.float32 if rank else HALF, device=comm.device), "16-bit dtype"),
    ):
        with raises(ArgumentError, text, "expected the same on every rank"):
            Lamb([p.detach().to(comm.device).requires_grad_() for p in params], comm)
    params = weights(torch.float64 if rank else torch.float32, device=comm.device)
    with raises(ArgumentError, "parameter 0 is" if rank else "invalid arguments on ranks [1]"):
        Lamb(params, comm)
    Lamb(weights(torch.float32, device=comm.device), comm).step()


@runs_on("three_ranks")
def test_rings(comm: Any) -> None:
    """Rings that do not divide the ranks."""
    mine = weights(torch.float32, device=comm.device)
    solo_ring = commlib.new_ring(11 + comm.rank, [comm.rank])
    pair = commlib.new_ring(15, [0, 1])
    other = commlib.new_ring(16, [0, 2])
    parts = [ring for ring in (pair, other) if ring is not None]
    with raises(ArgumentError, "shard_ring is ring" if parts else "invalid arguments on ranks"):
        Lamb(mine, comm, shard_ring=parts[0] if parts else None)
    with raises(ArgumentError, f"cross_ring is ring {11 + comm.rank} of size 1", "product is 3"):
        Lamb(mine, comm, shard_ring=solo_ring, cross_ring=solo_ring)
    if pair is not None:
        with raises(ArgumentError, "shard_ring is ring 0 of ranks [0, 1, 2]", "expected ranks"):
            Lamb(mine, pair, shard_ring=comm)
    Lamb(mine, comm, shard_ring=solo_ring, cross_ring=comm).step()


@runs_on("ranks")
def test_wrong_times(comm: Any) -> None:
    """Steps, parameters and states that do not fit: the weights stay."""
    case = small(Case(HALF, gradient_accumulation_steps=2))
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    train(case, made, params, comm.rank, 0, 1)
    before = bits_of(params)
    new = torch.nn.Parameter(torch.ones(2, device=comm.device))
    with raises(ArgumentError, "hold 5 parameters and can't grow", "create a new optimizer"):
        made.add_param_group({"params": [new]})
    with raises(ArgumentError, "can't be copied or pickled", "call state_dict()"):
        copy.deepcopy(made)
    made.zero_grad(set_to_none=True)
    with raises(ArgumentError, "no parameter has a gradient", "loss.backward()"):
        made.step()
    made.zero_grad()
    made.step()
    with raises(ArgumentError, "1 of 2 microbatches are accumulated", "after a step"):
        made.state_dict()
    params[0].grad = torch.ones(3, 5).to_sparse().to(comm.device)
    with raises(ArgumentError, "has torch.sparse_coo", "sparse=False"):
        made.step()
    made.zero_grad()
    for param, weight in zip(params, before, strict=True):
        assert_bits_equal(param, weight, "weights after errors")
    plain = optimizer(comm, small(Case()), parameters(small(Case()), comm.device))
    with raises(ArgumentError, "gradient_accumulation_steps is 1", "2 or more"):
        plain.accumulate()
    plain.param_groups.append({**plain.param_groups[0], "betas": (0.5, 0.9)})
    with raises(ArgumentError, "group 1 has betas=(0.5, 0.9)"):
        plain.step()


def without_master(state: Any) -> Any:
    for values in state["state"].values():
        values.pop("master", None)
    return state


def of_other_shape(state: Any) -> Any:
    state["state"][0]["exp_avg"] = torch.zeros(2)
    return state


def of_more_groups(state: Any) -> Any:
    state["param_groups"] *= 2
    return state


def without_state(state: Any) -> Any:
    return {**state, "state": {}}


def of_something_else(state: Any) -> Any:
    return state["state"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_master, ("parameter 1 has", "'master': (70,)")),
        (of_other_shape, ("parameter 0 has", "'exp_avg': (2,)", "expected", "(3, 5)")),
        (of_more_groups, ("groups of [5, 5] parameters; expected [5]",)),
        (without_state, ("parameter 0 has no state",)),
        (of_something_else, ("[0, 1, 2, 3, 4]; expected keys state and param_groups",)),
    ],
)
@runs_on("cpu_ranks")
def test_states(comm: Any, change: Callable[[Any], Any], words: tuple[str, ...]) -> None:
    """A state of other parameters is an error and changes nothing."""
    case = small(Case(HALF))
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    train(case, made, params, comm.rank, 0, 2)
    before = bits_of(params)
    with raises(ArgumentError, "load_state_dict", *words, "pass the state_dict()"):
        made.load_state_dict(change(made.state_dict()))
    assert_equal(made.state_dict()["state"][0]["step"].item(), 2, "updates")
    train(case, made, params, comm.rank, 2, 3)
    again = parameters(case, comm.device)
    other = optimizer(comm, case, again)
    train(case, other, again, comm.rank, 0, 3)
    for param, wanted, old in zip(params, again, before, strict=True):
        assert_bits_equal(param, wanted.detach(), "the next step")
        assert_equal(torch.equal(param, old), False, "the step moves the weights")


@runs_on("ranks")
def test_closed_ring(comm: Any) -> None:
    """A step after the ring was closed is an error and leaves the weights."""
    pair = commlib.new_ring(11, range(comm.size))
    case = small(Case())
    params = parameters(case, comm.device)
    made = optimizer(pair, case, params)
    before = bits_of(params)
    commlib.close_ring(11)
    with raises(RingError, "ring 11"):
        made.step()
    for param, weight in zip(params, before, strict=True):
        assert_bits_equal(param, weight, "weights")
