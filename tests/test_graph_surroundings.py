"""What a function uses in addition to its arguments: settings, replaced tensors, Python's state."""

import copy
import io
import logging
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.calls.cache_key import arguments
from commlib.graph.calls.flattening import flatten
from commlib.graph.python.contents import Contents
from commlib.graph.python.setting import Same
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on
from tests.test_modes import Wrapper

Program = Callable[[Callable[..., Any], torch.device], list[torch.Tensor]]


def scheduled(captured: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
    """An LR scheduler with a captured optimizer step."""
    p = torch.ones(3, device=device, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step, results = captured(optimizer.step), []
    for turn in range(8):
        step()
        if turn % 3 == 2:
            scheduler.step()
        results.append(p.detach().clone())
    return results


def loaded(captured: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
    """Moments that ``load_state_dict`` replaces."""
    p = torch.ones(3, device=device, requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=0.9)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    step, results = captured(optimizer.step), []
    for turn in range(6):
        if turn == 3:
            optimizer.load_state_dict(saved)
        step()
        results.append(p.detach().clone())
    return results


def usual_loop(captured: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
    """``zero_grad()`` and ``backward()`` outside, only the optimizer's step captured."""
    torch.manual_seed(1)
    module = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    step, results = captured(optimizer.step), []
    for turn in range(6):
        optimizer.zero_grad()
        module(torch.full((2, 3), turn + 1.0, device=device)).square().mean().backward()
        step()
        results.append(module.weight.detach().clone())
    return results


def whole_step(captured: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
    """A step that begins with ``zero_grad()``; the program reads gradients after it."""
    torch.manual_seed(1)
    module = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = module(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    call, results = captured(step), []
    for turn in range(6):
        results.append(call(torch.full((2, 3), turn + 1.0, device=device)).clone())
        results += [p.grad.clone() for p in module.parameters() if p.grad is not None]
    return [*results, *module.parameters()]


def eager_update(captured: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
    """The same with an optimizer that reads its step count, in an eager part."""
    torch.manual_seed(1)
    module = nn.Linear(3, 2).to(device)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
    update = graph.eager(optimizer.step)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = module(x).square().mean()
        loss.backward()
        update()
        return loss.detach()

    call = captured(step)
    results = [call(torch.full((2, 3), turn + 1.0, device=device)).clone() for turn in range(6)]
    return [*results, *module.parameters()]


def attributes(captured: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
    """Attributes, parts, parameters and hooks of a module that a function in a closure uses."""
    torch.manual_seed(1)
    module: Any = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.Tanh()).to(device)
    module[1].p = 0.0
    call, results = captured(lambda x: module(x)), list[torch.Tensor]()
    x = torch.ones(2, 3, device=device)

    def ask() -> None:
        with torch.no_grad():
            results.extend(call(x).clone() for _ in range(3))

    ask()
    module[1].p = 1.0
    ask()
    module.eval()
    ask()
    module[2] = nn.ReLU()
    ask()
    module[0].bias = nn.Parameter(torch.ones(3, device=device))
    ask()
    module[0].weight.data = torch.eye(3, device=device)
    ask()
    handle = module[0].register_forward_hook(lambda *_: torch.zeros(2, 3, device=device))
    ask()
    handle.remove()
    ask()
    return results


def numbers(captured: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
    """Numbers of a closure, of objects and of arguments that are objects."""

    class Batch:
        def __init__(self) -> None:
            self.x, self.scale = torch.ones(2, device=device), 2

    batch, settings, scale = Batch(), Batch(), 1.0
    call = captured(lambda b: b.x * b.scale * settings.scale * scale)
    results = []
    for turn in range(8):
        if turn == 2:
            batch.x, batch.scale = torch.full((2,), 5.0, device=device), 3
        if turn == 4:
            settings.scale = 7
        if turn == 6:
            scale = 0.5
        results.append(call(batch).clone())
    return results


def cache(captured: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
    """A table that the first call makes, and that the program replaces later."""
    tables: dict[int, torch.Tensor] = {}

    def look_up(x: torch.Tensor) -> torch.Tensor:
        if len(x) not in tables:
            tables[len(x)] = torch.arange(float(len(x)), device=device)
        return x + tables[len(x)]

    call, results = captured(look_up), []
    for turn in range(6):
        if turn == 3:
            tables[3] = tables[3] * 10
        results.append(call(torch.ones(3, device=device)).clone())
    return results


PROGRAMS = (
    scheduled,
    loaded,
    usual_loop,
    whole_step,
    eager_update,
    attributes,
    numbers,
    cache,
)


@pytest.mark.parametrize("program", PROGRAMS)
@runs_on("unified_ranks")
def test_programs(comm: Any, program: Program) -> None:
    """A program gives the bits of eager code, and replays."""
    graphs: list[Any] = []

    def captured(fn: Callable[..., Any]) -> Any:
        graphs.append(graph.capture(fn, outputs="copy"))
        return graphs[-1]

    want = program(lambda fn: fn, comm.device)
    for number, (one, other) in enumerate(zip(program(captured, comm.device), want, strict=True)):
        assert_equal(torch.equal(one, other), True, f"tensor {number}: {one}, and eagerly {other}")
    replays = sum(row["replays"] for row in graph.report(graphs[0]))
    assert_equal(replays > 0, True, f"{replays} replays")


# -- many kinds of calls ---------------------------------------------------------------------------


def test_ever_new_shapes(caplog: pytest.LogCaptureFixture) -> None:
    g = graph.capture(lambda x: x + 1, outputs="copy", max_graphs=12)
    with caplog.at_level(logging.WARNING, "commlib"):
        for n in range(1, 40):
            assert_bits_equal(g(torch.ones(n)), torch.full((n,), 2.0))
    assert_equal(len(g.entries), 12, "graphs")
    assert "argument 0 is (9,) torch.float32, and was (8,) torch.float32" in caplog.text
    assert_equal(caplog.text.count("has 9 graphs"), 1, "said once")
    assert "; pad what varies to a few fixed sizes, or set max_graphs=" in caplog.text
    assert "in place of a number" not in caplog.text


def test_ever_new_numbers(caplog: pytest.LogCaptureFixture) -> None:
    g = graph.capture(lambda x, n: x + n, outputs="copy")
    with caplog.at_level(logging.WARNING, "commlib"):
        for n in range(12):
            assert_bits_equal(g(torch.ones(2), n), torch.full((2,), 1.0 + n))
    assert "argument 1 is 8, and was 7" in caplog.text
    assert "; use a tensor in place of a number" in caplog.text
    assert "pad" not in caplog.text


def test_ever_new_rates(caplog: pytest.LogCaptureFixture) -> None:
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=1.0)
    step = graph.capture(optimizer.step)
    with caplog.at_level(logging.WARNING, "commlib"):
        for turn in range(12):
            optimizer.param_groups[0]["lr"] = 1.0 / (turn + 1)
            step()
    assert "lr of group 0 has changed" in caplog.text
    assert "lr=torch.tensor(0.1)" in caplog.text
    assert "pad" not in caplog.text


@pytest.mark.parametrize("where", ["dict", "list", "attribute", "variable"])
def test_tensors_replaced_and_still_held(where: str) -> None:
    """What the program puts in a tensor's place is read, though it still holds the old one."""
    weight = torch.ones(2)
    held: Any = {"dict": {"w": weight}, "list": [weight], "attribute": types.SimpleNamespace()}
    held["attribute"].w = weight
    made: dict[str, Callable[[torch.Tensor], Any]] = {
        "dict": lambda x: x * table["w"],
        "list": lambda x: x * items[0],
        "attribute": lambda x: x * plain.w,
        "variable": lambda x: x * variable,
    }
    table, items, plain, variable = held["dict"], held["list"], held["attribute"], weight
    g, x = graph.capture(made[where], outputs="copy", verify=False), torch.ones(2)
    for _ in range(3):
        assert_bits_equal(g(x), x)
    table["w"] = items[0] = plain.w = variable = torch.full((2,), 5.0)
    for _ in range(3):
        assert_bits_equal(g(x), 5 * x)
    assert_bits_equal(weight, x)  # it is still there


def test_tensors_replaced_at_each_call() -> None:
    state = {"h": torch.ones(2)}
    g = graph.capture(lambda x: x + state["h"], outputs="copy", on_fail="eager")
    for turn in range(20):
        state["h"] = torch.full((2,), float(turn))
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), turn + 1.0), f"turn {turn}")
    (why,) = g.eager.values()
    assert "is replaced by another at nearly every call" in why


# -- modules and methods ---------------------------------------------------------------------------


def test_a_part_of_a_model() -> None:
    model: Any = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
    names, x = list(model.state_dict()), torch.randn(4, 2)
    want = model(x)
    inner = model[0]
    model[0] = graph.capture(inner)
    assert isinstance(model[0], nn.Module)
    assert_equal(list(model.state_dict()), names, "names of the state")
    for _ in range(4):
        y = model(x)
        assert_bits_equal(y, want)
        y.sum().backward()
    model.eval()
    assert_equal(inner.training, False, "the module's own flag")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert_bits_equal(other(x), want)
    assert_equal(repr(model[0]), "<CapturedFunction Linear: 1 graphs, 3 replays>")


def test_reset_before_parameters_are_swapped() -> None:
    """Torch swaps no tensor that a weak reference points to: ``reset()`` leaves none."""
    model = nn.Linear(2, 3)
    call, x = graph.capture(model), torch.randn(4, 2)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        for _ in range(3):
            call(x).sum().backward()
        call.reset()
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for _ in range(3):
        assert_bits_equal(call(x.double()), model(x.double()))


def test_methods() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2))

        @graph.capture
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    one, other = Net(), Net()
    with torch.no_grad():
        other.weight.mul_(3)
        for _ in range(4):
            assert_bits_equal(one(torch.ones(2)), torch.ones(2))
            assert_bits_equal(other(torch.ones(2)), torch.full((2,), 3.0))


def test_no_function_and_no_option() -> None:
    with pytest.raises(GraphError, match="expected a function or a module"):
        graph.capture(3)  # type: ignore[call-overload]
    with pytest.raises(GraphError, match="no option 'warmups'; it has key, warmup"):
        graph.capture(lambda: None, warmups=3)  # type: ignore[call-overload]


def _lbfgs(p: torch.Tensor) -> Callable[[], None]:
    optimizer = torch.optim.LBFGS([p])
    return lambda: optimizer.step(lambda: p.sum())


def _averaged(_: torch.Tensor) -> Callable[[], None]:
    module = nn.Linear(2, 2)
    averaged = torch.optim.swa_utils.AveragedModel(module)
    return lambda: averaged.update_parameters(module)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: torch.optim.Adam([p]).step,
            r"fused=True, or on a GPU .* capturable=True, or call its step",
        ),
        (
            lambda p: torch.optim.Adagrad([p]).step,
            "; create the optimizer with fused=True, or call",
        ),
        (lambda p: torch.optim.NAdam([p]).step, r"; on a GPU .* capturable=True, or call its step"),
        (lambda p: torch.optim.Adafactor([p]).step, r"; call its step.. outside the function"),
        (_averaged, "; call update_parameters.. outside the function"),
        (_lbfgs, "keep LBFGS outside the function"),
        (
            lambda p: lambda: torch.distributions.Normal(p, 1, True).log_prob(p),
            "validate_args=False",
        ),
        (lambda p: lambda: torch.eye(2).to_sparse() @ p, "of a sparse tensor .* dense one"),
    ],
)
def test_hints(make: Any, words: str) -> None:
    p = torch.ones(2, requires_grad=True)
    p.grad = torch.ones(2)
    with pytest.raises(GraphError, match=words):
        graph.capture(make(p))()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.no_grad()
def test_an_encoder_with_nested_tensors() -> None:
    """The advice for the fast path of nn.TransformerEncoder makes the capture work."""
    x, hidden = torch.randn(2, 5, 8), torch.arange(5).expand(2, 5) > 3

    def encoder(**options: Any) -> Any:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        module = nn.TransformerEncoder(layer, 2, **options).eval()
        return lambda x: module(x, src_key_padding_mask=hidden)

    with pytest.raises(GraphError, match=r"; create nn.TransformerEncoder with enable_nested"):
        graph.capture(encoder())(x)
    eager = encoder(enable_nested_tensor=False)
    captured = graph.capture(eager, outputs="copy")
    for turn in range(3):
        assert_bits_equal(captured(x + turn), eager(x + turn), f"turn {turn}")


def test_names_of_the_program() -> None:
    """Messages name the program's classes, not those of captured functions and outputs."""
    captured = graph.capture(nn.Linear(2, 2))
    assert_equal(graph.capture(captured).name, "Linear")
    assert repr(Same(captured)).startswith("Linear at ")
    args = (captured, 2)
    call = arguments(args, {}, flatten(args, {}, set()), (), set())
    assert_equal(call.described(), [repr(captured.fn), "2"])
    for _ in range(2):
        output = captured(torch.ones(1, 2))
    assert_equal(type(output).__name__, "Tensor")


def test_wrappers_that_a_function_uses() -> None:
    """The call itself is right; no graph can hold what a wrapper's operators do (DTensor)."""
    held = Wrapper(torch.full((3,), 2.0))

    def f(x: torch.Tensor) -> torch.Tensor:
        total: Any = held * x
        return total.held  # type: ignore[no-any-return]

    x = torch.ones(3)
    with pytest.raises(GraphError, match=r"mul can't be captured.* is a Wrapper.* plain tensors"):
        graph.capture(f)(x)
    g = graph.capture(f, on_fail="eager")
    for turn in range(3):
        assert_bits_equal(g(x * turn), x * turn * 2, f"turn {turn}")


def test_threads_and_verified_calls() -> None:
    """What a verified call puts back is not work of another thread."""
    total = torch.zeros(1, dtype=torch.float64)

    def f(x: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total * 1

    g, one = graph.capture(f, outputs="copy", verify=2), torch.ones(1, dtype=torch.float64)
    g(one)

    def work() -> None:
        for _ in range(40):
            g(one)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert_equal((total.item(), len(g.eager)), (121.0, 0), "calls that count")


def test_a_thread_that_looks_during_another_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets the key of what is there now, not the one before."""
    holder, x = types.SimpleNamespace(scales=[[1.0]]), torch.ones(1)
    f = graph.capture(lambda x: x * holder.scales[0][0], verify=False, outputs="copy")
    assert_equal([f(x).item(), f(x).item()], [1.0, 1.0])
    facts, values = Contents.facts, list[float]()

    def slowly(self: Contents) -> Iterator[Any]:
        monkeypatch.setattr(Contents, "facts", facts)
        each = facts(self)
        first = next(each)
        thread = threading.Thread(target=lambda: values.append(f(x).item()))
        thread.start()
        thread.join()
        yield first
        yield from each

    holder.scales[0][0] = 7.0
    monkeypatch.setattr(Contents, "facts", slowly)
    values.append(f(x).item())
    assert_equal(values, [7.0, 7.0])


@runs_on("unified_ranks")
def test_kinds_that_stay_eager(comm: Any) -> None:
    """A function that can't be captured keeps no more keys than it may have graphs."""
    captured = graph.capture(lambda x, n: x * x.sum().item() * n, max_graphs=3, on_fail="eager")
    x = torch.ones(2, device=comm.device)
    results = [captured(x, n).tolist() for n in range(9)]
    assert_equal(results, [[2.0 * n] * 2 for n in range(9)], "results")
    assert_equal((len(captured.entries), len(captured.eager)), (0, 3), "graphs and eager kinds")
