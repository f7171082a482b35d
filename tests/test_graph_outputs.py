"""graph.capture: who owns the memory of outputs, and how long it holds values."""

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.calls.output_guard import guards_memory
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises
from tests.support.runs_on import runs_on


@runs_on("unified_ranks")
def test_borrowed_outputs(comm: Any) -> None:
    """Reading an output after the next replay raises, with both lines."""
    f = graph.capture(lambda x: x + 1)
    x = torch.zeros(3, device=comm.device)
    called = f(x)  # the function itself, and no graph
    first = f(x)
    assert_bits_equal(first, torch.ones(3))
    second = f(first)  # its own output: read before it is overwritten
    assert_bits_equal(second, torch.full((3,), 2.0))
    with raises(RuntimeError, "overwritten", "test_graph_outputs.py", "clone"):
        print(first + 1)
    assert_bits_equal(called, torch.ones(3), "of the first call")
    copied = f(x).clone()
    f(x)
    assert_bits_equal(copied, torch.ones(3))


@runs_on("unified_ranks")
def test_outputs_are_borrowed_again(comm: Any) -> None:
    """The holder of an output, a view of it or its storage loses it at the next replay."""
    f = graph.capture(lambda x: (x + 1, x * 2))
    holders: list[Callable[[torch.Tensor], Any]] = [
        lambda out: out,
        lambda out: out[1:],
        lambda out: out.view(1, 3).T[:2],
        lambda out: out.detach(),
    ]
    if on_gpu(comm):  # nothing can make a bare storage raise on a CPU
        holders.append(torch.Tensor.untyped_storage)
    f(torch.zeros(3, device=comm.device))
    for turn, held in enumerate(holders * 2):
        x = torch.full((3,), float(turn), device=comm.device)
        up, twice = f(x)
        holder, gone = held(up), held(twice)
        del up, twice, gone
        up, twice = f(x + 1)
        assert_bits_equal(up, x + 2, f"turn {turn}")
        assert_bits_equal(twice, x * 2 + 2, f"turn {turn}")
        with raises(RuntimeError, "overwritten", "test_graph_outputs.py"):
            if not isinstance(holder, torch.Tensor):
                holder = torch.empty(0, device=comm.device).set_(holder)
            print(holder + 1)
        del holder


@runs_on("unified_ranks")
def test_outputs_are_tensors(comm: Any) -> None:
    """An output does what any tensor does, also where torch can't guard its memory."""
    weight = torch.ones(4, device=comm.device, requires_grad=True)
    for call in (lambda x: x * 2 + 1, lambda x: x * weight * 2 + 1):
        f = graph.capture(call)
        x = torch.arange(4.0, device=comm.device)
        want = x * 2 + 1
        for turn in range(2):
            out = f(x)
            assert_equal((type(out.shape), out.shape.numel(), out[1:].shape[0]), (torch.Size, 4, 3))
            assert_equal(f"{out[1]:.1f} {out.detach().sum():.1f}", "3.0 16.0", "as text")
            part = out.detach()[1:]
            assert_bits_equal(copy.deepcopy(part), want[1:], "a copy")
            file = io.BytesIO()
            torch.save(part, file)
            file.seek(0)
            assert_bits_equal(torch.load(file, weights_only=True), want[1:], "from a file")
            # a graph break where each operator checks the output
            tripled = torch.compile(lambda y: y * 3, backend="eager", fullgraph=guards_memory)
            assert_bits_equal(tripled(part), part * 3)
            assert_bits_equal(torch.stack(part.unbind()), want[1:], "taken apart")
            out.add_(1)
            out[1:].mul_(2)
            expected = torch.cat([want[:1] + 1, (want[1:] + 1) * 2])
            assert_bits_equal(out, expected, f"written to, turn {turn}")


@runs_on("unified_ranks")
def test_outputs_as_text(comm: Any) -> None:
    """An output reads as a tensor, alone and in a list, with a gradient and without."""
    weight = torch.ones(2, device=comm.device, requires_grad=True)
    f = graph.capture(lambda x: (x * 2, x * weight))
    x = torch.ones(2, device=comm.device)
    for _ in range(3):
        plain, wanting = f(x)
    assert_equal(repr(plain), repr(x * 2), "plain")
    assert_equal(str([plain]), str([x * 2]), "in a list")
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            text = repr(wanting)
        assert text.startswith("tensor([1., 1.]") and "grad_fn=" in text, text
    lent = graph.capture(lambda x: x * 2)
    outputs = [lent(x) for _ in range(3)]
    with raises(RuntimeError, "overwritten"):
        repr(outputs[1])


@pytest.mark.parametrize("verify", [False, True])
@runs_on("cpu_ranks")
def test_outputs_that_are_held_and_never_read(comm: Any, verify: bool) -> None:
    """Other captured functions work while the program holds overwritten outputs."""
    first = graph.capture(lambda x: x * 2)
    weight, held = torch.ones(2, requires_grad=True), list[torch.Tensor]()

    def counting(x: torch.Tensor) -> torch.Tensor:
        return x * weight * len(held[:1])

    def accumulating(x: torch.Tensor) -> torch.Tensor:
        return x.add_(10)

    module = torch.nn.Linear(2, 2)
    module.kept = held  # type: ignore[assignment]
    for fn in (counting, accumulating, module):
        captured, held[:] = graph.capture(fn, outputs="copy", verify=verify), ()
        for turn in range(6):
            x = torch.full((2,), float(turn))
            held.append(first(x))
            ours, theirs = held[-1], x * 2
            for _ in range(2):
                assert_bits_equal(captured(ours), fn(theirs), f"turn {turn}")
        assert_equal([x.shape for x in held[1:-1]], [theirs.shape] * 4, "a shape can be asked for")


@runs_on("cpu_ranks")
def test_attributes_of_overwritten_outputs(comm: Any) -> None:
    """An overwritten output has the attributes of a tensor; reading a view of it raises."""
    f, x = graph.capture(lambda x: x * 2), torch.ones(2, 3)
    out = [f(x) for _ in range(3)][1]
    assert_equal((out.shape, out.stride(), out.numel()), (x.shape, x.stride(), 6), "place")
    assert_equal((out.requires_grad, out.is_leaf, out.is_inference()), (False, True, False))
    reads: list[Callable[[], Any]] = [
        lambda: out + 1,
        lambda: out.T + 1,
        lambda: out.mT.sum(),
        lambda: out.data.clone(),
        lambda: out.real.tolist(),
        lambda: out[0] + 1,
        lambda: out.data_ptr(),
        lambda: f(out),
    ]
    for read in reads:
        with raises(RuntimeError, "overwritten", "test_graph_outputs.py"):
            read()


class Named(torch.Tensor):
    """A class of a program, with its own memory."""


@pytest.mark.parametrize("outputs", ["borrow", "copy"])
@runs_on("unified_ranks")
def test_outputs_of_other_classes(comm: Any, outputs: Any) -> None:
    """They keep their class in each call, and are copies: a guarded tensor has another class."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    functions: tuple[Callable[[torch.Tensor], tuple[torch.Tensor, ...]], ...] = (
        lambda x: (x * 2, x.as_subclass(torch.Tensor) * 3),
        lambda x: ((x * weight).exp(), x + 1),
        lambda x: ((x * 2).view(3, 1).expand(3, 2), x[1:]),
    )
    for fn in functions:
        for verify in (False, True):
            captured = graph.capture(fn, outputs=outputs, verify=verify)
            first: list[torch.Tensor] = []
            for turn in range(5):
                x = torch.full((3,), turn / 4, device=comm.device).as_subclass(Named)
                actual, want = captured(x), fn(x)
                for got, exact in zip(actual, want, strict=True):
                    named = isinstance(got, Named), isinstance(exact, Named)
                    assert_equal(*named, f"class in call {turn}")
                    assert_bits_equal(got, exact, f"call {turn}")
                if actual[0].requires_grad:
                    grads = [torch.autograd.grad(x[0].sum(), weight)[0] for x in (actual, want)]
                    assert_bits_equal(*grads, f"gradient of call {turn}")
                first.append(actual[0])
            for turn, output in enumerate(first):  # none was overwritten
                x = torch.full((3,), turn / 4, device=comm.device).as_subclass(Named)
                assert_bits_equal(output, fn(x)[0], f"kept from call {turn}")


@runs_on("unified_ranks")
def test_a_storage_is_borrowed_again(comm: Any) -> None:
    """An output that nobody holds any more leaves its storage to the next one."""
    f = graph.capture(lambda x: x + 1)
    x = torch.ones(3, device=comm.device)
    for _ in range(2):
        f(x)
    (entry,) = f.entries.values()
    (loan,) = entry.parts[0].outputs._guards.by_position.values()
    for held in (False, False, True):
        out = f(x)
        (now,) = entry.parts[0].outputs._guards.by_position.values()
        assert_equal(now is loan, True, "the same loan")
        holder = out if held else None
        del out
    f(x)
    last = [*entry.parts[0].outputs._guards.by_position.values()]
    assert_equal(last == [loan], False, "after one that is held")
    del holder


@runs_on("cpu_ranks")
def test_outputs_in_shared_memory(comm: Any) -> None:
    """An output that was moved to its own memory is the program's, and no later one."""
    f = graph.capture(lambda x: x + 1)
    for turn in range(4):
        x = torch.full((3,), float(turn))
        out = f(x)
        assert_bits_equal(out, x + 1, f"turn {turn}")
        if turn % 2:
            out.share_memory_()
        del out


@runs_on("unified_ranks")
def test_shared_memory(comm: Any) -> None:
    """Graphs share memory for what they only need while they run, in any order, on any stream."""
    total = torch.zeros((), device=comm.device)
    x = torch.ones(1000, device=comm.device)

    @graph.capture
    def early() -> None:
        parts = [x * i for i in range(6)]
        total.add_(torch.stack(parts).sum())

    early()
    late = graph.capture(lambda y: y * 2 + 1)
    result = late(x)
    for _ in range(3):
        early()
    assert_bits_equal(
        result, torch.full((1000,), 3.0), "an output after the replay of another graph"
    )
    if on_gpu(comm):
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        for turn in range(20):
            with torch.cuda.stream(one if turn % 2 else other):
                early()
        torch.cuda.synchronize()
        assert_bits_equal(total, torch.full((), 24 * 15000.0), "replays on two streams")


@runs_on("unified_ranks")
def test_externals_stay_alive(comm: Any) -> None:
    """Tensors of closures live as long as the graph that reads them."""

    def made() -> Any:
        secret = torch.arange(4.0, device=comm.device)
        return graph.capture(lambda: secret * 2, outputs="copy"), weakref.ref(secret)

    f, alive = made()
    f()
    f.fn = None
    del f.__wrapped__
    gc.collect()
    assert_equal(alive() is not None, True, "held by the graph")
    junk = [torch.full((4,), 7.0, device=comm.device) for _ in range(20)]
    (entry,) = f.entries.values()
    entry.segments.replay()
    assert_bits_equal(f(), torch.arange(4.0) * 2)
    f.reset()
    del entry, junk
    gc.collect()
    assert_equal(alive(), None, "freed with it")


@runs_on("unified_ranks")
def test_outputs_that_repeat_elements(comm: Any) -> None:
    """An expanded output is expanded at each replay too: it takes the memory of its elements."""
    weight = torch.arange(4.0, device=comm.device, requires_grad=True)
    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: (x * weight).sum().expand(4),
        lambda x: (x * weight)[:, None].expand(4, 3),
        lambda x: (x * weight).broadcast_to(3, 4).t(),
    )
    for fn in functions:
        for outputs in ("borrow", "copy"):
            captured = graph.capture(fn, verify=False, outputs=outputs)
            for turn in range(4):
                x = torch.full((4,), float(turn), device=comm.device)
                actual, want = captured(x), fn(x)
                assert_equal(actual.stride(), want.stride(), f"strides in call {turn}")
                assert_bits_equal(actual, want, f"call {turn}")
                (grad,) = torch.autograd.grad(actual.square().sum(), weight)
                (other,) = torch.autograd.grad(want.square().sum(), weight)
                assert_bits_equal(grad, other, f"gradient of call {turn}")


@torch.library.custom_op("graph_outputs_tests::first_column", mutates_args=())
def first_column(x: torch.Tensor) -> torch.Tensor:
    """Return the first column times two, repeated."""
    return (x[:, :1] * 2).expand(x.shape)


@torch.library.custom_op("graph_outputs_tests::add_one", mutates_args=("x",))
def add_one(x: torch.Tensor) -> None:
    """Add one to what the first column repeats."""
    x[:, :1].add_(1)


@torch.library.custom_op("graph_outputs_tests::repeated", mutates_args=())
def repeated(x: torch.Tensor) -> torch.Tensor:
    """Return the first column, with or without repeated elements."""
    return x[:, :1].clone().expand(x.shape) if x[0, 0] < 2 else x.clone()


first_column.register_fake(lambda x: x[:, :1].clone().expand(x.shape))
repeated.register_fake(lambda x: x[:, :1].clone().expand(x.shape))


@runs_on("unified_ranks")
def test_operators_with_repeated_elements(comm: Any) -> None:
    """An operator may return, or write to, a tensor with one element in several places."""

    def written(x: torch.Tensor) -> torch.Tensor:
        add_one(x)
        return x * 2

    functions: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
        lambda x: first_column(x) + 1,
        first_column,
        written,
    )
    for number, fn in enumerate(functions):
        captured = graph.capture(fn, outputs="copy", inputs="copy")
        for turn in range(4):
            x, same = (torch.full((4, 1), turn + 1.0, device=comm.device) for _ in range(2))
            actual, want = captured(x.expand(4, 3)), fn(same.expand(4, 3))
            assert_bits_equal(actual, want, f"function {number}, turn {turn}")
            assert_equal(actual.stride(), want.stride(), f"strides of {number}, turn {turn}")
            assert_bits_equal(x, same, f"the argument of function {number}, turn {turn}")


def test_an_operator_with_other_strides() -> None:
    """A replay can't put separate elements where the capture has one several times."""
    captured = graph.capture(lambda x: repeated(x) + 1, verify=False, outputs="copy")
    for turn in range(2):
        assert_bits_equal(captured(torch.ones(4, 3)), torch.full((4, 3), 2.0), f"turn {turn}")
    with raises(GraphError, "strides (3, 1) in a replay", "strides (1, 0)", "contiguous()"):
        captured(torch.full((4, 3), 2.0))


@runs_on("unified_ranks")
def test_one_element_with_any_stride(comm: Any) -> None:
    """A result of one element has the stride of what it was cut out of."""
    captured = graph.capture(lambda x: (x * 2)[:, 0])
    for turn in range(3):
        x = torch.full((1, 8), turn + 1.0, device=comm.device)
        assert_bits_equal(captured(x), torch.full((1,), 2 * turn + 2.0), f"turn {turn}")
