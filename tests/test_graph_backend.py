"""graph.backend: compiled code from graphs has the bits of compiled code.

The models are made of operators that Inductor calls as they are, so that no C++ is compiled.
"""

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

from commlib import graph
from tests.support.checks import assert_bits_equal, assert_equal

# Torch's own, while it loads Inductor.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
ROWS, WIDTH = 4, 8
STRICT = {"on_fail": "raise"}


@torch.library.custom_op(
    "graph_backend_tests::tripled", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def tripled(x: Tensor) -> Tensor:
    """An operator that no graph may hold, with a gradient that none may hold either."""
    return x * 3


@torch.library.custom_op("graph_backend_tests::added_to", mutates_args=("total",))
def added_to(total: Tensor, x: Tensor) -> Tensor:
    """Add the sum of ``x`` to ``total``."""
    total += x.sum()
    return x.clone()


@torch.library.custom_op(
    "graph_backend_tests::doubled", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def doubled(x: Tensor) -> Tensor:
    """Twice as many rows, by an operator that no graph may hold."""
    return torch.cat([x, x])


@torch.library.custom_op(
    "graph_backend_tests::halved", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def halved(x: Tensor) -> Tensor:
    """Add the second half of the rows to the first."""
    return x[: len(x) // 2] + x[len(x) // 2 :]


@torch.library.custom_op("graph_backend_tests::row_sum", mutates_args=())
def row_sum(x: Tensor) -> Tensor:
    """Add the rows; the gradient of each is that of the sum."""
    return x.sum(0, keepdim=True)


row_sum.register_fake(lambda x: x.new_empty(1, x.shape[1]))
row_sum.register_autograd(lambda ctx, grad: grad.expand(ROWS, WIDTH))
doubled.register_fake(lambda x: x.new_empty(2 * x.shape[0], x.shape[1]))
halved.register_fake(lambda x: x.new_empty(x.shape[0] // 2, x.shape[1]))
doubled.register_autograd(lambda ctx, grad: halved(grad))
tripled.register_fake(torch.empty_like)
tripled.register_autograd(lambda ctx, grad: tripled(grad))
added_to.register_fake(lambda total, x: torch.empty_like(x))


class Block(nn.Module):
    """Two matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.first @ self.second
        return y


class Cut(Block):
    """Two matrix products around an operator that no graph may hold."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = tripled(x @ self.first) @ self.second
        return y


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()  # graphs of a test's models go with them


def inputs(turn: int, rows: int = ROWS) -> Tensor:
    generator = torch.Generator().manual_seed(turn)
    return torch.randn(rows, WIDTH, generator=generator)


def same_as_inductor(
    make: Callable[[], nn.Module], use: Callable[[Any, nn.Module], list[Tensor]]
) -> None:
    """Compare what ``use`` returns bit for bit; the results of the second are from graphs."""
    results = []
    for backend, options in (("inductor", None), (graph.backend, STRICT)):
        torch.manual_seed(0)
        model = make()
        results.append(use(torch.compile(model, backend=backend, options=options), model))
    for i, (actual, expected) in enumerate(zip(results[1], results[0], strict=True)):
        assert_bits_equal(actual, expected, f"result {i}")


def trained(compiled: Any, model: nn.Module) -> list[Tensor]:
    """Return the losses and gradients of some steps."""
    optimizer, results = torch.optim.SGD(model.parameters(), lr=0.1), []
    for turn in range(6):
        loss = compiled(inputs(turn)).square().sum()
        loss.backward()
        results += [loss.detach(), *(weight.grad for weight in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return results


def rows(name: str = "") -> list[dict[str, Any]]:
    """Return the rows of the report that belong to compiled code."""
    return [
        row
        for row in graph.report()
        if "compiled code" in row["function"] and name in row["function"]
    ]


def test_training() -> None:
    """Forward and backward are one captured call, and no replay copies a parameter."""
    same_as_inductor(Block, trained)
    (row,) = rows()
    assert_equal((row["segments"], row["replays"], row["eager"]), (2, 5, None), "graphs")
    assert_equal(row["bytes_copied"], inputs(0).nbytes, "bytes copied per replay")


def test_several_forwards_before_their_backwards() -> None:
    def use(compiled: Any, model: nn.Module) -> list[Tensor]:
        results = []
        for turn in range(3):
            outs = [compiled(inputs(3 * turn + i)) for i in range(3)]
            for out in reversed(outs):
                out.sum().backward()
            results += [*(out.detach() for out in outs), *(w.grad for w in model.parameters())]
        return [x.clone() for x in results]

    same_as_inductor(Block, use)
    assert_equal(len(rows()), 3, "slots")


class Chunked(Cut):
    """A value with gaps crosses the cut: the code of the next part expects its strides."""

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x @ self.first).chunk(2, -1)
        y: Tensor = tripled(left.contiguous()) @ right.T @ self.second[: len(x)]
        return y


def test_values_with_gaps_between_parts() -> None:
    same_as_inductor(Chunked, trained)


def test_results_stay() -> None:
    """Compiled code returns fresh tensors, and so does its graph."""
    compiled = torch.compile(Block(), backend=graph.backend, options=STRICT)
    with torch.no_grad():
        outs = [compiled(inputs(turn)) for turn in range(4)]
        for turn, out in enumerate(outs):
            assert_bits_equal(out, compiled(inputs(turn)), f"turn {turn}")


def test_borrowed_results() -> None:
    """They are the memory of the graph where that is asked for."""
    compiled = torch.compile(Block(), backend=graph.backend, options=STRICT | {"outputs": "borrow"})
    with torch.no_grad():
        compiled(inputs(0))
        held = compiled(inputs(1))
        compiled(inputs(2))
        with pytest.raises(RuntimeError, match="was overwritten"):
            held.sum()


def test_symbolic_sizes() -> None:
    """Each size has its graph: a size is a part of the key."""

    def use(compiled: Any, _: nn.Module) -> list[Tensor]:
        return [compiled(inputs(turn, rows=3 + turn % 3)).detach() for turn in range(12)]

    same_as_inductor(Block, use)
    sizes = sorted(row["bytes_copied"] // inputs(0, 1).nbytes for row in rows() if row["replays"])
    assert_equal(sizes, [3, 4, 5], "rows that replays have copied")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_layers_that_share_compiled_code() -> None:
    """Every layer's parameters are read where they are, also after they were replaced."""

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    results = []
    for backend, options in (("inductor", None), (graph.backend, STRICT)):
        torch.manual_seed(0)
        model = Layers()
        for layer in model.layers:
            layer.compile(backend=backend, options=options)
        before = trained(model, model)
        model.layers[0].first.data = torch.eye(WIDTH)
        model.layers[1].second = nn.Parameter(torch.eye(WIDTH) * 2)
        results.append(before + trained(model, model))
    for i, (actual, expected) in enumerate(zip(results[1], results[0], strict=True)):
        assert_bits_equal(actual, expected, f"result {i}")
    # Those of other memory are released; those of another parameter stay until torch forgets them.
    assert_equal(len(rows()), 4, "captured layers")
    assert_equal({row["bytes_copied"] for row in rows()}, {inputs(0).nbytes}, "bytes copied")
    del model, layer
    torch._dynamo.reset()
    gc.collect()
    assert_equal(rows(), [], "graphs after the reset")


def test_cut() -> None:
    """Operators that no graph may hold run between graphs, and the report says which."""
    same_as_inductor(Cut, trained)
    captured = [row for row in rows() if row["eager"] is None]
    assert_equal(
        sorted(row["function"].partition(") ")[2] for row in captured),
        ["backward, part 0", "backward, part 2", "forward, part 0", "forward, part 2"],
        "captured parts",
    )
    assert_equal({row["replays"] for row in captured}, {5}, "replays")
    largest = max(row["bytes_copied"] for row in captured)
    assert_equal(largest <= 2 * inputs(0).nbytes, True, f"{largest} bytes copied: no parameter")
    why = [(row["function"].split()[-1], row["eager"]) for row in rows() if row["eager"]]
    text = "graph_backend_tests.tripled.default is tagged cudagraph_unsafe"
    assert_equal(sorted(why), [("backward", text), ("forward", text)], "reasons")


class Twice(Block):
    """Two matrix products; the second part gets tensors of 2n rows, and none of n."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = doubled(x @ self.first) @ self.second
        return y


def test_sizes_of_cut_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part gets the sizes that its tensors are made of, and its code is found in the cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def use(compiled: Any, model: nn.Module) -> list[Tensor]:
        results = []
        for turn in range(8):
            out = compiled(inputs(turn, rows=3 + turn % 4))
            grads = torch.autograd.grad(out, [*model.parameters()], torch.ones_like(out))
            results += [out.detach(), *grads]
        return results

    for _ in range(2):
        torch._dynamo.reset()
        same_as_inductor(Twice, use)
    captured = {row["function"].partition(") ")[2] for row in rows() if row.get("replays")}
    expected = {f"{kind}, part {part}" for kind in ("backward", "forward") for part in (0, 2)}
    assert_equal(captured, expected, "parts from graphs")


def test_results_that_share_memory() -> None:
    """They do so in every call, as those of Inductor."""
    for needs_grad in (False, True):
        torch._dynamo.reset()

        def pair(x: Tensor) -> tuple[Tensor, Tensor]:
            y = x @ x
            return y, y[1:]

        compiled = torch.compile(pair, backend=graph.backend, options=STRICT)
        for turn in range(4):
            x = inputs(turn, rows=WIDTH).requires_grad_(needs_grad)
            base, tail = compiled(x)
            with torch.no_grad():
                base.zero_()
            assert_bits_equal(tail.detach(), torch.zeros(WIDTH - 1, WIDTH), f"turn {turn}")


def test_parts_that_share_memory() -> None:
    """A view is handed to the next part as a view, also if it comes before what it is a view of."""

    def written(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        flat = y.view(-1)
        more = tripled(flat)
        y.add_(more.view(x.shape))
        return y * 1, flat * 1

    for needs_grad in (False, True):
        replayed = graph.backend.apply(torch.fx.symbolic_trace(written), [inputs(0)])
        for turn in range(4):
            expected, actual = (inputs(turn).requires_grad_(needs_grad) for _ in range(2))
            results, wanted = replayed(actual), written(expected)
            for number, (one, other) in enumerate(zip(results, wanted, strict=True)):
                assert_bits_equal(one.detach(), other.detach(), f"result {number}, turn {turn}")
            if needs_grad:
                for one, other in (results, wanted):
                    (one.sum() + other.square().sum()).backward()
                assert_bits_equal(actual.grad, expected.grad, f"gradient of turn {turn}")


def _column(x: Tensor) -> Tensor:
    return (x @ x.T)[:, :1].expand(x.shape)


def _rows(x: Tensor) -> Tensor:
    y: Tensor = row_sum(x) @ x.detach().T
    return y


@pytest.mark.parametrize(("fn", "needs_grad"), [(_column, False), (_rows, True)])
def test_repeated_elements(fn: Callable[[Tensor], Tensor], needs_grad: bool) -> None:
    """Compiled code may return expanded tensors, and expanded gradients."""
    results: list[list[Tensor]] = []
    for backend, options in (("aot_eager", None), (graph.backend, STRICT)):
        torch._dynamo.reset()
        compiled, values = torch.compile(fn, backend=backend, options=options), list[Tensor]()
        results.append(values)
        for turn in range(4):
            x = inputs(turn).requires_grad_(needs_grad)
            out = compiled(x)
            values += [out.detach(), *torch.autograd.grad(out.sum(), [x])] if needs_grad else [out]
    for number, (expected, actual) in enumerate(zip(*results, strict=True)):
        assert_bits_equal(actual, expected, f"value {number}")
        if not needs_grad:
            assert_equal(actual.stride(), expected.stride(), f"strides of value {number}")


def test_wrappers() -> None:
    """Forward and backward work on what wrappers hold, and are captured one by one."""
    results = []
    for backend in ("aot_eager", graph.backend):
        torch._dynamo.reset()
        weight = nn.Parameter(TwoTensor(torch.eye(WIDTH) * 2, torch.ones(WIDTH, WIDTH)))
        compiled = torch.compile(lambda x, weight=weight: x @ weight, backend=backend)
        tensors = []
        for turn in range(5):
            out = compiled(inputs(turn))
            out.sum().backward()
            grad: Any = weight.grad
            tensors += [out.a, out.b, grad.a, grad.b]
            weight.grad = None
        results.append([x.detach().clone() for x in tensors])
    for i, (actual, expected) in enumerate(zip(results[1], results[0], strict=True)):
        assert_bits_equal(actual, expected, f"result {i}")
    captured = [row for row in rows() if row["eager"] is None]
    assert_equal([row["replays"] for row in captured], [4, 4], "replays of forward and backward")
    assert_equal(
        [row["eager"] for row in rows() if row["eager"]],
        ["wrappers (DTensor) are unpacked between graphs"],
        "reason",
    )
    copied = max(row["bytes_copied"] for row in captured)
    assert_equal(copied <= 3 * inputs(0).nbytes, True, f"{copied} bytes copied: no parameter")


def test_shapes_that_depend_on_values() -> None:
    class Sparse(Block):
        def forward(self, x: Tensor) -> Tensor:
            x = x @ self.first
            places = x.nonzero() @ torch.ones(2, 1, dtype=torch.int64)
            y: Tensor = places.sum() + (x @ self.second)
            return y

    def use(compiled: Any, model: nn.Module) -> list[Tensor]:
        outputs = []
        for turn in range(5):
            x = inputs(turn) * (torch.arange(ROWS) < turn)[:, None]
            outputs.append(compiled(x).detach())
        return outputs

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        results = []
        for backend in ("aot_eager", graph.backend):
            torch.manual_seed(0)
            results.append(
                use(torch.compile(Sparse(), backend=backend, fullgraph=True), nn.Module())
            )
    for actual, expected in zip(results[1], results[0], strict=True):
        assert_bits_equal(actual, expected, "result")
    assert any("depends on values" in (row["eager"] or "") for row in rows())
    assert any(row["eager"] is None and row["replays"] for row in rows())


def test_random_numbers() -> None:
    """Replays draw on from where the generator is, as eager code does."""

    class Noisy(Block):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = (x @ self.first) @ torch.rand(WIDTH, WIDTH)
            return y

    model, results = Noisy(), []
    for call in (
        model,
        torch.compile(model, backend=graph.backend, options=STRICT | {"fallback_random": True}),
    ):
        torch.manual_seed(3)
        results.append([call(inputs(turn)).detach() for turn in range(5)] + [torch.rand(1)])
    for i, (actual, expected) in enumerate(zip(results[1], results[0], strict=True)):
        assert_bits_equal(actual, expected, f"result {i}")
    assert_equal([row["replays"] for row in rows()], [4], "replays")


def test_buffers_that_are_written() -> None:
    """They count each call once, and are never copied."""

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros(WIDTH, WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = added_to(self.total, x) @ self.first
            return y

    def use(compiled: Any, model: Any) -> list[Tensor]:
        with torch.no_grad():
            return [y for turn in range(5) for y in (compiled(inputs(turn)), model.total.clone())]

    same_as_inductor(Counting, use)
    (row,) = rows()
    assert_equal((row["replays"], row["bytes_copied"]), (4, inputs(0).nbytes), "replays, bytes")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"mode": "reduce-overhead"}, "mode='reduce-overhead': it turns on Inductor's own CUDA"),
        ({"mode": "quick"}, "mode='quick': it is not a mode of torch.compile"),
        ({"options": {"triton.cudagraphs": True}}, "Inductor would make graphs inside of these"),
        ({"options": {"key": len}}, "options has no 'key': expected agree, max_graphs"),
        ({"options": {"outputs": "keep"}}, "outputs='keep': expected 'borrow' or 'copy'"),
        ({"options": {"verify": "often"}}, "verify='often': expected 'auto'"),
    ],
)
def test_bad_settings(given: dict[str, Any], said: str) -> None:
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as failed:
        torch.compile(lambda x: x + 1, backend=graph.backend, **given)(torch.ones(2))
    assert said in str(failed.value)
    assert isinstance(failed.value.inner_exception, graph.GraphError)
