"""graph.backend.apply: the run on fakes that comes before a graph is captured."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Tracer

from commlib import graph
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.cuts import cut

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script")
ROWS, WIDTH = 3, 4
func: Any = torch.func
TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: func.grad(lambda a: (a**2).sum())(x),
    "vjp": lambda x: func.vjp(torch.sin, x)[1](x)[0],
    "jvp": lambda x: func.jvp(torch.sin, (x,), (x,))[1],
    "vmap": lambda x: func.vmap(func.grad(lambda a: a**2))(x),
    "hessian": lambda x: func.hessian(lambda a: (a**3).sum())(x),
}


def rows_of(f: Callable[[Tensor], Any]) -> list[Any]:
    """Compare calls of compiled code with eager ones; return the rows of the report."""
    torch._dynamo.reset()
    regions: list[Any] = []

    def compiler(gm: GraphModule, values: Any) -> Any:
        regions.append(graph.backend.apply(gm, values))
        return regions[-1]

    compiled = torch.compile(f, backend=compiler)
    for turn in range(4):
        x = torch.arange(float(WIDTH)) + turn
        assert_bits_equal(compiled(x), f(x), f"turn {turn}")
    torch._dynamo.reset()
    return graph.report(regions[0])


@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_torch_func(name: str) -> None:
    """Fakes can't run them, and the graph is captured as a whole."""
    (row,) = rows_of(TRANSFORMS[name])
    assert_equal((row["eager"], row["replays"]), (None, 3), "eager, replays")


def test_transforms_in_a_graph_that_is_cut() -> None:
    rows = rows_of(lambda x: cut(func.jvp(torch.sin, (x,), (x,))[1]) + 1)
    (reason,) = (row["eager"] for row in rows)
    assert reason.startswith("what it writes is unknown: ")
    assert_equal(reason.count(": ") >= 3, True, f"node and error in {reason}")


def without_gradients(nodes: Graph) -> Callable[[], Node]:
    nodes.call_function(torch._C._set_grad_enabled, (False,))
    return lambda: nodes.call_function(torch._C._set_grad_enabled, (True,))


def with_autocast(nodes: Graph) -> Callable[[], Node]:
    mode = nodes.call_function(
        torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None)
    )
    return lambda: nodes.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))


def with_inference(nodes: Graph) -> Callable[[], Node]:
    modes = torch.autograd.grad_mode
    mode = nodes.call_function(modes._enter_inference_mode, (True,))
    return lambda: nodes.call_function(modes._exit_inference_mode, (mode,))


def modes_now() -> Any:
    torch.autocast_increment_nesting()
    return (
        *(torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        *(torch.is_autocast_enabled("cpu"), torch.autocast_decrement_nesting()),
    )


@pytest.mark.parametrize("enter", [without_gradients, with_autocast, with_inference])
def test_modes_that_an_error_leaves(enter: Any) -> None:
    """Between their nodes is a module that reads a value."""
    module, nodes = nn.Module(), Graph()
    module.norm = nn.BatchNorm1d(WIDTH, momentum=None)
    x = nodes.placeholder("x")
    leave = enter(nodes)
    y = nodes.call_module("norm", (x,))
    leave()
    nodes.output(y)
    before = modes_now()
    replayed = graph.backend.apply(GraphModule(module, nodes), [torch.ones(ROWS, WIDTH)])
    assert_equal(modes_now(), before, "modes")
    (row,) = graph.report(replayed)
    assert "the host reads a value: norm: " in row["eager"]


class Reading(nn.Module):
    """A module that reads a buffer in its own way."""

    def __init__(self, read: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.read = read
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Any:
        """Multiply by what was read."""
        factor: Any = self.factor
        return x * self.read(factor)


class Split(nn.Module):
    """A tensor that is split at the numbers of a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("numbers", torch.tensor([1, 2]))

    def forward(self, x: Tensor) -> Any:
        """Return the first piece."""
        numbers: Any = self.numbers
        return torch.tensor_split(x, numbers)[0] * 2


class LeafTracer(Tracer):
    """A tracer that leaves modules as they are."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True for a module that reads a value."""
        return isinstance(m, Reading)


def graph_of(module: nn.Module) -> GraphModule:
    tracer = LeafTracer()
    nodes = tracer.trace(module)
    return GraphModule(tracer.root, nodes)


READS: dict[str, Callable[[], nn.Module]] = {
    "tolist": lambda: nn.Sequential(Reading(lambda x: x.tolist())),
    "numpy": lambda: nn.Sequential(Reading(lambda x: float(x.numpy()))),
    "item": lambda: nn.Sequential(Reading(lambda x: x.item())),
    "branch": lambda: nn.Sequential(Reading(lambda x: 2 if x > 1 else 3)),
    "split": Split,
}


@pytest.mark.parametrize("name", READS)
def test_values_that_fakes_lack(name: str) -> None:
    gm = graph_of(READS[name]())
    replayed: Any = graph.backend.apply(gm, [torch.ones(ROWS, WIDTH)])
    for turn in range(3):
        x = torch.ones(ROWS, WIDTH) * turn
        assert_bits_equal(replayed(x), gm(x), f"turn {turn}")
    (row,) = graph.report(replayed)
    assert "the host reads a value: " in row["eager"]
    with raises(GraphError, "the host reads a value"):
        graph.backend.apply(gm, [torch.ones(ROWS, WIDTH)], on_fail="raise")


def test_modules_that_fakes_cannot_run() -> None:
    """The reason names the node and the error."""

    def refuse(x: Tensor) -> Any:
        if type(x) not in (Tensor, nn.Parameter):
            raise TypeError(f"not a {type(x).__name__}")
        return 2

    gm = graph_of(nn.Sequential(Reading(refuse)))
    replayed: Any = graph.backend.apply(gm, [torch.ones(ROWS, WIDTH)])
    assert_bits_equal(replayed(torch.ones(ROWS, WIDTH)), torch.ones(ROWS, WIDTH) * 2)
    (row,) = graph.report(replayed)
    assert_equal(row["eager"], "fakes can't run it: _0: TypeError: not a FakeTensor", "reason")
