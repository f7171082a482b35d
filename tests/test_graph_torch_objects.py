"""Objects of torch that a function uses: compiled and traced modules, scalers, distributions."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.python.reach import is_of_the_program, reached
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.device_meshes import mesh_of
from tests.support.runs_on import runs_on

Captured = Callable[[Callable[..., Any]], Callable[..., Any]]


def _compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="eager")


def _traced(module: nn.Module) -> Any:
    return torch.jit.trace(module, torch.ones(2, 3), check_trace=False)


def training(module: Any) -> None:
    """Switch the module to evaluation."""
    module.eval()


def weight(module: Any) -> None:
    """Replace a parameter."""
    getattr(module, "_orig_mod", module)._modules["1"].weight = nn.Parameter(torch.eye(3))


def probability(module: Any) -> None:
    """Set an attribute of a part."""
    getattr(module, "_orig_mod", module)._modules["0"].p = 0.0


def hook(module: Any) -> None:
    """Register a hook."""
    module.register_forward_hook(lambda *_: torch.zeros(2, 3))


def _turns(module: Any, change: Callable[[Any], None], captured: Captured) -> Iterator[Any]:
    call = captured(lambda x: module(x))
    with torch.no_grad():
        for turn in range(6):
            if turn == 3:
                change(module)
            torch.manual_seed(turn)
            yield call(torch.ones(2, 3)).clone()


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize(
    ("make", "change"),
    [
        *[(_compiled, change) for change in (training, weight, probability, hook)],
        *[(torch.fx.symbolic_trace, change) for change in (training, weight, hook)],
        *[(torch.jit.script, change) for change in (training, weight)],
        (_traced, weight),
    ],
)
def test_changes_of_modules(make: Callable[[Any], Any], change: Callable[[Any], None]) -> None:
    """A change after the capture is seen at the next call, and calls are replayed."""
    torch.manual_seed(1)
    made = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))
    state, graphs = made.state_dict(), list[Any]()

    def captured(fn: Callable[..., Any]) -> Any:
        graphs.append(graph.capture(fn, verify=False))
        return graphs[-1]

    runs = []
    for way in (lambda fn: fn, captured):
        module = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 3))
        module.load_state_dict(state)
        runs.append(list(_turns(make(module), change, way)))
    for turn, (want, got) in enumerate(zip(*runs, strict=True)):
        assert_bits_equal(got, want, f"turn {turn}")
    assert_equal(graphs[0].entries.replays > 1, True, "replays")


def test_parameters_of_a_distribution() -> None:
    """One that is replaced while the old one is held elsewhere."""
    normal: Any = torch.distributions.Normal(torch.zeros(3), 1.0, validate_args=False)
    old, x = normal.loc, torch.ones(3)
    g = graph.capture(lambda x: normal.log_prob(x), outputs="copy", verify=False)
    for turn in range(6):
        if turn == 3:
            normal.loc = torch.full((3,), 5.0)
        assert_bits_equal(g(x), normal.log_prob(x), f"turn {turn}")
    assert_bits_equal(old, torch.zeros(3))


# -- a scaler of gradients -------------------------------------------------------------------------


def _scaled(on_fail: Any) -> list[float]:
    """Train with a scaler inside the step; ``on_fail`` is None for eager steps."""
    w = nn.Parameter(torch.ones(1))
    w.grad = torch.zeros(1)
    optimizer = torch.optim.SGD([w], lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        scaler.scale((w * 1.0).sum()).backward()
        scaler.step(optimizer)
        scaler.update()

    call: Any = step if on_fail is None else graph.capture(step, on_fail=on_fail)
    weights = []
    for _ in range(4):
        if on_fail == "raise":
            with raises(GraphError, "keep the GradScaler outside the function"):
                call()
            step()  # the refused call was undone
        else:
            call()
        weights.append(w.item())
    return [*weights, scaler.get_scale()]


@pytest.mark.parametrize("on_fail", ["raise", "eager"])
def test_a_refused_scaler(on_fail: str) -> None:
    """The scaler is put back: later steps unscale their gradients as eager ones do."""
    assert_equal(_scaled(on_fail), _scaled(None), "weights and the scale")


# -- distributed -----------------------------------------------------------------------------------


def _of_one_rank(comm: Any) -> Any:
    groups = [dist.new_group([rank]) for rank in range(comm.size)]
    return groups[comm.rank]


def _sharded_states(comm: Any, captured: Captured) -> list[torch.Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # warns of TorchScript

    torch.manual_seed(0)
    module = nn.Linear(4, 2).to(comm.device)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, process_group=_of_one_rank(comm), lr=0.1
    )
    for p in module.parameters():
        p.grad = torch.zeros_like(p)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=False)
        module(x).square().mean().backward()
        optimizer.step()

    call, weights = captured(step), []
    for turn in range(8):
        if turn == 4:
            optimizer.param_groups[0]["lr"] = 0.001
        call(torch.full((3, 4), turn / 4, device=comm.device))
        weights.append(module.weight.detach().clone())
    return weights


@runs_on("unified_ranks")
def test_the_rate_of_a_sharded_optimizer(comm: Any) -> None:
    mesh_of(comm)
    want = _sharded_states(comm, lambda fn: fn)
    got = _sharded_states(comm, lambda fn: graph.capture(fn, verify=False))
    for turn, (one, other) in enumerate(zip(got, want, strict=True)):
        assert_bits_equal(one, other, f"turn {turn}")


@runs_on("unified_ranks")
def test_sharded_modules_are_followed(comm: Any) -> None:
    mesh = mesh_of(comm)
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(comm.device)
    fully_shard(module, mesh=mesh)
    assert is_of_the_program(type(module))
    objects = reached([lambda x: module(x)]).objects
    assert any(x is module[1] for x in objects)
    assert not any(isinstance(x, dist.ProcessGroup) for x in objects)
