"""graph.capture: the same results as eager code, and nothing silently wrong.

Every function runs in ranks on the CPU, whose engine re-runs the recorded operators into the
recorded memory, and on GPUs, where the same calls are CUDA graphs.
"""

import copy
import functools
import gc
import io
import threading
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

import commlib
from commlib import graph, ops
from commlib.errors import CommError
from commlib.graph import GraphError
from tests.support.checks import close, refused, same, settle
from tests.support.processes import run
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on


def on_gpu(comm: Any) -> bool:
    return bool(comm.device.type == "cuda")


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
                given = f(x, more=[x, x * 2], scale=scale)
                close(given["y"], x * scale)
                close(given["more"][1], x * 2 + 1)
                same(
                    (given["n"][0].item(), *given["n"][1:]), (float((x * scale).sum()), "label", 3)
                )
    same(len(f.entries), 4, "kinds of calls")
    with torch.inference_mode():
        close(f(torch.ones(3, device=comm.device))["y"], torch.ones(3))
    same(len(f.entries), 5, "with inference mode")
    with refused(GraphError, "unhashable", "key="):
        f(torch.ones(3, device=comm.device), scale={"a"})


@pytest.mark.parametrize("first", ["once", "warmup"])
@runs_on("unified_ranks")
def test_the_first_call_counts_once(comm: Any, first: str) -> None:
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
            same(lo.tolist(), [float(i + turn)] * 4, f"turn {turn}")
            same(h.tolist(), [float(sum(range(i, i + turn)))] * 4, f"turn {turn}")


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
        same((one().tolist(), other().tolist()), ([turn * 1.0] * 2, [turn * 10.0] * 2))


@runs_on("unified_ranks")
def test_addresses(comm: Any) -> None:
    """Tensors at new addresses count with their values; unchanged ones are not copied."""
    f = graph.capture(lambda x, y: x * 2 + y, outputs="copy")
    x, y = torch.ones(5, device=comm.device), torch.ones(5, device=comm.device)
    for turn in range(3):
        x.fill_(turn)
        close(f(x, y), x * 2 + y)
    if on_gpu(comm):
        same([row["bytes_copied"] for row in graph.report(f)], [0], "bytes of the last replay")
    for turn in range(4):
        other = torch.full((5,), float(turn), device=comm.device)
        close(f(other, y), other * 2 + y, f"elsewhere, turn {turn}")
        close(other, torch.full((5,), float(turn)), "the caller's own")
        close(x, torch.full((5,), 2.0), "the first caller's")
    if on_gpu(comm):
        same([row["bytes_copied"] for row in graph.report(f)], [20], "bytes of the last replay")
    close(f(x, x), x * 2 + x, "one tensor twice")


@runs_on("unified_ranks")
def test_written_arguments(comm: Any) -> None:
    """An argument that is written to is the caller's, at any address."""
    f = graph.capture(lambda x: x.mul_(3))
    for turn in range(4):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        given = f(x)
        same(given is x, True, "returns its argument")
        same(x.tolist(), [3 * (turn + 1.0)] * 3)


@runs_on("unified_ranks")
def test_borrowed_outputs(comm: Any) -> None:
    """Reading an output after the next replay raises, with both lines."""
    f = graph.capture(lambda x: x + 1)
    x = torch.zeros(3, device=comm.device)
    called = f(x)  # the function itself, and no graph
    first = f(x)
    close(first, torch.ones(3))
    second = f(first)  # its own output: read before it is overwritten
    close(second, torch.full((3,), 2.0))
    with refused(RuntimeError, "overwritten", "test_graph.py", "clone"):
        print(first + 1)
    close(called, torch.ones(3), "of the first call")
    kept = f(x).clone()
    f(x)
    close(kept, torch.ones(3))


@runs_on("unified_ranks")
def test_outputs_are_lent_again(comm: Any) -> None:
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
        kept, gone = held(up), held(twice)
        del up, twice, gone
        up, twice = f(x + 1)
        close(up, x + 2, f"turn {turn}")
        close(twice, x * 2 + 2, f"turn {turn}")
        with refused(RuntimeError, "overwritten", "test_graph.py"):
            if not isinstance(kept, torch.Tensor):
                kept = torch.empty(0, device=comm.device).set_(kept)
            print(kept + 1)
        del kept


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
            same((type(out.shape), out.shape.numel(), out[1:].shape[0]), (torch.Size, 4, 3))
            same(f"{out[1]:.1f} {out.detach().sum():.1f}", "3.0 16.0", "as text")
            part = out.detach()[1:]
            close(copy.deepcopy(part), want[1:], "a copy")
            file = io.BytesIO()
            torch.save(part, file)
            file.seek(0)
            close(torch.load(file, weights_only=True), want[1:], "from a file")
            close(torch.compile(lambda y: y * 3, backend="eager", fullgraph=True)(part), part * 3)
            close(torch.stack(part.unbind()), want[1:], "taken apart")
            out.add_(1)
            out[1:].mul_(2)
            expected = torch.cat([want[:1] + 1, (want[1:] + 1) * 2])
            close(out, expected, f"written to, turn {turn}")


@runs_on("unified_ranks")
def test_a_storage_is_lent_again(comm: Any) -> None:
    """An output that nobody holds any more leaves its storage to the next one."""
    f = graph.capture(lambda x: x + 1)
    x = torch.ones(3, device=comm.device)
    for _ in range(2):
        f(x)
    (entry,) = f.entries.values()
    (loan,) = entry.parts[0].outputs._loans.values()
    for held in (False, False, True):
        out = f(x)
        (now,) = entry.parts[0].outputs._loans.values()
        same(now is loan, True, "the same loan")
        kept = out if held else None
        del out
    f(x)
    same([*entry.parts[0].outputs._loans.values()] == [loan], False, "after one that is held")
    del kept


@runs_on("cpu_ranks")
def test_outputs_in_shared_memory(comm: Any) -> None:
    """An output that was moved to its own memory is the program's, and no later one."""
    f = graph.capture(lambda x: x + 1)
    for turn in range(4):
        x = torch.full((3,), float(turn))
        out = f(x)
        close(out, x + 1, f"turn {turn}")
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
    given = late(x)
    for _ in range(3):
        early()
    close(given, torch.full((1000,), 3.0), "an output after the replay of another graph")
    if on_gpu(comm):
        one, other = torch.cuda.Stream(), torch.cuda.Stream()
        for turn in range(20):
            with torch.cuda.stream(one if turn % 2 else other):
                early()
        torch.cuda.synchronize()
        close(total, torch.full((), 24 * 15000.0), "replays on two streams")


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
    same(alive() is not None, True, "held by the graph")
    junk = [torch.full((4,), 7.0, device=comm.device) for _ in range(20)]
    (entry,) = f.entries.values()
    entry.segments.replay()
    close(f(), torch.arange(4.0) * 2)
    f.reset()
    del entry, junk
    gc.collect()
    same(alive(), None, "freed with it")


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
    with refused(GraphError, "can't stand in a graph", "test_graph.py"):
        f(x)
    whole(comm)
    rows = graph.report(f)
    same(rows, [], "nothing was captured")
    fall = graph.capture(SYNCS[what], on_fail="eager")
    fall(x)
    fall(x)
    same("can't stand" in graph.report(fall)[0]["eager"], True, "why it stays eager")


def whole(comm: Any) -> None:
    """Memory, random numbers, streams and captures work as in a fresh process."""
    if on_gpu(comm):
        same(torch.cuda.current_stream(), torch.cuda.default_stream(), "the current stream")
        torch.cuda.empty_cache()
    torch.nn.functional.dropout(torch.ones(8, device=comm.device))
    f = graph.capture(lambda x: torch.nn.functional.dropout(x) + 1, outputs="copy")
    x = torch.ones(64, device=comm.device)
    torch.manual_seed(3)
    drawn = [f(x).tolist() for _ in range(4)]
    torch.manual_seed(3)
    wanted = [(torch.nn.functional.dropout(x) + 1).tolist() for _ in range(4)]
    same(drawn, wanted, "random numbers")
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    (weight * 2).sum().backward()
    close(weight.grad, torch.full((3,), 2.0))


@runs_on("unified_ranks")
def test_a_capture_that_breaks(comm: Any) -> None:
    """An exception in the capture itself, where warm-up went well, leaves no state."""
    runs, over = count(1), list[int]()

    def f(x: torch.Tensor) -> torch.Tensor:
        run = next(runs)
        y = x * 2
        if run == 3 and not over:  # after the call and one run
            if on_gpu(comm):
                torch.cuda.synchronize()  # what the driver itself refuses, and ends the capture for
            raise ValueError("the capture's run")
        return y

    g = graph.capture(f)
    with refused(GraphError, "capturing failed"):
        g(torch.ones(3, device=comm.device))
    over.append(1)
    whole(comm)
    close(g(torch.ones(3, device=comm.device)), torch.full((3,), 2.0), "captured at last")


@runs_on("unified_ranks")
def test_random_numbers(comm: Any) -> None:
    """Replays draw new numbers: those of eager code with the same seed, the first call included."""
    own = torch.Generator(device=comm.device)

    def draw(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(x).bernoulli_(0.5, generator=own)
        return torch.nn.functional.dropout(x) + mask + torch.rand_like(x)

    x = torch.ones(50, device=comm.device)
    results = []
    for call in (draw, graph.capture(draw, outputs="copy")):
        torch.manual_seed(7)
        own.manual_seed(9)
        results.append([call(x).tolist() for _ in range(5)])
    same(results[1], results[0], "drawn")
    same(len({tuple(row) for row in results[1]}), 5, "different draws")


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
        close(f(x), (x * 2 + 10 * sign) * 3, f"turn {turn}")
    same(graph.report(f)[0]["segments"], 2, "graphs")
    same(seen[-1], -16.0, "what it has seen")
    close(look(torch.ones(2, device=comm.device)), torch.full((2,), 11.0), "outside a capture")


@runs_on("unified_ranks")
def test_collectives(comm: Any) -> None:
    """Every verb in a graph, on the calc and the comm stream, gives eager's bits."""

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        work = ops.all_gather(x, use_calc_stream=False, sync_op=False)
        y = ops.all_reduce(x * 2)
        z = ops.all_reduce(y, op="max", use_calc_stream=False)
        part = ops.reduce_scatter(torch.cat([y] * comm.size))
        swapped = ops.all_to_all(torch.cat([x] * comm.size))
        root = ops.broadcast(y * (comm.rank + 1), root=1)
        with comm.group():
            comm.send(x, peer=1 - comm.rank)
            other = comm.recv(torch.zeros_like(x), peer=1 - comm.rank)
        return [y, z, part, swapped, root, other, work.wait()]

    g = graph.capture(f, outputs="copy")
    for turn in range(4):
        x = torch.arange(6.0, device=comm.device) + turn + comm.rank
        for one, want in zip(g(x), f(x), strict=True):
            close(one, want, f"turn {turn}")
    (row,) = graph.report(g)
    same([text.split()[0] for text in row["collectives"]],
         ["all_gather", "all_reduce", "all_reduce", "reduce_scatter", "all_to_all", "broadcast",
          "send", "recv"])  # fmt: skip


@runs_on("unified_ranks")
def test_streams(comm: Any) -> None:
    """A collective on the comm stream that nobody waits for joins by itself."""
    x = torch.ones(4, device=comm.device)

    def forgotten(x: torch.Tensor) -> Any:
        ops.all_reduce(x, use_calc_stream=False, sync_op=False)  # nobody waits
        return x + 1

    f = graph.capture(forgotten, outputs="copy")
    for turn in range(3):
        close(f(x + turn), x + turn + 1)
    settle(comm)


@runs_on("gpu_ranks")
def test_other_streams(comm: Any) -> None:
    """Work on a stream outside the capture is refused with its line."""
    side, total = torch.cuda.Stream(), torch.zeros(4, device=comm.device)

    def elsewhere(joined: bool) -> None:
        here = torch.cuda.current_stream()
        if joined:
            side.wait_stream(here)
        with torch.cuda.stream(side):
            total.add_(1)
        if joined:
            here.wait_stream(side)

    g = graph.capture(elsewhere)
    with refused(GraphError, "add_", "not part of the capture", "test_graph.py", "wait_stream"):
        g(False)
    whole(comm)
    total.zero_()
    for turn in range(1, 4):
        g(True)
        same(total.tolist(), [float(turn)] * 4, "on a stream of the capture")


@runs_on("unified_ranks")
def test_different_collectives(comm: Any) -> None:
    """Ranks that capture different collectives are notified, each with its first one."""

    def f(x: torch.Tensor) -> Any:
        y = ops.all_reduce(x)
        return ops.all_reduce(y, op="max" if comm.rank else "sum")

    g = graph.capture(f)
    if on_gpu(comm):
        with refused(GraphError, "different collectives", "number 1", "rank 0", "rank 1"):
            g(torch.ones(3, device=comm.device))
        settle(comm)
    h = graph.capture(lambda x: ops.all_reduce(x), outputs="copy")
    for turn in range(3):
        x = torch.full((3,), float(turn), device=comm.device)
        close(h(x), x * comm.size, "the next capture")


@runs_on("unified_ranks")
def test_one_rank_fails(comm: Any) -> None:
    """An exception on one rank in the capture is an error on all of them; the next one works."""
    runs, over = count(1), list[int]()

    def f(x: torch.Tensor) -> Any:
        run = next(runs)
        y = ops.all_reduce(x)
        if comm.rank == 1 and run == 3 and not over:
            raise ValueError("rank 1 alone")
        return y * 2

    g = graph.capture(f, outputs="copy")
    x = torch.ones(3, device=comm.device)
    with refused(GraphError, "rank 1:", "ValueError: rank 1 alone"):
        g(x)
    over.append(1)
    whole(comm)
    for _ in range(3):
        close(g(x), torch.full((3,), 2.0 * comm.size), "captured at last")


@runs_on("unified_ranks")
def test_teardown(comm: Any) -> None:
    """A ring releases its graphs before its communicator; a call after that is refused."""
    ring = commlib.new_ring(90, range(comm.size))
    assert ring is not None
    g = graph.capture(lambda x: ring.all_reduce(torch.zeros_like(x), x))
    x = torch.ones(4, device=comm.device)
    g(x)
    held = g(x)
    close(held, torch.full((4,), float(comm.size)))
    commlib.CommContextManager.instance().close(90)
    same(len(g.entries), 0, "graphs left")
    with refused(RuntimeError, "release"):
        print(held + 1)
    with refused(CommError, "closed"):
        g(x)


@runs_on("unified_ranks")
def test_check(comm: Any) -> None:
    """check() names a parameter that was replaced, or whose memory was."""
    module = torch.nn.Linear(3, 3).to(comm.device)
    f = graph.capture(module, outputs="copy")
    x = torch.ones(2, 3, device=comm.device)
    with torch.no_grad():
        f(x)
        f.check()
        module.weight.copy_(torch.eye(3, device=comm.device))
        f.check()
        close(f(x), module(x), "written in place")
        module.weight.data = torch.zeros_like(module.weight)
        with refused(GraphError, "weight", "copy_", "reset()"):
            f.check()
        f.reset()
        close(f(x), module(x), "captured again")
        module.bias = torch.nn.Parameter(torch.ones_like(module.bias))
        with refused(GraphError, "bias"):
            f.check()


def reported(comm: Any, folder: str) -> None:
    """The table and the page name every call, its collectives, and why one stayed eager."""
    one = graph.capture(lambda x: ops.all_reduce(x), outputs="copy")
    two = graph.capture(lambda x: x.sum().item(), on_fail="eager")
    x = torch.ones(3, device=comm.device)
    for call in (one, one, one, two):
        call(x)
    (row,) = graph.report(one)
    same(row["replays"], 2, "replays")
    same(row["eager_us"] > 0 and row["launch_us"] > 0, True, f"times {row}")
    with_gradients = graph.capture(lambda x: (x * x).sum())  # which have their own memory
    with_gradients(x.detach().requires_grad_())
    same(graph.report(with_gradients)[0]["pool_bytes"] > 0, True, "bytes")
    file = Path(folder) / f"graphs-{comm.rank}.html"
    text = str(graph.report(html=file))
    for word in ("function", "nodes", "item can't stand in a graph"):
        same(word in text, True, f"{word} in the table")
    page = file.read_text()
    for word in ("<table>", "all_reduce of 3 x float32", "item can&#x27;t stand in a graph"):
        same(word in page, True, f"{word} in the page")


def test_report(unified_ranks: Ranks, tmp_path: Path) -> None:
    unified_ranks(reported, str(tmp_path))


class _Past(torch.autograd.Function):
    """A step that holds something as long as its output's history lives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        ctx.token = token
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 3, None


@runs_on("unified_ranks")
def test_what_came_before(comm: Any) -> None:
    """A gradient to anything but an argument is refused; what led to arguments is released."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    weight.grad = torch.zeros_like(weight)
    hidden = weight * 2
    g = graph.capture(lambda x: x * hidden, outputs="copy")
    x = torch.ones(3, device=comm.device, requires_grad=True)
    with refused(GraphError, "(3,) tensor", "is not given", "argument"):
        g(x)
    detached = graph.capture(lambda x: x * hidden.detach(), outputs="copy")
    for _ in range(2):
        close(detached(x), hidden.detach())
    double = graph.capture(lambda x: x * 2, outputs="copy")
    token = torch.zeros(1)
    past, kept = _Past.apply(weight, token), weakref.ref(token)  # type: ignore[no-untyped-call]
    for _ in range(2):
        double(past)
    del past, token
    gc.collect()
    same(kept() is None, True, "the history of an argument is gone")


@runs_on("unified_ranks")
def test_lazily_made_state(comm: Any) -> None:
    """What the first call makes, later ones go on from; what a later one makes is refused."""
    state: list[torch.Tensor] = []

    def momentum(x: torch.Tensor) -> torch.Tensor:
        if not state:
            state.append(x.clone())
        else:
            state[0].mul_(0.5).add_(x)
        return state[0] + 0

    x = torch.ones(3, device=comm.device)
    want = [torch.full((3,), value) for value in (1.0, 1.5, 1.75, 1.875)]
    how: tuple[Any, ...] = ({}, {"warmup": 1}, {"on_fail": "eager"}, {"warmup": 3})
    for options in (*how, {"first": "warmup", "warmup": 1}):
        state.clear()
        g = graph.capture(momentum, outputs="copy", **options)
        for value in want:
            close(g(x), value, f"{options}")
        same(len(g.entries), 1, f"graphs with {options}")
    calls = count(1)

    def late(x: torch.Tensor) -> torch.Tensor:
        return momentum(x) if next(calls) > 1 else x + 0

    state.clear()
    with refused(GraphError, "changes the length of a list", "(0, then 1)", "no replay would"):
        graph.capture(late)(x)
    same(state, [], "as before")
    calls = count(1)
    g = graph.capture(late, outputs="copy", on_fail="eager")
    for value in (want[0], *want):
        close(g(x), value, "eager")
    same(len(g.entries), 0, "graphs")


@runs_on("unified_ranks")
def test_agree(comm: Any) -> None:
    """With agree= keys are compared before anything runs; where one rank has none, all capture."""
    g = graph.capture(lambda x, n: x * n, agree=0, outputs="copy")
    x = torch.ones(2, device=comm.device)
    for turn in range(2):
        close(g(x, 3), x * 3, f"turn {turn}")
    if comm.rank == 0:
        g.reset()
    close(g(x, 3), x * 3, "captured on all ranks")
    same(graph.report(g)[0]["replays"], 0, "replays of the new graph")
    with refused(GraphError, "different keys", "rank 0", "rank 1"):
        g(x, comm.rank)
    close(g(x, 3), x * 3, "after the refusal")


@runs_on("unified_ranks")
def test_a_recapture_that_breaks(comm: Any) -> None:
    """A graph that could not be captured again is dropped: the next call captures again."""
    broken = threading.Event()  # a list would be part of the key

    def f(x: torch.Tensor) -> torch.Tensor:
        if broken.is_set():
            raise ValueError("broken")
        return x + 1

    x = torch.ones(3, device=comm.device)
    how: dict[str, Any] = {"outputs": "copy", "verify": False}
    once, careful = (graph.capture(f, on_fail=on_fail, **how) for on_fail in ("raise", "eager"))
    for g in (once, careful):
        close(g(x), x + 1)
    moved = torch.zeros(3, device=comm.device)
    if on_gpu(comm):  # on a CPU arguments are copied from the first call on
        broken.set()
        with refused(GraphError, "broken"):
            once(moved)
        with refused(ValueError, "broken"):
            careful(moved)
        broken.clear()
    for g in (once, careful):
        close(g(moved), moved + 1, "again")
        close(g(x), x + 1, "and again")


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
        close(g(), x * comm.size)
    (row,) = graph.report(g)
    same(row["collectives"], ["all_reduce of 3 x float32, op sum on ring 0"], "collectives")
    same(seen, [3.0 * comm.size] * 3, "the other's, in two runs and the capture")
    commlib.CommContextManager.instance().close(71)


def random_order(count: int, turn: int) -> list[int]:
    order = list(range(count))
    return order[turn % count :] + order[: turn % count]


@pytest.mark.parametrize("flights", [1, 3])
@runs_on("unified_ranks")
def test_gradients(comm: Any, flights: int) -> None:
    """Several outputs, unused and integer ones, and several forwards before their backwards."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.spare = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> Any:
            y = ops.all_reduce(torch.tanh(self.inner(x))) * scale
            return {"y": y, "n": (y > 0).sum(), "x": x * 3}

    def train(call: Any, module: Any) -> list[Any]:
        found = []
        for turn in range(3):
            inputs = [
                torch.linspace(turn, i + 1, 12, device=comm.device).view(3, 4).requires_grad_()
                for i in range(flights)
            ]
            outs = [call(x * 1, scale=0.5) for x in inputs]
            for i in random_order(flights, turn):
                (outs[i]["y"].sum() + (outs[i]["x"] ** 2).sum()).backward()
            found += [x.grad for x in inputs]
            found.append(module.inner.weight.grad.clone())
            found.append(outs[-1]["n"].clone())
            del outs  # and with it the nodes: their slots are free
            same(module.spare.weight.grad, None, "gradient of what is not used")
        return found

    torch.manual_seed(5)
    module = Layer().to(comm.device)
    plain = train(module, module)
    module.zero_grad(set_to_none=True)
    captured = graph.capture(module)
    captured(torch.ones(3, 4, device=comm.device, requires_grad=True) * 1, scale=0.5)
    for turn, (one, want) in enumerate(zip(train(captured, module), plain, strict=True)):
        close(one, want, f"tensor {turn}")
    (slots,) = captured.entries.values()
    same(len(slots.parts), flights, "slots")
    same({row["replays"] for row in graph.report(captured)}, {3}, "replays of each slot")


@runs_on("unified_ranks")
def test_gradients_that_are_used_up(comm: Any) -> None:
    """A function that uses gradients up, as step() and zero_grad() do, finds the next ones."""

    def train(captured: Callable[..., Any]) -> list[torch.Tensor]:
        weight = torch.ones(3, device=comm.device, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step() -> None:
            optimizer.step()
            optimizer.zero_grad()

        call, found = captured(step), []
        for turn in range(6):
            (weight * turn).sum().backward()
            call()
            same(weight.grad, None, f"turn {turn}")
            found.append(weight.detach().clone())
        return found

    pairs = zip(train(graph.capture), train(lambda f: f), strict=True)
    for turn, (one, want) in enumerate(pairs):
        close(one, want, f"turn {turn}")


@runs_on("unified_ranks")
def test_grad_is_none_at_first(comm: Any) -> None:
    """A backward inside the function may be the first that gives gradients."""

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> None:
            (self.weight * x).sum().backward()

    module = Step().to(comm.device)
    x = torch.ones(3, device=comm.device)
    f = graph.capture(module)
    for turn in range(1, 6):
        f(x)
        close(module.weight.grad, torch.full((3,), float(turn)), f"turn {turn}")
    same(len(f.entries), 1, "with gradients to add to")
    for turn in range(1, 9):
        if turn % 2:
            module.zero_grad(set_to_none=True)
        f(x * turn)
        close(module.weight.grad, x * (turn if turn % 2 else 2 * turn - 1), f"turn {turn}")
    same(len(f.entries), 2, "with gradients, and without")


@runs_on("unified_ranks")
def test_kept_gradients(comm: Any) -> None:
    """Gradients that the program keeps are not overwritten by the next backward."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    f = graph.capture(lambda x: weight * x)
    kept: list[Any] = []
    for turn in range(4):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        weight.grad = None
        f(x).sum().backward()
        kept.append(weight.grad)
    for turn, grad in enumerate(kept):
        close(grad, torch.full((3,), turn + 1.0), f"turn {turn}")
    weight.grad = None
    for _ in range(3):
        f(torch.ones(3, device=comm.device)).sum().backward()
    close(weight.grad, torch.full((3,), 3.0), "accumulated")


@runs_on("unified_ranks")
def test_nested_and_modules(comm: Any) -> None:
    """A captured function inside another one is part of its graph; a module is captured too."""
    inner = graph.capture(lambda x: x + 1)
    outer = graph.capture(lambda x: inner(x) * 2, outputs="copy")
    x = torch.ones(2, device=comm.device)
    for turn in range(3):
        close(outer(x + turn), (x + turn + 1) * 2)
    same(len(inner.entries), 0, "graphs of the inner one")
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.5)).to(comm.device)
    g = graph.capture(module, outputs="copy")
    with torch.no_grad():
        for training in (False, True, False):
            module.train(training)
            batch = torch.ones(4, 3, device=comm.device)
            torch.manual_seed(1)
            given = g(batch)
            torch.manual_seed(1)
            close(given, module(batch), f"training {training}")
    same(len(g.entries), 2, "training and not")


@runs_on("unified_ranks")
def test_unsteady_functions(comm: Any) -> None:
    """A function that does something else at each run is refused, naming the first difference."""
    runs = count(1)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if next(runs) % 2 else x * 2

    x = torch.full((2,), 3.0, device=comm.device)
    many: dict[str, Any] = {"warmup": 3}
    for options in (many, {}):
        with refused(GraphError, "differ", "number 0", "aten.add.Tensor", "aten.mul.Tensor"):
            graph.capture(f, **options)(x)


@pytest.mark.gpu
@pytest.mark.parametrize("before", ["nothing", "ring", "manager"])
def test_the_end_of_a_process(before: str) -> None:
    """Graphs go before their communicators, whichever ends first: no hang, no output."""
    code, out, err = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.programs.graph_exit", before),
        FLAGS_dynamic_static_unified_comm="1",
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
