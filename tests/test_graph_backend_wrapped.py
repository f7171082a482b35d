"""graph.backend cuts graphs at unsafe operators that AOTAutograd wraps, or has in sub-graphs."""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._higher_order_ops.effects import _register_effectful_op, with_effects
from torch._higher_order_ops.invoke_subgraph import mark_compile_region
from torch._higher_order_ops.print import print as printed
from torch._library.effects import EffectType
from torch._prims import rng_prims
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from commlib import graph
from commlib.graph.compiled.unsafe import unsafe_nodes
from tests.support.checks import assert_bits_equal, assert_equal

# Torch's own, while it loads Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
SIZE, CALLS = 4, 6
STRICT = {"on_fail": "raise", "fallback_random": True}
UNSAFE = (torch.Tag.cudagraph_unsafe,)
calls = {"count": 0}  # on the host: no replay would count


def counted() -> int:
    calls["count"] += 1
    return calls["count"]


@torch.library.custom_op("graph_wrapped_tests::add_count", mutates_args=("total",), tags=UNSAFE)
def add_count(total: Tensor) -> None:
    """Add the number of the call to ``total``."""
    total += counted()


@torch.library.custom_op(
    "graph_wrapped_tests::add_noise", mutates_args=("x",), tags=(torch.Tag.nondeterministic_seeded,)
)
def add_noise(x: Tensor) -> None:
    """Add random numbers of torch's generator, which a graph can hold."""
    x += torch.rand(x.shape)


@torch.library.custom_op("graph_wrapped_tests::ordered", mutates_args=(), tags=UNSAFE)
def ordered(x: Tensor) -> Tensor:
    """Return the sum with the number of the call; it has ordered effects."""
    return x + counted()


@torch.library.custom_op("graph_wrapped_tests::plain", mutates_args=(), tags=UNSAFE)
def plain(x: Tensor) -> Tensor:
    """Return the sum with the number of the call."""
    return x + counted()


ordered.register_fake(torch.empty_like)
plain.register_fake(torch.empty_like)
_register_effectful_op("graph_wrapped_tests::ordered", EffectType.ORDERED)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()


def same_as_eager(f: Callable[..., Any], *state: Tensor, device: str = "cpu") -> dict[str, Any]:
    """Compare calls bit for bit, with their state and the generator; return why parts are eager."""
    results = []
    for call in (f, torch.compile(f, backend=graph.backend, options=STRICT, fullgraph=True)):
        calls["count"] = 0
        torch.manual_seed(3)
        held, tensors = [x.clone() for x in state], []
        for turn in range(CALLS):
            out = call(torch.eye(SIZE, device=device) * (turn + 1), *held)
            tensors += [out.clone(), *(x.clone() for x in held), torch.rand(1, device=device)]
        results.append(tensors)
    for i, (actual, expected) in enumerate(zip(results[1], results[0], strict=True)):
        assert_bits_equal(actual, expected, f"result {i}")
    rows = [row for row in graph.report() if f" at {Path(__file__).name}:" in row["function"]]
    captured = [row["replays"] for row in rows if row["eager"] is None]
    assert_equal(captured, [CALLS - 1] * len(captured), "replays")
    return {"eager": [row["eager"] for row in rows if row["eager"]], "captured": len(captured)}


def tagged(op: str) -> list[str]:
    return [f"graph_wrapped_tests.{op}.default is tagged cudagraph_unsafe"]


def test_mutates_a_result() -> None:
    def f(x: Tensor) -> Any:
        y = x @ x
        add_count(y)
        return y @ x

    assert_equal(same_as_eager(f), {"eager": tagged("add_count"), "captured": 2}, "parts")


def test_mutates_an_argument() -> None:
    """The program's own tensor counts on, also where the operator writes to a view of it."""

    def f(x: Tensor, total: Tensor) -> Any:
        y = x @ total
        add_count(total[1])
        return y @ total

    report = same_as_eager(f, torch.zeros(SIZE, SIZE))
    assert_equal(report["eager"], tagged("add_count"), "reasons")


def test_training() -> None:
    """Gradients flow past the operator, which counts in a buffer of the model."""

    def use(call: Any, weight: Tensor, total: Tensor) -> list[Tensor]:
        calls["count"], results = 0, []
        for turn in range(CALLS):
            out = call(torch.eye(SIZE) * (turn + 1), weight, total)
            results += [out.detach(), *torch.autograd.grad(out.sum(), weight), total.clone()]
        return results

    def f(x: Tensor, weight: Tensor, total: Tensor) -> Any:
        y = x @ weight
        add_count(total)
        return (y @ total) @ weight

    weight, total = (torch.eye(SIZE) * 2).requires_grad_(), torch.zeros(SIZE, SIZE)
    expected = use(f, weight, total.clone())
    actual = use(torch.compile(f, backend=graph.backend, options=STRICT), weight, total)
    for i, (one, want) in enumerate(zip(actual, expected, strict=True)):
        assert_bits_equal(one, want, f"result {i}")
    reasons = [row["eager"] for row in graph.report() if row["eager"]]
    assert_equal(reasons, tagged("add_count"), "reasons")


def test_mutates_and_draws() -> None:
    """No cut is needed; replays draw on from where the generator is, and leave it there."""

    def f(x: Tensor) -> Any:
        y = x @ x
        add_noise(y)
        return y @ x

    assert_equal(same_as_eager(f), {"eager": [], "captured": 1}, "parts")


def test_ordered_effects() -> None:
    def f(x: Tensor) -> Any:
        return ordered(ordered(x @ x) @ x) @ x

    assert_equal(same_as_eager(f), {"eager": tagged("ordered"), "captured": 3}, "parts")


@pytest.mark.gpu
@pytest.mark.parametrize("op", [add_count, ordered])
def test_on_a_gpu(op: Any) -> None:
    def f(x: Tensor) -> Any:
        y = x.sin()
        z = op(y)
        return (y if z is None else z).cos()

    report = same_as_eager(f, device="cuda")
    assert_equal(report, {"eager": tagged(op._name), "captured": 2}, "parts")


def test_branches() -> None:
    """The host selects a branch, and runs the operator in it at each call."""

    def f(x: Tensor) -> Any:
        y = x @ x
        return torch.cond(x.sum() > 9, lambda y: plain(y @ y), lambda y: y @ y, (y,)) @ x

    assert_equal(same_as_eager(f), {"eager": ["cond is steered by the host"], "captured": 2}, "")


@mark_compile_region
def shared(x: Tensor) -> Any:
    return plain(x @ x) @ x


@mark_compile_region
def noisy(x: Tensor) -> Any:
    return x @ torch.rand(SIZE, SIZE)


def test_sub_graphs() -> None:
    """A region that is compiled once and used twice runs eagerly for the operator in it."""

    def f(x: Tensor) -> Any:
        return shared(shared(x @ x) @ x) @ x

    assert_equal(same_as_eager(f), {"eager": tagged("plain"), "captured": 3}, "parts")


def test_sub_graphs_that_draw() -> None:
    def f(x: Tensor) -> Any:
        return noisy(noisy(x) @ x)

    assert_equal(same_as_eager(f), {"eager": [], "captured": 1}, "parts")


@pytest.mark.parametrize("op", [add_count, ordered])
def test_apply(op: Any) -> None:
    """Graphs of AOTAutograd that another compiler passes on are cut as well."""
    replayed: list[Any] = []

    def compiler(gm: torch.fx.GraphModule, values: Any) -> Any:
        replayed.append(graph.backend.apply(gm, values, on_fail="raise"))
        return make_boxed_func(replayed[0])

    def f(x: Tensor) -> Any:
        y = x @ x
        z = op(y)
        return (y if z is None else z) @ x

    x = torch.eye(SIZE)
    calls["count"] = 0
    expected = [f(x) for _ in range(CALLS)]
    calls["count"] = 0
    compiled = torch.compile(f, backend=aot_autograd(fw_compiler=compiler))
    for turn, want in enumerate(expected):
        assert_bits_equal(compiled(x), want, f"turn {turn}")
    rows = graph.report(replayed[0])
    assert_equal([row["eager"] for row in rows if row["eager"]], tagged(op._name), "reasons")
    assert_equal([row["replays"] for row in rows if not row["eager"]], [CALLS - 1] * 2, "replays")


def test_what_is_unsafe_on_a_gpu() -> None:
    """CPU tensors of a wrapped operator count; an effect token, which is on the CPU, does not."""
    mode, nodes = FakeTensorMode(), torch.fx.Graph()

    def fake(device: str, *shape: int) -> Tensor:
        return FakeTensor(mode, torch.empty(shape, device="meta"), torch.device(device))

    token, x, lengths = (nodes.placeholder(name) for name in ("token", "x", "lengths"))
    for node, device in ((token, "cpu"), (x, "cuda"), (lengths, "cpu")):
        node.meta["val"] = fake(device, SIZE)
    aten = torch.ops.aten
    for op, *args in ((aten.neg.default, x), (aten.mul.Tensor, x, lengths), (printed, "now")):
        node = nodes.call_function(with_effects, (token, op, *args))
        node.meta["val"] = (fake("cpu", 0), fake("cuda", SIZE))
    nodes.output(x)
    reasons = unsafe_nodes(torch.fx.GraphModule(torch.nn.Module(), nodes))
    expected = ["aten.mul.Tensor works on the CPU", "print runs on the host"]
    assert_equal([*reasons.values()], expected, "reasons")


def test_a_sub_graph_under_a_second_name() -> None:
    """The names of one sub-graph count alike."""
    inner, outer = torch.fx.Graph(), torch.fx.Graph()
    inner.output(inner.call_function(plain._opoverload, (inner.placeholder("x"),)))
    part = torch.fx.GraphModule(torch.nn.Module(), inner)
    node = outer.call_module("second", (outer.placeholder("x"),))
    outer.output(node)
    gm = torch.fx.GraphModule({"second": part}, outer)
    gm._modules = {"first": part, "second": part}
    assert_equal([*unsafe_nodes(gm).values()], tagged(plain._name), "reasons")


@pytest.mark.skipif(not hasattr(rng_prims, "run_dtensor_rng_op"), reason="an older torch")
def test_generators_of_dtensors() -> None:
    """The operator in which DTensor draws sets the state of a generator."""
    nodes = torch.fx.Graph()
    x, draw = nodes.placeholder("x"), torch.ops.aten.rand_like.default
    nodes.output(nodes.call_function(rng_prims.run_dtensor_rng_op, (0, 1, draw, x)))
    reasons = unsafe_nodes(torch.fx.GraphModule(torch.nn.Module(), nodes))
    assert_equal([*reasons.values()], ["run_dtensor_rng_op is steered by the host"], "reasons")
