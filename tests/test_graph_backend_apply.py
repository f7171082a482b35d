"""graph.backend.apply: FX graphs are replayed as they are, cut where no graph may hold a node."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.aot_autograd import aot_function, make_boxed_func
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from commlib import graph
from commlib.graph import GraphError
from commlib.graph.compiled.unsafe import unsafe_nodes
from tests.support.checks import assert_bits_equal, assert_equal

ROWS, WIDTH = 4, 8


def inputs(turn: int, *, grad: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(turn)
    return torch.randn(ROWS, WIDTH, generator=generator).requires_grad_(grad)


def layer(x: Tensor, weight: Tensor) -> Tensor:
    return torch.relu(x @ weight)


def traced() -> torch.fx.GraphModule:
    gm: torch.fx.GraphModule = make_fx(layer)(inputs(0), torch.eye(WIDTH))
    return gm


def test_static_inputs() -> None:
    """They are read where they are, and others at the same place get another graph."""
    weight, other = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH)
    replayed = graph.backend.apply(traced(), [inputs(0), weight], static_inputs=[1])
    for turn in range(5):
        x = inputs(turn)
        for each in (weight, other):
            assert_bits_equal(replayed(x, each), layer(x, each), f"turn {turn}")
            each += 1  # the graph reads what is there
    rows = graph.report(replayed)
    assert_equal([row["replays"] for row in rows], [4, 4], "replays, one row per weight")
    assert_equal({row["bytes_copied"] for row in rows}, {inputs(0).nbytes}, "bytes copied")


def test_parameters_are_static() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    replayed = graph.backend.apply(traced(), [inputs(0), weight])
    for turn in range(4):
        expected, actual = inputs(turn, grad=True), inputs(turn, grad=True)
        layer(expected, weight).square().sum().backward()
        want, weight.grad = weight.grad, None
        replayed(actual, weight).square().sum().backward()
        assert_bits_equal(actual.grad, expected.grad, "gradient of x")
        assert_bits_equal(weight.grad, want, "gradient of the weight")
        weight.grad = None
    (row,) = graph.report(replayed)
    assert_equal((row["segments"], row["bytes_copied"]), (2, inputs(0).nbytes), "graphs, bytes")


def test_graphs_of_aot_autograd() -> None:
    """A forward and a backward that a trainer compiles itself, with AOTAutograd's metadata."""
    parts: dict[str, Any] = {}

    def compiler(kind: str) -> Any:
        def compile_part(gm: torch.fx.GraphModule, values: Sequence[Any]) -> Any:
            parts[kind] = graph.backend.apply(gm, values, on_fail="raise")
            return make_boxed_func(parts[kind])

        return compile_part

    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    function = aot_function(layer, compiler("forward"), compiler("backward"))
    for turn in range(5):
        expected, actual = inputs(turn, grad=True), inputs(turn, grad=True)
        layer(expected, weight).sum().backward()
        want, weight.grad = weight.grad, None
        first, second = function(actual, weight), function(inputs(turn + 9), weight)
        first.sum().backward()
        assert_bits_equal(second, layer(inputs(turn + 9), weight), "a forward in between")
        assert_bits_equal(actual.grad, expected.grad, "gradient of x")
        assert_bits_equal(weight.grad, want, "gradient of the weight")
        weight.grad = None
    assert_equal(
        {row["eager"] for part in parts.values() for row in graph.report(part)}, {None}, ""
    )


def test_cut() -> None:
    """Nodes with shapes that depend on values run between graphs, in their order."""

    def f(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        top = (x * 2).topk(3)
        places = (x > 0).nonzero()
        return places + 1, top.values.exp(), top.indices * 2

    replayed = graph.backend.apply(torch.fx.symbolic_trace(f), [inputs(0)])
    for turn in range(5):
        for actual, want in zip(replayed(inputs(turn)), f(inputs(turn)), strict=True):
            assert_bits_equal(actual, want, f"turn {turn}")
    rows = graph.report(replayed)
    assert_equal([row["replays"] for row in rows if row["eager"] is None], [4, 4], "parts")
    reasons = [row["eager"] for row in rows if row["eager"]]
    assert_equal(reasons[0], "nonzero has a shape that depends on values", "reason")


def test_what_is_unsafe_on_a_gpu() -> None:
    """CPU tensors in a graph for a GPU run outside it, but for numbers."""
    mode, nodes = FakeTensorMode(), torch.fx.Graph()

    def known(node: torch.fx.Node, device: str, *shape: int) -> torch.fx.Node:
        """Note what a node gives, as a trace on a GPU would."""
        node.meta["val"] = FakeTensor(mode, torch.empty(shape, device="meta"), torch.device(device))
        return node

    aten = torch.ops.aten
    x = known(nodes.placeholder("x"), "cuda", ROWS)
    lengths = known(nodes.placeholder("lengths"), "cpu", ROWS)
    two = known(nodes.call_function(aten.full.default, ([], 2.0)), "cpu")
    safe = known(nodes.call_function(aten.mul.Tensor, (x, two)), "cuda", ROWS)
    more = known(nodes.call_function(aten.add.Tensor, (lengths, two)), "cpu", ROWS)
    copy = known(nodes.call_function(aten._to_copy.default, (more,)), "cuda", ROWS)
    nodes.output((safe, copy))
    reasons = unsafe_nodes(torch.fx.GraphModule(nn.Module(), nodes))
    assert_equal(
        [*reasons.values()],
        ["aten.add.Tensor works on the CPU", "aten._to_copy.default works on the CPU"],
        "reasons",
    )


def test_generators_are_known() -> None:
    """A graph that is given a generator draws on from it."""

    def f(x: Tensor, generator: torch.Generator) -> Tensor:
        return x + torch.rand(x.shape, generator=generator)

    gm = torch.fx.symbolic_trace(f)
    expected, actual = (torch.Generator().manual_seed(7) for _ in range(2))
    replayed = graph.backend.apply(gm, [inputs(0), actual], on_fail="raise")
    for turn in range(5):
        assert_bits_equal(replayed(inputs(turn), actual), f(inputs(turn), expected), f"turn {turn}")
    assert_equal([row["replays"] for row in graph.report(replayed)], [4], "replays")


def test_reset() -> None:
    replayed = graph.backend.apply(traced(), [inputs(0), torch.eye(WIDTH)], static_inputs=[1])
    weight = torch.eye(WIDTH)
    for _ in range(2):
        for _ in range(3):
            replayed(inputs(0), weight)
        assert_equal([row["replays"] for row in graph.report(replayed)], [2], "replays")
        replayed.reset()
        assert_equal(graph.report(replayed), [], "rows")


WRONG: dict[str, tuple[Any, Any, dict[str, Any], str]] = {
    "module": (nn.Linear(2, 2), [inputs(0)], {}, "expected a torch.fx.GraphModule"),
    "count": (traced(), [inputs(0)], {}, "1 example inputs; expected 2: x_1, weight_1"),
    "inputs": (traced(), inputs(0), {}, "example_inputs is a Tensor; expected a list or tuple"),
    "shape": (
        traced(),
        [inputs(0), torch.ones(3, 3)],
        {},
        "weight_1 is (3, 3) torch.float32 on cpu; the graph was traced with (8, 8)",
    ),
    "dtype": (traced(), [inputs(0), torch.eye(WIDTH).double()], {}, "is (8, 8) torch.float64"),
    "type": (traced(), [inputs(0), 3], {}, "weight_1 is 3; the graph was traced with (8, 8)"),
    "untraced": (
        torch.fx.symbolic_trace(layer),
        [inputs(0), torch.ones(3)],
        {},
        "the graph can't run on these example inputs",
    ),
    "position": (traced(), [inputs(0), torch.eye(WIDTH)], {"static_inputs": [2]}, "input 2 is one"),
    "truth": (traced(), [inputs(0), torch.eye(WIDTH)], {"static_inputs": [True]}, "input True is"),
    "number": (traced(), [inputs(0), torch.eye(WIDTH)], {"static_inputs": 1}, "expected a list of"),
    "twice": (traced(), [inputs(0), torch.eye(WIDTH)], {"static_inputs": [1, 1]}, "each position"),
    "option": (traced(), [inputs(0), torch.eye(WIDTH)], {"first": "once"}, "no option 'first'"),
    "value": (traced(), [inputs(0), torch.eye(WIDTH)], {"verify": "often"}, "verify='often'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_bad_input(case: str) -> None:
    gm, values, options, said = WRONG[case]
    with pytest.raises(GraphError) as failed:
        graph.backend.apply(gm, values, **options)
    assert said in str(failed.value)


def test_calls_with_other_arguments() -> None:
    replayed = graph.backend.apply(traced(), [inputs(0), torch.eye(WIDTH)])
    with pytest.raises(GraphError, match="1 arguments; expected 2"):
        replayed(inputs(0))


def test_a_static_input_that_changes_its_kind() -> None:
    """Unfrozen, or viewed otherwise at the same address, it gets another graph."""
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH), requires_grad=False)
    replayed = graph.backend.apply(traced(), [inputs(0), weight], static_inputs=[1])
    for turn in range(4):
        assert_bits_equal(replayed(inputs(turn), weight), layer(inputs(turn), weight), "frozen")
    weight.requires_grad_(True)
    for turn in range(4):
        replayed(inputs(turn), weight).sum().backward()
        grad, weight.grad = weight.grad, None
        layer(inputs(turn), weight).sum().backward()
        assert grad is not None
        assert_bits_equal(grad, weight.grad, f"gradient {turn}")
        weight.grad = None
    weight.requires_grad_(False)
    weight.data = weight.data.t()
    for turn in range(3):
        assert_bits_equal(replayed(inputs(turn), weight), layer(inputs(turn), weight), "turned")


def test_many_sets_that_are_replaced_once() -> None:
    """Ten layers that share code, whose weights move once, have graphs again after that."""
    weights = [nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(10)]
    replayed = graph.backend.apply(traced(), [inputs(0), weights[0]], static_inputs=[1])
    for _ in range(2):
        for turn in range(4):
            for weight in weights:
                assert_bits_equal(replayed(inputs(turn), weight), layer(inputs(turn), weight))
        for weight in weights:
            weight.data = weight.data.clone()
    rows = graph.report(replayed)
    assert_equal(([row["eager"] for row in rows], len(rows)), ([None] * 10, 10), "sets")
