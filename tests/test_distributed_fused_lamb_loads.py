"""ops.DistributedFusedLamb.load_state_dict: wrong states change nothing on any rank."""

import copy
from collections.abc import Callable
from typing import Any

import torch

from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.lamb import Case, bits_of, give, optimizer, parameters, small, train
from tests.support.runs_on import runs_on


def state_of_adam(state: Any) -> Any:
    params = [torch.nn.Parameter(torch.ones_like(s["exp_avg"])) for s in state["state"].values()]
    adam = torch.optim.Adam(params)
    torch.stack([p.sum() for p in params]).sum().backward()
    adam.step()
    return adam.state_dict()


def of_group(**changes: Any) -> Callable[[Any], Any]:
    def change(state: Any) -> Any:
        (group,) = state["param_groups"]
        group.update({name: value for name, value in changes.items() if value is not None})
        for name, value in changes.items():
            if value is None:
                del group[name]
        return state

    return change


def of_parameter(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def changed(state: Any) -> Any:
        state["state"][0][name] = change(state["state"][0][name])
        return state

    return changed


def with_others(state: Any) -> Any:
    state["state"][9] = state["state"][0]
    return state


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (state_of_adam, "step of parameter 0 is torch.float32, as of another optimizer"),
    (of_group(lr=-5.0), "lr of group 0 is -5.0; expected a number >= 0"),
    (of_group(lr=float("nan")), "lr of group 0 is nan"),
    (of_group(betas=None), "group 0 lacks ['betas']; expected the keys ['params', 'lr'"),
    (of_group(params=[1, 0, 2, 3, 4]), "groups of the parameters [1, 0, 2, 3, 4]"),
    (of_parameter("exp_avg", lambda x: x.to(torch.complex64)), "is torch.complex64"),
    (of_parameter("exp_avg", lambda x: x.double()), "exp_avg of parameter 0 is torch.float64"),
    (
        of_parameter("step", lambda x: x + 1),
        "numbers of updates of parameters {3: [0], 2: [1, 2, 3]}",
    ),
    (of_parameter("step", lambda x: 2), "step of parameter 0 is int; expected a tensor"),
    (with_others, "a state of the parameters [9]; expected 5 parameters"),
    (lambda state: {**state, "state": None}, "a state of NoneType; expected a dictionary"),
    (lambda state: {**state, "state": dict.fromkeys(range(5))}, "parameter 0 has no state"),
    (lambda state: {**state, "param_groups": None}, "param_groups of NoneType"),
    (lambda state: None, "NoneType; expected keys state and param_groups"),
]


@runs_on("ranks")
def test_loads(comm: Any) -> None:
    """A wrong state, on all ranks and on one, is an error on every rank and changes nothing."""
    case = small(Case())
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    train(case, made, params, comm.rank, 0, 2)
    saved = copy.deepcopy(made.state_dict())
    for change, text in CHANGES:
        wrong = change(copy.deepcopy(saved))
        with raises(ArgumentError, "DistributedFusedLamb.load_state_dict on ring 0", text):
            made.load_state_dict(wrong)
        words = text if comm.rank == 1 else "invalid arguments on ranks [1]"
        with raises(ArgumentError, words):
            made.load_state_dict(wrong if comm.rank == 1 else saved)
        unchanged(made, saved)
    later = copy.deepcopy(saved)
    for values in later["state"].values():
        values["step"] += comm.rank
    with raises(ArgumentError, "number of updates: 2 on ranks [0], 3 on ranks [1]"):
        made.load_state_dict(later)
    with raises(ArgumentError, "lr of group 0: "):
        made.load_state_dict(of_group(lr=0.5 + comm.rank)(copy.deepcopy(saved)))
    unchanged(made, saved)


def unchanged(made: Any, kept: Any) -> None:
    state = made.state_dict()
    assert_equal(state["param_groups"], kept["param_groups"], "groups")
    for number, values in kept["state"].items():
        for name, value in values.items():
            assert_bits_equal(state["state"][number][name], value, f"{name} of {number}")


@runs_on("cpu_ranks")
def test_rates_in_tensors(comm: Any) -> None:
    """A rate in a tensor keeps its memory, and a sum of microbatches does not survive a load."""
    case, weights = small(Case(gradient_accumulation_steps=2)), []
    for half_done in (False, True):
        params = parameters(case, comm.device)
        rate = torch.tensor(case.lr, device=comm.device)
        made = optimizer(comm, case, params)
        made.param_groups[0]["lr"] = rate
        state = copy.deepcopy(made.state_dict())
        if half_done:
            give(case, params, comm.rank, 7)
            made.step()
        rate.fill_(9.0)
        made.load_state_dict(state)
        assert_equal(made.param_groups[0]["lr"] is rate, True, "the same tensor")
        assert_equal(rate.item(), torch.tensor(case.lr).item(), "the rate")
        train(case, made, params, comm.rank, 0, 1)
        weights.append(bits_of(params))
    for n, (one, other) in enumerate(zip(*weights, strict=True)):
        assert_bits_equal(other, one, f"parameter {n}")
