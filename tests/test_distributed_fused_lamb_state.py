"""ops.DistributedFusedLamb: checkpoints, captured steps, loss scales and steps that are skipped."""

import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import commlib
from commlib import graph
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.lamb import (
    ATOL,
    Case,
    Reference,
    bits_of,
    close_rings,
    give,
    gradients,
    optimizer,
    parameters,
    small,
    summed,
    train,
)
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on

HALF = torch.float16
STATES = [small(Case(HALF, max_grad_norm=0.3)), small(Case(shards=1)), small(Case(torch.bfloat16))]
STATES += [small(Case(HALF, gradient_accumulation_steps=2))]


def copied(state: dict[str, Any]) -> Any:
    """Return the state after a way through a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@runs_on("ranks")
def test_resumed(comm: Any) -> None:
    """A run that is saved and loaded in the middle has the bits of an uninterrupted one."""
    for case in STATES:
        params = parameters(case, comm.device)
        made = optimizer(comm, case, params)
        train(case, made, params, comm.rank, 0, 3)
        state, weights = copied(made.state_dict()), bits_of(params)
        train(case, made, params, comm.rank, 3, 6)
        close_rings()
        other = parameters(case, comm.device, seed=5)
        again = optimizer(comm, case, other)
        for param, weight in zip(other, weights, strict=True):
            param.data.copy_(weight)
        again.load_state_dict(state)
        train(case, again, other, comm.rank, 3, 6)
        for n, (param, wanted) in enumerate(zip(other, params, strict=True)):
            assert_bits_equal(param, wanted.detach(), f"parameter {n} of {case}")
        compared(again.state_dict(), made.state_dict())
        close_rings()


def compared(state: dict[str, Any], other: dict[str, Any]) -> None:
    assert_equal(state["param_groups"], other["param_groups"], "groups")
    assert_equal([*state["state"]], [*other["state"]], "parameters")
    for number, values in state["state"].items():
        assert_equal([*values], [*other["state"][number]], "names")
        for name, value in values.items():
            assert_bits_equal(value, other["state"][number][name], f"{name} of parameter {number}")


def moved(comm: Any) -> None:
    """A state of all ranks continues on two of them, and a state of these on all."""
    case = small(Case(HALF, max_grad_norm=0.3))
    reference = Reference(case, list(parameters(case, "cpu")))
    pair = commlib.new_ring(11, [1, 2])
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    for step in range(3):
        train(case, made, params, comm.rank, step, step + 1)
        reference.step([summed(case, rank, step) for rank in range(comm.size)])
    state = copied(made.state_dict())
    if pair is not None:
        made = optimizer(pair, case, params)
        made.load_state_dict(state)
        compared(made.state_dict(), state)
        train(case, made, params, pair.rank, 3, 5)
        state = copied(made.state_dict())
        sizes = [len(part.weights) for part in made._sharded.parts]
        assert_equal(
            sizes, [part.layout.numel // 2 for part in made._sharded.parts], "shards of two ranks"
        )
    for step in (3, 4):
        reference.step([summed(case, rank, step) for rank in range(2)])
    state = from_rank(comm, state, root=1)
    values = [p.detach().clone() for p in params]
    for value in values:
        comm.broadcast(value, value, root=1)
    params = [torch.nn.Parameter(value) for value in values]
    made = optimizer(comm, case, params)
    made.load_state_dict(state)
    compared(made.state_dict(), state)
    train(case, made, params, comm.rank, 5, 6)
    reference.step([summed(case, rank, 5) for rank in range(comm.size)])
    assert_equal(made.state_dict()["state"][0]["step"].item(), 6, "updates")
    for n, (param, wanted) in enumerate(zip(params, reference.weights, strict=True)):
        assert_bits_equal(param, wanted, f"parameter {n}", atol=ATOL[case.dtype(n)])


def from_rank(comm: Any, state: Any, root: int) -> Any:
    """Return the state of rank ``root``."""
    for values in state["state"].values():
        for name, value in values.items():
            buf = value.to(comm.device)
            comm.broadcast(buf, buf, root=root)
            values[name] = buf.cpu()
    return state


def test_another_number_of_ranks(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        ranks(moved)


@runs_on("cpu_ranks")
def test_refresh_master(comm: Any) -> None:
    """Weights that the program sets itself are lost without refresh_master, and kept with it."""
    case = small(Case(HALF))
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    for refreshes in (False, True):
        for param in params:
            param.data.fill_(3.0)
        if refreshes:
            made.refresh_master()
        train(case, made, params, comm.rank, 0, 1)
        (low,) = (p for p in params if p.shape == (70,))
        assert_equal(bool((low > 2.5).all()), refreshes, f"refreshed: {refreshes}")


# -- captured --------------------------------------------------------------------------------------


def run_captured(comm: Any, case: Case, captured: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the weights after updates by captured or plain methods; the rate changes once."""
    params = parameters(case, comm.device)
    rate = torch.tensor(case.lr, device=comm.device)
    made = optimizer(comm, case, params)
    made.param_groups[0]["lr"] = rate
    accumulates = case.gradient_accumulation_steps > 1
    update = captured(made.update if accumulates else made.step)
    accumulate = captured(made.accumulate) if accumulates else None
    for step in range(8):
        rate.fill_(case.lr * (1 + step // 3))
        for micro in range(case.gradient_accumulation_steps):
            give(case, params, comm.rank, 2 * (step * case.gradient_accumulation_steps + micro))
            if step == 4 and comm.rank == 0:
                spoil(params[0], float("inf"))
            if accumulate is not None:
                accumulate()
        update()
        assert_equal(made.skipped.item(), step == 4, f"skipped in step {step}")
        made.zero_grad()
    if captured is not plain:
        rows = [(row["replays"], row["verified"], row["eager"]) for row in graph.report(update)]
        assert_equal(rows, [(7, 7, None)], "one graph for all rates")
    close_rings()
    return bits_of(params)


def spoil(param: torch.Tensor, value: float) -> None:
    """Set one element of a gradient."""
    assert param.grad is not None
    param.grad[-1].fill_(value)


def plain(function: Any) -> Any:
    return function


@runs_on("unified_ranks", deadline=120)
def test_captured(comm: Any) -> None:
    """Every replay is verified: the graph gives the bits of an eager step."""
    for case in (
        small(Case(HALF, max_grad_norm=0.3)),
        small(Case(HALF, max_grad_norm=0.3, clip_after_allreduce=False)),
        small(Case(HALF, gradient_accumulation_steps=2)),
        small(Case(shards=1)),
    ):
        eager = run_captured(comm, case, plain)
        captured = run_captured(comm, case, lambda f: graph.capture(f, verify=True))
        for n, (one, other) in enumerate(zip(captured, eager, strict=True)):
            assert_bits_equal(one, other, f"parameter {n} of {case}")


@runs_on("cpu_ranks", deadline=120)
def test_compiled(comm: Any) -> None:
    """torch.compile leaves a step to eager code, also inside a compiled function."""
    case = small(Case(HALF, gradient_accumulation_steps=2))
    weights = []
    for compiled in (False, True):
        params = parameters(case, comm.device)
        made = optimizer(comm, case, params)
        step = torch.compile(made.step) if compiled else made.step
        for number in range(4):
            give(case, params, comm.rank, 2 * number)
            step()
        weights.append(bits_of(params))
    for n, (one, other) in enumerate(zip(*weights, strict=True)):
        assert_bits_equal(one, other, f"parameter {n}")


# -- steps that are skipped ------------------------------------------------------------------------


@runs_on("ranks")
def test_gradients_that_are_not_finite(comm: Any) -> None:
    """A gradient that is not finite on one rank changes nothing on any rank."""
    for case in (small(Case(HALF)), small(Case(HALF, max_grad_norm=0.3, shards=1))):
        for clip_after in (True, False):
            case = dataclasses.replace(case, clip_after_allreduce=clip_after)
            params = parameters(case, comm.device)
            made = optimizer(comm, case, params)
            train(case, made, params, comm.rank, 0, 2)
            for bad in (float("nan"), float("inf")):
                weights, state = bits_of(params), made.state_dict()
                give(case, params, comm.rank, 2)
                if comm.rank == 1:
                    spoil(params[1], bad)
                made.step()
                assert_equal(made.skipped.item(), True, f"{bad} is skipped")
                for param, weight in zip(params, weights, strict=True):
                    assert_bits_equal(param, weight, f"weights after {bad}")
                compared(made.state_dict(), state)
            made.zero_grad()
            train(case, made, params, comm.rank, 2, 3)
            assert_equal(made.skipped.item(), False, "the next step")
            assert_equal(made.state_dict()["state"][0]["step"].item(), 3, "updates")
            close_rings()


@runs_on("ranks")
def test_grad_scaler(comm: Any) -> None:
    """GradScalers skip together, and may have other scales afterwards."""
    case = small(Case(max_grad_norm=0.3))
    for clip_after in (True, False):
        case = dataclasses.replace(case, clip_after_allreduce=clip_after)
        params = parameters(case, comm.device)
        made = optimizer(comm, case, params)
        scaler = torch.amp.GradScaler(comm.device.type, init_scale=2.0**10, growth_interval=2)
        reference = Reference(case, list(parameters(case, "cpu")))
        for step in range(6):
            loss = torch.zeros((), device=comm.device)
            for param, grad in zip(params, gradients(case, comm.rank, step), strict=True):
                loss = loss + (param * grad.to(comm.device)).sum()
            scaler.scale(loss).backward()
            bad = step == 2
            if bad and comm.rank == 1:
                spoil(params[0], float("inf"))
            if step == 4:
                scaler.unscale_(made)
            scaler.step(made)
            scaler.update()
            made.zero_grad()
            assert_equal(made.skipped.item(), bad, f"skipped in step {step}")
            if not bad:
                reference.step([summed(case, rank, step) for rank in range(comm.size)])
        assert_equal(
            scaler.get_scale(), 2.0**13 if comm.rank == 0 else 2.0**11, "scale of this rank"
        )
        for n, (param, wanted) in enumerate(zip(params, reference.weights, strict=True)):
            assert_bits_equal(param, wanted, f"parameter {n}", atol=ATOL[torch.float32])


@runs_on("ranks")
def test_scaled_sums_do_not_overflow(comm: Any) -> None:
    """A sum does not overflow where no summand does: no GradScaler would notice it."""
    case = Case(HALF, shapes=((3,), (5, 4)))
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    reference = Reference(case, list(parameters(case, "cpu")))
    for param in params:
        assert param.grad is not None
        param.grad.fill_(60000.0)
    made.grad_scale = torch.full((1,), 2.0**16, device=comm.device)
    made.step()
    assert_equal(made.skipped.item(), False, "skipped")
    reference.step([[np.full(shape, 60000 / 2**16) for shape in case.shapes]] * comm.size)
    for n, (param, wanted) in enumerate(zip(params, reference.weights, strict=True)):
        assert_bits_equal(param, wanted, f"parameter {n}", atol=ATOL[case.dtype(n)])


@runs_on("cpu_ranks")
def test_closure(comm: Any) -> None:
    """step() returns the loss of its closure, which has gradients."""
    case = small(Case())
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)

    def loss() -> float:
        made.zero_grad()
        total = torch.stack([p.square().sum() for p in params]).sum()
        total.backward()
        return total.item()

    first = made.step(loss)
    assert_equal([made.step(loss) < first for _ in range(3)], [True] * 3, "the loss falls")


@runs_on("cpu_ranks")
def test_groups_and_schedulers(comm: Any) -> None:
    """Rates of schedulers and of groups are those of each parameter."""
    params = [torch.nn.Parameter(torch.full((4,), 2.0, device=comm.device)) for _ in range(3)]
    groups = [{"params": params[:1], "lr": 0.0}, {"params": params[1:2], "weight_decay": 0.5}]
    made = commlib.ops.DistributedFusedLamb(
        [*groups, {"params": params[2:]}], comm, lr=0.25, weight_decay=0.0
    )
    scheduler = torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)
    made.step()  # the gradients are zero: weight decay alone moves a weight
    scheduler.step()
    assert_equal([p[0].item() for p in params], [2.0, 1.5, 2.0], "after one step")
    made.step()
    assert_equal([p[0].item() for p in params], [2.0, 1.5 * 0.875, 2.0], "after half the rate")


@runs_on("ranks")
def test_missing_gradients(comm: Any) -> None:
    """A gradient that is missing on a rank counts as zero there."""
    case = small(Case(HALF))
    weights = []
    for is_none in (False, True):
        params = parameters(case, comm.device)
        made = optimizer(comm, case, params)
        for step in range(3):
            give(case, params, comm.rank, step)
            for param in params[comm.rank : 3]:
                assert param.grad is not None
                if is_none:
                    param.grad = None  # the flat buffer has the values of another step
                else:
                    param.grad.zero_()
            made.step()
        weights.append(bits_of(params))
    for n, (one, other) in enumerate(zip(*weights, strict=True)):
        assert_bits_equal(one, other, f"parameter {n}")


@pytest.mark.parametrize("micro", [1, 2])
@runs_on("cpu_ranks")
def test_gradients_in_place(comm: Any, micro: int) -> None:
    """A backward writes to the flat buffer, and a step leaves the gradients as they are."""
    case = dataclasses.replace(small(Case()), gradient_accumulation_steps=micro)
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    places = [p.grad.data_ptr() for p in params if p.grad is not None]
    torch.stack([(p * 2).sum() for p in params]).sum().backward()
    made.step()
    for param in params:
        assert param.grad is not None
        assert_bits_equal(param.grad, torch.full_like(param, 2.0), "gradients after a step")
    made.zero_grad()
    assert_equal([p.grad.data_ptr() for p in params if p.grad is not None], places, "places")
    loss = (params[0].square() * 3).sum()
    made.step() if micro == 1 else made.update()
    with raises(RuntimeError, "modified by an inplace operation"):
        loss.backward()
