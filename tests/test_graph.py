"""graph.capture: the same results as eager code, and nothing silently wrong.

Every function runs in ranks on the CPU and on GPUs. The engine of the CPU re-runs the recorded
operators into the recorded memory. On GPUs the same calls are CUDA graphs.
"""

import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import commlib
from commlib import graph, ops
from commlib.graph import GraphError
from commlib.graph.options import First
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises
from tests.support.hidden import HiddenCount
from tests.support.launchers import on_gpus
from tests.support.processes import WHOLE_EXIT, run
from tests.support.runs_on import runs_on


@runs_on("unified_ranks")
def test_arguments(comm: Any) -> None:
    """Any tree of arguments and results; shapes and plain values make kinds of calls."""

    @graph.capture(outputs="copy")
    def f(x: torch.Tensor, more: Any = None, *, scale: float = 1.0) -> Any:
        y = x * scale
        return {"y": y, "n": (y.sum(), "label", 3), "more": [t + 1 for t in more or []]}

    for turn in range(3):
        for shape in ((3,), (2, 2)):
            for scale in (1.0, 0.5):
                x = torch.full(shape, turn + 1.0, device=comm.device)
                result = f(x, more=[x, x * 2], scale=scale)
                assert_bits_equal(result["y"], x * scale)
                assert_bits_equal(result["more"][1], x * 2 + 1)
                assert_equal(
                    (result["n"][0].item(), *result["n"][1:]),
                    (float((x * scale).sum()), "label", 3),
                )
    assert_equal(len(f.entries), 4, "kinds of calls")
    with torch.inference_mode():
        assert_bits_equal(f(torch.ones(3, device=comm.device))["y"], torch.ones(3))
    assert_equal(len(f.entries), 5, "with inference mode")


@pytest.mark.parametrize("first", ["once", "warmup"])
@runs_on("unified_ranks")
def test_the_first_call_counts_once(comm: Any, first: First) -> None:
    """What accumulates has counted once after the first call, and once a call from then on."""
    low = [torch.full((4,), float(i), device=comm.device) for i in range(3)]
    high = [torch.zeros(4, device=comm.device) for _ in low]

    def accumulate() -> None:
        for h, lo in zip(high, low, strict=True):
            h.add_(lo)
            lo.add_(1)

    step = graph.capture(accumulate, first=first)
    for turn in range(1, 5):
        step()
        for i, (h, lo) in enumerate(zip(high, low, strict=True)):
            assert_equal(lo.tolist(), [float(i + turn)] * 4, f"turn {turn}")
            assert_equal(h.tolist(), [float(sum(range(i, i + turn)))] * 4, f"turn {turn}")


@runs_on("unified_ranks")
def test_functions_of_one_name(comm: Any) -> None:
    """Two functions of one name, and two instances of one module, are captured apart."""

    def made(value: float) -> Any:
        state = torch.zeros(2, device=comm.device)

        @graph.capture(outputs="copy")
        def update() -> torch.Tensor:
            return state.add_(value)

        return update

    one, other = made(1.0), made(10.0)
    for turn in range(1, 4):
        assert_equal((one().tolist(), other().tolist()), ([turn * 1.0] * 2, [turn * 10.0] * 2))


@runs_on("unified_ranks")
def test_addresses(comm: Any) -> None:
    """Tensors at new addresses count with their values; unchanged ones are not copied."""
    f = graph.capture(lambda x, y: x * 2 + y, outputs="copy")
    x, y = torch.ones(5, device=comm.device), torch.ones(5, device=comm.device)
    for turn in range(3):
        x.fill_(turn)
        assert_bits_equal(f(x, y), x * 2 + y)
    if on_gpu(comm):
        assert_equal(
            [row["bytes_copied"] for row in graph.report(f)], [0], "bytes of the last replay"
        )
    for turn in range(4):
        other = torch.full((5,), float(turn), device=comm.device)
        assert_bits_equal(f(other, y), other * 2 + y, f"elsewhere, turn {turn}")
        assert_bits_equal(other, torch.full((5,), float(turn)), "the caller's own")
        assert_bits_equal(x, torch.full((5,), 2.0), "the first caller's")
    if on_gpu(comm):
        assert_equal(
            [row["bytes_copied"] for row in graph.report(f)], [20], "bytes of the last replay"
        )
    assert_bits_equal(f(x, x), x * 2 + x, "one tensor twice")


@runs_on("unified_ranks")
def test_strides_of_copies(comm: Any) -> None:
    """A copy of an output has the strides that eager code gives, with gaps or repeated elements."""
    calls: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: (x * 2)[:, ::2],
        lambda x: (x + 1)[:1].expand(3, 4),
        lambda x: (x * 3).T,
    ]
    x = torch.arange(12.0, device=comm.device).view(3, 4)
    for eager in calls:
        captured = graph.capture(eager, outputs="copy")
        for _ in range(3):
            got, expected = captured(x), eager(x)
            assert_bits_equal(got, expected)
            assert_equal(got.stride(), expected.stride(), "strides")


@runs_on("unified_ranks")
def test_copies_with_gaps_are_written(comm: Any) -> None:
    """The program may write to a copy that has gaps, also where gradients flow through it."""
    weight = torch.arange(12.0, device=comm.device).view(3, 4).requires_grad_()

    def columns(x: torch.Tensor) -> torch.Tensor:
        return (x * weight)[:, ::2]

    captured = graph.capture(columns, outputs="copy")
    x = torch.ones(3, 4, device=comm.device)
    for _ in range(3):
        results = []
        for call in (captured, columns):
            out = call(x).mul_(3)
            results += [out, *torch.autograd.grad(out.sum(), weight)]
        assert_bits_equal(results[0], results[2])
        assert_bits_equal(results[1], results[3], "gradients")


@runs_on("unified_ranks")
def test_written_arguments(comm: Any) -> None:
    """An argument that is written to is the caller's, at any address."""
    f = graph.capture(lambda x: x.mul_(3))
    for turn in range(4):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        result = f(x)
        assert_equal(result is x, True, "returns its argument")
        assert_equal(x.tolist(), [3 * (turn + 1.0)] * 3)


SYNCS = {
    "item": lambda x: x.sum().item(),
    "branch": lambda x: x if x.sum() > 0 else -x,
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
}


@pytest.mark.parametrize("what", SYNCS)
@runs_on("unified_ranks")
def test_host_syncs(comm: Any, what: str) -> None:
    """What waits for a value is refused with its name and line, and the process stays whole."""
    x = torch.ones(4, device=comm.device)
    f = graph.capture(SYNCS[what])
    with raises(GraphError, "can't be captured", "test_graph.py"):
        f(x)
    whole(comm)
    rows = graph.report(f)
    assert_equal(rows, [], "nothing was captured")
    fall = graph.capture(SYNCS[what], on_fail="eager")
    fall(x)
    fall(x)
    assert_equal("can't be captured" in graph.report(fall)[0]["eager"], True, "why it stays eager")


def whole(comm: Any) -> None:
    """Memory, random numbers, streams and captures work as in a fresh process."""
    if on_gpu(comm):
        assert_equal(torch.cuda.current_stream(), torch.cuda.default_stream(), "the current stream")
        torch.cuda.empty_cache()
    torch.nn.functional.dropout(torch.ones(8, device=comm.device))
    f = graph.capture(lambda x: torch.nn.functional.dropout(x) + 1, outputs="copy")
    x = torch.ones(64, device=comm.device)
    torch.manual_seed(3)
    drawn = [f(x).tolist() for _ in range(4)]
    torch.manual_seed(3)
    wanted = [(torch.nn.functional.dropout(x) + 1).tolist() for _ in range(4)]
    assert_equal(drawn, wanted, "random numbers")
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    (weight * 2).sum().backward()
    assert_bits_equal(weight.grad, torch.full((3,), 2.0))


@runs_on("unified_ranks")
def test_a_capture_that_breaks(comm: Any) -> None:
    """An exception in the capture itself, where warm-up went well, leaves no state."""
    runs, over = HiddenCount(), list[int]()

    def f(x: torch.Tensor) -> torch.Tensor:
        run = next(runs)
        y = x * 2
        if run == 3 and not over:  # after the call and one run
            if on_gpu(comm):
                torch.cuda.synchronize()  # what the driver itself refuses, and ends the capture for
            raise ValueError("the capture's run")
        return y

    g = graph.capture(f)
    with raises(GraphError, "capturing failed"):
        g(torch.ones(3, device=comm.device))
    over.append(1)
    whole(comm)
    assert_bits_equal(
        g(torch.ones(3, device=comm.device)), torch.full((3,), 2.0), "captured at last"
    )


@runs_on("unified_ranks")
def test_random_numbers(comm: Any) -> None:
    """Replays draw new numbers: those of eager code with the same seed, the first call included."""
    generator = torch.Generator(device=comm.device)

    def draw(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x).bernoulli_(0.5, generator=generator)
        return torch.nn.functional.dropout(x) + mask + torch.rand_like(x)

    x = torch.ones(50, device=comm.device)
    results = []
    for call in (draw, graph.capture(draw, outputs="copy")):
        torch.manual_seed(7)
        generator.manual_seed(9)
        results.append([call(x).tolist() for _ in range(5)])
    assert_equal(results[1], results[0], "drawn")
    assert_equal(len({tuple(row) for row in results[1]}), 5, "different draws")


@runs_on("unified_ranks")
def test_pieces(comm: Any) -> None:
    """An eager part runs between two graphs: it reads values, and branches each time."""
    seen = []

    @graph.eager
    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(x.sum().item())
        return x + (10 if seen[-1] > 0 else -10)

    @graph.capture(outputs="copy")
    def f(x: torch.Tensor) -> torch.Tensor:
        return look(x * 2) * 3

    for turn, sign in enumerate((1.0, -1.0, 1.0, -1.0)):
        x = torch.full((2,), sign * (turn + 1), device=comm.device)
        assert_bits_equal(f(x), (x * 2 + 10 * sign) * 3, f"turn {turn}")
    assert_equal(graph.report(f)[0]["segments"], 2, "graphs")
    assert_equal(seen[-1], -16.0, "what it has seen")
    assert_bits_equal(
        look(torch.ones(2, device=comm.device)), torch.full((2,), 11.0), "outside a capture"
    )


@runs_on("unified_ranks")
def test_report(comm: Any, tmp_path: Path) -> None:
    """The table and the page name every call, its collectives, and why one stayed eager."""
    one = graph.capture(lambda x: ops.all_reduce(x), outputs="copy")
    two = graph.capture(lambda x: x.sum().item(), on_fail="eager")
    x = torch.ones(3, device=comm.device)
    for call in (one, one, one, two):
        call(x)
    (row,) = graph.report(one)
    assert_equal(row["replays"], 2, "replays")
    assert_equal(row["eager_us"] > 0 and row["launch_us"] > 0, True, f"times {row}")
    with_gradients = graph.capture(lambda x: (x * x).sum())  # which have their own memory
    with_gradients(x.detach().requires_grad_())
    assert_equal(graph.report(with_gradients)[0]["pool_bytes"] > 0, True, "bytes")
    file = tmp_path / f"graphs-{comm.rank}.html"
    text = str(graph.report(html=file))
    for word in ("function", "nodes", "item can't be captured"):
        assert_equal(word in text, True, f"{word} in the table")
    page = file.read_text()
    for word in ("<table>", "all_reduce of 3 x float32", "item can&#x27;t be captured"):
        assert_equal(word in page, True, f"{word} in the page")


@runs_on("unified_ranks")
def test_a_recapture_that_breaks(comm: Any) -> None:
    """A graph that could not be captured again is dropped: the next call captures again."""
    broken = threading.Event()  # a list would be part of the key

    def f(x: torch.Tensor) -> torch.Tensor:
        if broken.is_set():
            raise ValueError("broken")
        return x + 1

    x = torch.ones(3, device=comm.device)
    kwargs: dict[str, Any] = {"outputs": "copy", "verify": False}
    once, careful = (graph.capture(f, on_fail=on_fail, **kwargs) for on_fail in ("raise", "eager"))
    for g in (once, careful):
        assert_bits_equal(g(x), x + 1)
    moved = torch.zeros(3, device=comm.device)
    if on_gpu(comm):  # on a CPU arguments are copied from the first call on
        broken.set()
        with raises(GraphError, "broken"):
            once(moved)
        with raises(ValueError, "broken"):
            careful(moved)
        broken.clear()
    for g in (once, careful):
        assert_bits_equal(g(moved), moved + 1, "again")
        assert_bits_equal(g(x), x + 1, "and again")


@runs_on("unified_ranks")
def test_another_thread(comm: Any) -> None:
    """What another thread exchanges while a graph is captured is not part of the graph."""
    ring = commlib.new_ring(71, range(comm.size))
    assert ring is not None
    x, y = torch.ones(3, device=comm.device), torch.ones(3, device=comm.device)
    ring.all_reduce(y, y)
    seen: list[float] = []
    note = seen.append  # a list that the function can reach would be put back

    def other() -> None:
        one, every = torch.ones(3, device=comm.device), torch.zeros(3 * comm.size)
        note(float(ring.all_gather(every.to(comm.device), one).sum()))

    def on_a_side_stream() -> None:
        with torch.cuda.stream(torch.cuda.Stream(comm.device)):
            other()

    def f() -> torch.Tensor:
        result: torch.Tensor = ops.all_reduce(x)
        thread = threading.Thread(target=on_a_side_stream if on_gpu(comm) else other)
        thread.start()
        thread.join()
        return result

    g = graph.capture(f, outputs="copy", verify=False)
    for _ in range(2):
        assert_bits_equal(g(), x * comm.size)
    (row,) = graph.report(g)
    assert_equal(row["collectives"], ["all_reduce of 3 x float32, op sum on ring 0"], "collectives")
    assert_equal(seen, [3.0 * comm.size] * 3, "the other's, in two runs and the capture")
    commlib.CommContextManager.instance().close(71)


@runs_on("unified_ranks")
def test_nested_and_modules(comm: Any) -> None:
    """A captured function inside another one is part of its graph; a module is captured too."""
    inner = graph.capture(lambda x: x + 1)
    outer = graph.capture(lambda x: inner(x) * 2, outputs="copy")
    x = torch.ones(2, device=comm.device)
    for turn in range(3):
        assert_bits_equal(outer(x + turn), (x + turn + 1) * 2)
    assert_equal(len(inner.entries), 0, "graphs of the inner one")
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)).to(comm.device)
    g = graph.capture(module, outputs="copy")
    with torch.no_grad():
        for training in (False, True, False):
            module.train(training)
            batch = torch.ones(4, 3, device=comm.device)
            torch.manual_seed(1)
            result = g(batch)
            torch.manual_seed(1)
            assert_bits_equal(result, module(batch), f"training {training}")
    assert_equal(len(g.entries), 2, "training and not")


@runs_on("unified_ranks")
def test_unsteady_functions(comm: Any) -> None:
    """A function that does something else at each run is refused, naming the first difference."""
    runs = HiddenCount()

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if next(runs) % 2 else x * 2

    x = torch.full((2,), 3.0, device=comm.device)
    many: dict[str, Any] = {"warmup": 3}
    for options in (many, {}):
        with raises(GraphError, "differ", "number 0", "aten.add.Tensor", "aten.mul.Tensor"):
            graph.capture(f, **options)(x)


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["nothing", "ring", "manager"])
def test_the_end_of_a_process(before: str) -> None:
    """Graphs go before their communicators, whichever ends first: no hang, no output."""
    code, out, err = run(
        *on_gpus("-m", "tests.programs.graph_exit", before),
        FLAGS_dynamic_static_unified_comm="1",
        **WHOLE_EXIT,
    )
    assert code == 0, err
    assert out == "used\n"
    assert "Error" not in err


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"first": "twice"}, "once"),
        ({"outputs": "clone"}, "copy"),
        ({"on_fail": "ignore"}, "eager"),
        ({"warmup": 0}, "1 or more"),
    ],
)
def test_wrong_options(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(GraphError, match=words):
        functools.partial(graph.capture, **wrong)(lambda: None)
