"""Captured functions in code that torch.compile compiles: each call is a graph break.

The models are made of operators that Inductor calls as they are, so that no C++ is compiled.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib import graph, ops
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

# Torch's own, while it loads Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
BACKENDS = ("eager", "aot_eager", "inductor")
REASON = (torch._dynamo.exc.Unsupported, "replays graphs", "backend=commlib.graph.backend")
ROWS, WIDTH = 4, 8
Call = Callable[[Tensor], Tensor]


def weights(ring: Any, count: int) -> list[Tensor]:
    """Return small integers, whose products are exact in any order."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(-2, 3, (WIDTH, WIDTH), generator=generator).float().to(ring.device)
        for _ in range(count)
    ]


def batch(ring: Any, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * turn + ring.rank)
    return torch.randint(-2, 3, (ROWS, WIDTH), generator=generator).float().to(ring.device)


def linear(weight: Tensor) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH, bias=False, device=weight.device)
    module.weight.data.copy_(weight)
    return module


def compiled(call: Any, backend: Any, *, fullgraph: bool = False) -> Any:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(call, backend=backend, fullgraph=fullgraph)


def breaks() -> list[str]:
    """Return why Dynamo has ended graphs since the last call of ``compiled``."""
    return [*torch._dynamo.utils.counters["graph_break"]]


def check_calls(ring: Any, call: Call, expected: Call, what: str = "") -> None:
    for turn in range(4):
        x = batch(ring, turn)
        assert_bits_equal(call(x), expected(x), f"{what} turn {turn}")


@pytest.mark.parametrize("backend", BACKENDS)
@runs_on("unified_ranks")
def test_results_and_gradients(ring: Any, backend: str) -> None:
    """Both are those of eager code, and the call is replayed between two compiled parts."""
    parameters = [w.requires_grad_() for w in weights(ring, 3)]
    first, middle, last = parameters

    def reduced(x: Tensor) -> Tensor:
        return ops.all_reduce(x @ middle)

    captured = graph.capture(reduced)
    call = compiled(lambda x: captured(x @ first) @ last, backend)
    for turn in range(4):
        x = batch(ring, turn).requires_grad_()
        expected = reduced(x @ first) @ last
        wanted = torch.autograd.grad(expected.sum(), [x, *parameters])
        expected = expected.detach()  # eager nodes that live would refuse the capture on GPUs
        result = call(x)
        assert_bits_equal(result, expected, f"turn {turn}")
        for i, grad in enumerate(torch.autograd.grad(result.sum(), [x, *parameters])):
            assert_bits_equal(grad, wanted[i], f"turn {turn}, gradient {i}")
    assert_equal(captured.entries.replays, 3, "replays")
    assert_equal(len(breaks()), 1, f"graph breaks: {breaks()}")
    assert "replays graphs" in breaks()[0], breaks()


@runs_on("unified_ranks")
def test_no_function_of_a_replay_is_compiled(ring: Any) -> None:
    """The backend gets the operators before the call and those after it."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, examples: Any) -> Any:
        graphs.append(module)
        return module.forward

    captured = graph.capture(lambda x: x.relu() * 2)
    call = compiled(lambda x: captured(x * 3) + 1, backend)
    check_calls(ring, call, lambda x: (x * 3).relu() * 2 + 1)
    nodes = [x for module in graphs for x in module.graph.nodes if x.op.startswith("call")]
    names = {getattr(x.target, "__name__", x.target) for x in nodes}
    assert_equal(names, {"mul", "add"}, "operators that were compiled")
    assert_equal(captured.entries.replays, 3, "replays")


@pytest.mark.parametrize("backend", BACKENDS)
@runs_on("unified_ranks")
def test_captured_modules(ring: Any, backend: str) -> None:
    """A captured module as a part of a compiled one, and as what is compiled."""
    first, middle, last = (linear(w) for w in weights(ring, 3))
    part, alone = graph.capture(middle), graph.capture(middle)
    model = nn.Sequential(first, part, last)
    with torch.no_grad():
        check_calls(ring, compiled(model, backend), lambda x: last(middle(first(x))))
        assert_equal(part.entries.replays, 3, "replays of the part")
        check_calls(ring, compiled(alone, backend), middle)
        assert_equal(alone.entries.replays, 3, "replays of the module that is compiled")
    x = batch(ring, 5)
    compiled(model, backend)(x).sum().backward()
    grads = [module.weight.grad for module in (first, middle, last)]
    model.zero_grad()
    last(middle(first(x))).sum().backward()
    for module, grad in zip((first, middle, last), grads, strict=True):
        assert grad is not None
        assert_bits_equal(grad, module.weight.grad, "gradient")


class Layer(nn.Module):
    """A module whose forward is captured."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    @graph.capture
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def scale_of(factor: float) -> Any:
    """Return an object with captured methods, of a new class."""

    class Scale:
        @graph.capture(outputs="copy")
        def scaled(self, x: Tensor) -> Tensor:
            return x * factor

        @staticmethod
        @graph.capture(outputs="copy")
        def halved(x: Tensor) -> Tensor:
            return x / 2

        @classmethod
        @graph.capture(outputs="copy")
        def doubled(cls, x: Tensor) -> Tensor:
            return x * 2

    return Scale()


@pytest.mark.parametrize("backend", BACKENDS[:2])
@runs_on("unified_ranks")
def test_captured_methods(ring: Any, backend: str) -> None:
    """Their first call too, which binds them to the object."""
    (weight,) = weights(ring, 1)
    scale, layer = scale_of(3), Layer(weight)
    calls: list[tuple[Call, Call]] = [
        (lambda x: scale.scaled(x * 2) + 1, lambda x: x * 6 + 1),
        (lambda x: scale.halved(x * 2) + 1, lambda x: x + 1),
        (lambda x: scale.doubled(x * 2) + 1, lambda x: x * 4 + 1),
        (lambda x: layer(x * 2) + 1, lambda x: (x * 2) @ weight + 1),
    ]
    with torch.no_grad():
        for call, expected in calls:
            check_calls(ring, compiled(call, backend), expected)
    methods: list[Any] = [scale.scaled, scale.halved, scale.doubled, layer.forward]
    for method in methods:
        assert_equal(method.entries.replays, 3, f"replays of {method.name}")


@pytest.mark.parametrize("backend", BACKENDS[:2])
@runs_on("unified_ranks")
def test_calls_in_a_loop(ring: Any, backend: str) -> None:
    """Dynamo can end no graph in a loop, so it leaves the function to eager code; or in a try."""
    captured = graph.capture(lambda x: ops.all_reduce(x) * 2)

    def repeated(x: Tensor) -> Tensor:
        for i in range(3):
            x = captured(x) + i
        return x

    def expected(x: Tensor) -> Tensor:
        for i in range(3):
            x = ops.all_reduce(x) * 2 + i
        return x

    check_calls(ring, compiled(repeated, backend), expected)
    assert_equal(captured.entries.replays, 11, "replays")
    assert_equal(torch._dynamo.utils.counters["frames"]["ok"], 0, "functions that were compiled")

    def tried(x: Tensor) -> Tensor:
        try:
            return captured(x) + 1
        finally:
            x.add_(1)

    check_calls(ring, compiled(tried, backend), lambda x: ops.all_reduce(x - 1) * 2 + 1)
    assert_equal(captured.entries.replays, 15, "replays")


@pytest.mark.parametrize("backend", BACKENDS[:2])
@runs_on("unified_ranks")
def test_compiled_code_in_the_captured_function(ring: Any, backend: str) -> None:
    """What the captured function calls is compiled or not as in an eager call of it."""
    first, last = weights(ring, 2)
    inner = compiled(lambda x: x @ first, backend)
    captured = graph.capture(lambda x: ops.all_reduce(inner(x)))
    inner(batch(ring, 0))
    call = torch.compile(lambda x: captured(x * 2) @ last, backend=backend)
    check_calls(ring, call, lambda x: ops.all_reduce((x * 2) @ first) @ last)
    assert_equal(captured.entries.replays, 3, "replays")


@runs_on("unified_ranks")
def test_in_code_of_our_backend(ring: Any) -> None:
    """The parts before and after the call have graphs too."""
    first, middle, last = weights(ring, 3)
    captured = graph.capture(lambda x: ops.all_reduce(x @ middle))
    call = compiled(lambda x: captured(x @ first) @ last, graph.backend)
    with torch.no_grad():
        check_calls(ring, call, lambda x: ops.all_reduce(x @ first @ middle) @ last)
    assert_equal(captured.entries.replays, 3, "replays")
    torch._dynamo.reset()


def other_forms(ring: Any) -> dict[str, tuple[Call, Call]]:
    """Return functions that ``commlib.graph`` makes in other ways, and what they compute."""
    first, last = (linear(w).requires_grad_(False) for w in weights(ring, 2))
    pipeline = graph.pipeline([first, last])
    schedule = graph.PipelineSchedule.gpipe(1, 2)
    stage = graph.pipeline([linear(w) for w in weights(ring, 1)])
    example = batch(ring, 0)
    module = torch.fx.experimental.proxy_tensor.make_fx(lambda x: x @ x.t())(example)
    region = graph.backend.apply(module, [example])

    def step(x: Tensor) -> Tensor:
        losses = schedule.run({0: stage}, [x, x + 1], lambda y, _: y.sum(), None)
        return torch.stack(losses)

    return {
        "pipeline": (pipeline, lambda x: last(first(x))),
        "schedule": (step, lambda x: torch.stack([first(x).sum(), first(x + 1).sum()])),
        "region": (region, lambda x: x @ x.t()),
    }


UNTRACED = {
    "pipeline": "Pipeline.forward",
    "schedule": "PipelineSchedule.run",
    "region": "Region.__call__",
}


@pytest.mark.parametrize("form", UNTRACED)
@pytest.mark.parametrize("backend", BACKENDS[:2])
@runs_on("unified_ranks")
def test_other_forms(ring: Any, backend: str, form: str) -> None:
    made, expected = other_forms(ring)[form]
    call = compiled(lambda x: made(x * 2) + 1, backend)
    check_calls(ring, call, lambda x: expected(x * 2) + 1)
    assert_equal(len(breaks()), 1, f"graph breaks: {breaks()}")
    assert f"function {UNTRACED[form]} at" in breaks()[0], breaks()
    assert "replays graphs" in breaks()[0], breaks()


@runs_on("unified_ranks")
def test_fullgraph(ring: Any) -> None:
    """It is an error that says why and what to write; other calls are replayed as before."""
    (weight,) = weights(ring, 1)
    layer = Layer(weight)
    layer.requires_grad_(False)
    forms: dict[str, tuple[Call, Call]] = {
        "function": (graph.capture(lambda x: x @ weight), lambda x: x @ weight),
        "module": (graph.capture(linear(weight).requires_grad_(False)), lambda x: x @ weight.T),
        "forward": (layer, lambda x: x @ weight),
        "method": (scale_of(2).scaled, lambda x: x * 2),
        **other_forms(ring),
    }
    for name, (made, expected) in forms.items():
        call = compiled(lambda x, made=made: made(x * 2) + 1, "aot_eager", fullgraph=True)
        for _ in range(2):
            with raises(*REASON):
                call(batch(ring, 0))
        check_calls(ring, made, expected, name)
    scale = scale_of(2)
    with raises(*REASON):  # the look-up of a method that the object does not have yet
        compiled(lambda x: scale.scaled(x), "aot_eager", fullgraph=True)(batch(ring, 0))
    compiled_fn = compiled(lambda x: (x * 2) @ weight, graph.backend, fullgraph=True)
    check_calls(ring, compiled_fn, lambda x: (x * 2) @ weight)  # as the error says
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@runs_on("unified_ranks")
def test_borrowed_outputs_as_arguments(ring: Any, backend: str) -> None:
    """Compiled code takes them, and raises for one that was overwritten."""
    (weight,) = weights(ring, 1)
    captured = graph.capture(lambda x: x * 2)
    captured(batch(ring, 0))
    call = compiled(lambda x: x @ weight, backend)
    for turn in range(3):
        x = batch(ring, turn)
        output = captured(x)
        assert_bits_equal(call(output), (x * 2) @ weight, f"turn {turn}")
        assert_bits_equal(call(output[:2]), (x * 2)[:2] @ weight, f"turn {turn}, a view")
    captured(x)
    with raises(RuntimeError, "overwritten", "test_graph_in_compiled_code.py"):
        call(output)
    torch._dynamo.reset()


VIEWS: dict[str, Call] = {
    "rows": lambda x: x[:2],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.reshape(-1),
    "written": lambda x: x[:2].add_(1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("backend", BACKENDS[:2])
@runs_on("unified_ranks")
def test_views_of_outputs_end_with_them(ring: Any, backend: str, view: str) -> None:
    """Also those that compiled code makes, of an output that it gets or of a call inside it."""
    make = VIEWS[view]
    inside, before = graph.capture(lambda x: x * 2), graph.capture(lambda x: x * 2)
    of_call = compiled(lambda x: make(inside(x + 0)), backend)
    of_output = torch.compile(make, backend=backend)
    calls: tuple[Call, ...] = (of_call, lambda x: of_output(before(x)))
    for call in calls:
        for turn in range(3):
            result = call(batch(ring, turn))
            assert_bits_equal(result, make(batch(ring, turn) * 2), f"turn {turn}")
        call(batch(ring, 3))
        with raises(RuntimeError, "overwritten"):
            result.sum()
