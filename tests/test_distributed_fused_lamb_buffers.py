"""ops.DistributedFusedLamb: parameters and gradients that leave the flat buffers, and layouts."""

from typing import Any

import torch

from commlib import graph, ops
from commlib.errors import ArgumentError, DtypeError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.lamb import Case, bits_of, give, optimizer, parameters, small, train
from tests.support.runs_on import runs_on

HALF = torch.float16


@runs_on("ranks")
def test_converted_there_and_back(comm: Any) -> None:
    """Parameters that were converted and converted back are updated as if nothing had happened."""
    for low in (torch.float32, HALF):
        case, weights = small(Case(low)), []
        for moves in (False, True):
            params = parameters(case, comm.device)
            made = optimizer(comm, case, params)
            train(case, made, params, comm.rank, 0, 1)
            if moves:
                module = torch.nn.ParameterList(params)
                wide = [param.dtype for param in module]
                module.double()
                for param, dtype in zip(params, wide, strict=True):
                    param.data = param.data.to(dtype)
                    if param.grad is not None:
                        param.grad.data = param.grad.data.to(dtype)
            train(case, made, params, comm.rank, 1, 3)
            weights.append(bits_of(params))
            assert_equal(
                [part.detached() for part in made._sharded.parts if part.detached()], [], "detached"
            )
        for n, (one, other) in enumerate(zip(*weights, strict=True)):
            assert_bits_equal(other, one, f"parameter {n}, {low}")


@runs_on("ranks")
def test_replaced_data(comm: Any) -> None:
    """New values in other memory are kept, also as master weights."""
    case = small(Case(HALF))
    weights = []
    for other_memory in (False, True):
        params = parameters(case, comm.device)
        made = optimizer(comm, case, params)
        for param in params:
            if other_memory:
                param.data = torch.full_like(param, 3.0)
            else:
                param.data.fill_(3.0)
        if not other_memory:
            made.refresh_master()
        train(case, made, params, comm.rank, 0, 1)
        assert_equal(bool((params[1] > 2.5).all()), True, "the new values are the start")
        weights.append(bits_of(params))
    for n, (one, other) in enumerate(zip(*weights, strict=True)):
        assert_bits_equal(other, one, f"parameter {n}")


@runs_on("ranks")
def test_parameters_that_do_not_fit(comm: Any) -> None:
    """A parameter of another dtype or shape on one rank: that rank's error, and nobody waits."""
    case = small(Case())
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    before, old = bits_of(params), params[0].data
    for change, error, text in (
        (old.double(), DtypeError, "parameter 0 has dtype torch.float64; expected torch.float32"),
        (old.clone().view(-1), ShapeError, "parameter 0 has shape (15,); expected (3, 5)"),
    ):
        give(case, params, comm.rank, 1)
        if comm.rank == 1:
            params[0].grad = None
            params[0].data = change
            with raises(error, text, "create a new optimizer"):
                made.step()
            params[0].data = old
        else:
            made.step()
        assert_equal(made.skipped.item(), True, "all ranks skip")
    for param, weight in zip(params, before, strict=True):
        assert_bits_equal(param, weight, "weights after errors")
    made.param_groups[0]["params"] = [torch.nn.Parameter(p.detach().clone()) for p in params]
    with raises(ArgumentError, "not the 5 of the constructor", "create a new optimizer"):
        made.step()
    made.param_groups[0]["params"] = params
    train(case, made, params, comm.rank, 2, 3)
    assert_equal(made.skipped.item(), False, "the next step")


@runs_on("unified_ranks")
def test_captured(comm: Any) -> None:
    """A capture would copy the values in each replay: an error, whose remedy works."""
    case = small(Case(HALF))
    params = parameters(case, comm.device)
    made = optimizer(comm, case, params)
    step = graph.capture(made.step)
    give(case, params, comm.rank, 0)
    params[0].data = params[0].data.clone()
    made.refresh_master()
    before = bits_of(params)
    step()
    give(case, params, comm.rank, 2)
    step()
    assert_equal(made.skipped.item(), False, "skipped")
    assert_equal(torch.equal(params[0], before[0]), False, "the weights move")
    step.reset()


@runs_on("cpu_ranks")
def test_gradients_at_construction(comm: Any) -> None:
    """Gradients that exist at construction are those of the first step."""
    case, weights = small(Case(HALF)), []
    for early in (False, True):
        params = parameters(case, comm.device)
        if early:
            give(case, params, comm.rank, 1)
        made = optimizer(comm, case, params)
        if not early:
            give(case, params, comm.rank, 1)
        made.step()
        weights.append(bits_of(params))
    for n, (one, other) in enumerate(zip(*weights, strict=True)):
        assert_bits_equal(other, one, f"parameter {n}")


@runs_on("ranks")
def test_channels_last(comm: Any) -> None:
    """Parameters in channels_last keep their strides, and have the values of contiguous ones."""
    shapes, results = ((8, 3, 3, 3), (5, 7)), []
    for last in (False, True):
        weights = [(sample(0, shape, torch.float32) * 0.1).to(comm.device) for shape in shapes]
        if last:
            weights = [weights[0].to(memory_format=torch.channels_last), weights[1].t().clone().t()]
        params = [torch.nn.Parameter(weight) for weight in weights]
        strides = [param.stride() for param in params]
        made = ops.DistributedFusedLamb(params, comm, lr=0.1)
        for step in range(2):
            for n, param in enumerate(params):
                assert param.grad is not None
                param.grad.copy_(sample(comm.rank, shapes[n], torch.float32, step))
            made.step()
        assert_equal([param.stride() for param in params], strides, "strides")
        assert_equal([p.grad.stride() for p in params if p.grad is not None], strides, "gradients")
        results.append((params, made.state_dict()))
    (one, state), (other, moved) = results
    for n in range(2):
        # The order of a norm's sum differs.
        assert_bits_equal(other[n], one[n].detach(), f"parameter {n}", atol=1e-7)
        mean = state["state"][n]["exp_avg"]
        assert_bits_equal(moved["state"][n]["exp_avg"], mean, f"moments of {n}", atol=1e-7)
