"""Hazards of graphs: what crashes or fails at the capture; rows C of docs/graph_hazards.md."""

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import graph, ops
from commlib.graph import GraphError
from commlib.graph.recording.capture_run import CaptureRun
from commlib.graph.watching.runs import current
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises, settle
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.test_graph import whole
from tests.test_graph_hazards import ring_of

WAIT_S = 20  # for another thread; it is there at once


def in_capture() -> bool:
    """Whether the function is being captured, and not run before it."""
    return isinstance(current(), CaptureRun)


# -- C: a crash or an error at the capture ---------------------------------------------------------

COPIES: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[str, ...]]] = {
    "cpu": (lambda x: x.cpu(), ("can't be captured", "host waits")),
    "numpy": (lambda x: x.cpu().numpy(), ("can't be captured", "host waits")),
    "list": (lambda x: x.tolist(), ()),
    # no operator of torch shows this: the driver refuses it
    "print": (lambda x: repr(x), ("capturing failed", "test_graph_hazards_capture.py:")),
}


@pytest.mark.parametrize("what", COPIES)
@runs_on("gpu_ranks")
def test_copies_to_the_host(comm: Any, what: str) -> None:
    """Copies between host and GPU for which the host waits; the process stays whole (C1)."""
    f, words = COPIES[what]
    x = torch.ones(4, device=comm.device)
    with raises(GraphError, *words):
        graph.capture(f)(x)
    whole(comm)
    pinned = torch.ones(4).pin_memory()
    g = graph.capture(lambda x: x + pinned.to(x.device, non_blocking=True), outputs="copy")
    for turn in range(3):
        pinned.fill_(turn)
        assert_bits_equal(g(x), torch.full((4,), turn + 1.0), "from pinned memory")
        torch.cuda.synchronize()


@runs_on("unified_ranks")
def test_first_uses(comm: Any) -> None:
    """Libraries and verbs that this process, or this ring, has not used before (C2, C8)."""
    ring = ring_of(comm, 90)

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        outputs = [
            torch.fft.rfft(x).real,
            torch.nn.functional.conv2d(x.view(1, 1, 24, 35), x[:, :9].view(-1, 1, 3, 3)),
            # On a GPU solve() waits for the check of its result.
            x @ x.T if on_gpu(comm) else torch.linalg.solve(torch.eye(24) * 2, x),
            x.sort(dim=0).values,
            torch.cumsum(x, 0),
        ]
        for count in (10, 100_000, 5_000_000) if on_gpu(comm) else (10, 1000):
            y = x.new_full((count,), ring.rank + 1.0)
            for stream in (True, False):
                kwargs: Any = {"use_calc_stream": stream}
                outputs.append(ring.all_reduce(torch.empty_like(y), y, **kwargs))
                outputs.append(ring.all_gather(y.new_empty(count * ring.size), y, **kwargs))
                outputs.append(ring.reduce_scatter(y.new_empty(count // ring.size), y, **kwargs))
                outputs.append(ring.all_to_all(torch.empty_like(y), y, **kwargs))
                outputs.append(ring.broadcast(torch.empty_like(y), y, root=1, **kwargs))
        with ring.group():
            ring.send(y, peer=1 - ring.rank)
            outputs.append(ring.recv(torch.empty_like(y), peer=1 - ring.rank))
        ring.barrier()
        return outputs

    g = graph.capture(f, outputs="copy")
    for turn in range(2):
        x = torch.linspace(turn, 1, 840, device=comm.device).view(24, 35)
        result = g(x)
        for i, (one, want) in enumerate(zip(result, f(x), strict=True)):
            assert_bits_equal(one, want, f"tensor {i}, turn {turn}")


@runs_on("unified_ranks")
def test_work_from_before(comm: Any) -> None:
    """A Work from before the capture is waited for in the function, or refused cleanly (C3)."""
    x = torch.full((4,), comm.rank + 1.0, device=comm.device)
    work = ops.all_gather(x, use_calc_stream=False, sync_op=False)
    g = graph.capture(lambda: work.wait() * 2, outputs="copy")
    wanted = torch.tensor([2.0] * 4 + [4.0] * 4)
    try:
        for _ in range(3):
            assert_bits_equal(g(), wanted, "waited for inside")
    except GraphError:
        assert_equal(on_gpu(comm), True, "refused on a GPU alone")
        whole(comm)
    assert_bits_equal(work.wait() * 2, wanted, "outside")
    work.wait()
    h = graph.capture(lambda: work.result * 2, outputs="copy")
    for _ in range(3):
        assert_bits_equal(h(), wanted, "waited for before")


@pytest.mark.parametrize("inside", [False, True])
@runs_on("unified_ranks")
def test_stale_autograd_nodes(comm: Any, inside: bool) -> None:
    """Autograd nodes of an eager forward that is still held know another stream (C4)."""
    torch.manual_seed(6)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    module.to(comm.device)
    x = torch.linspace(-1, 1, 12, device=comm.device).view(3, 4)
    module(x).sum().backward()
    held = module(x)  # its nodes live on, and with them those of the parameters
    module.zero_grad(set_to_none=False)

    def backward() -> None:
        module(x).square().sum().backward()

    def step(call: Any) -> None:
        if inside:
            call()
        else:
            call(x).square().sum().backward()

    captured = graph.capture(backward if inside else module)
    if on_gpu(comm) and not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
        with raises(GraphError, "autograd node", "default stream", "delete that forward"):
            step(captured)
        whole(comm)
        held = torch.zeros(1, requires_grad=True)  # and the nodes are gone
    grads = []
    for call in (captured, backward if inside else module):
        module.zero_grad(set_to_none=False)
        for _ in range(3):
            step(call)
        grads.append([torch.clone(parameter.grad) for parameter in module.parameters()])
    for one, want in zip(*grads, strict=True):
        assert_bits_equal(one, want)
    held.sum().backward()
    settle(comm)


@pytest.mark.parametrize("held", [False, True])
@runs_on("unified_ranks")
def test_work_that_nobody_waits_for(comm: Any, held: bool) -> None:
    """Collectives on the comm stream that nobody waits for: joined, and undone, as any (C5, S8)."""
    out, seen = torch.zeros(4, device=comm.device), torch.zeros(4, device=comm.device)
    works: list[Any] = []
    keep = works.append  # a list that the function can reach would be put back

    @graph.capture
    def f(x: torch.Tensor) -> None:
        seen.add_(out)  # what the last call has left, 0 at the first
        out.zero_()
        if comm.rank == 1:
            if on_gpu(comm):
                torch.cuda._sleep(20_000_000)
            else:
                time.sleep(0.1)  # the others have to come back to this collective
        work = comm.all_reduce(out, x, use_calc_stream=False, sync_op=False)
        if held and not in_capture():
            keep(work)

    total = 0.0
    x = torch.ones(4, device=comm.device)
    for turn in range(4):
        x.fill_(turn + 1.0)
        f(x)
        assert_bits_equal(seen, torch.full((4,), total), f"turn {turn}, before")
        assert_bits_equal(out, torch.full((4,), 2 * (turn + 1.0)), f"turn {turn}, after")
        total += 2 * (turn + 1.0)
    settle(comm)


@pytest.mark.parametrize("how", ["cycle", "last reference"])
@runs_on("unified_ranks")
def test_graphs_that_die_in_a_capture(comm: Any, how: str) -> None:
    """A graph that becomes garbage while another one is captured does not end the capture (C6)."""
    x = torch.ones(1000, device=comm.device)
    held: list[Any] = []
    for _ in range(3):
        cycle: dict[str, Any] = {"graph": graph.capture(lambda x: x * 3 + 1)}
        cycle["self"] = cycle if how == "cycle" else None
        cycle["out"] = cycle["graph"](x)
        held.append(cycle)
    del cycle
    gone = [weakref.ref(one["graph"]) for one in held]
    alive: list[int] = []
    clear, note = held.clear, alive.append  # what lists hold would be put back after a capture

    def f(x: torch.Tensor) -> torch.Tensor:
        if in_capture():
            clear()
            rubbish: list[Any] = [[[]] for _ in range(20_000)]  # enough for every generation
            note(sum(one() is not None for one in gone))
            del rubbish
        return x * 2

    g = graph.capture(f, outputs="copy")
    for turn in range(3):
        assert_bits_equal(g(x + turn), (x + turn) * 2, f"turn {turn}")
    if on_gpu(comm) and how == "cycle":
        assert_equal(alive[0], 3, "graphs that the capture leaves alone")
    gc.collect()
    assert_equal([one() for one in gone], [None] * 3, "all gone")
    whole(comm)


class Helper:
    """A thread that does one piece of work on request."""

    def __init__(self, comm: Any, work: Callable[[], None]) -> None:
        self._comm, self._work = comm, work
        self._go, self._done = threading.Event(), threading.Event()
        self.problem: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            if self._go.wait(WAIT_S):
                if on_gpu(self._comm):
                    torch.cuda.set_device(self._comm.device)
                self._work()
        except BaseException as error:
            self.problem = error
        finally:
            self._done.set()

    def act(self) -> None:
        """Let it work, and wait until it has."""
        self._go.set()
        assert_equal(self._done.wait(WAIT_S), True, "the thread has finished")

    def raise_problem(self) -> None:
        """Raise what went wrong in the thread."""
        if self.problem is not None:
            raise self.problem


@runs_on("unified_ranks")
def test_tensors_of_another_thread(comm: Any) -> None:
    """What another thread computes, pins and waits for while a capture goes on is its own (C7)."""
    theirs = torch.full((5,), 2.0, device=comm.device)

    def work() -> None:
        y = torch.ones(3_000_000 + comm.rank).mul_(2)  # no cached memory is as large
        if on_gpu(comm):
            y = y.pin_memory().to(comm.device, non_blocking=True)
            torch.cuda.current_stream().record_event().synchronize()
        theirs.mul_(2)
        assert_equal(float(y.sum()), 6_000_000.0 + 2 * comm.rank)

    helper = Helper(comm, work)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = ops.all_reduce(x)
        if in_capture():
            helper.act()
        twice: torch.Tensor = ops.all_reduce(y * 2)
        return twice

    g = graph.capture(f, outputs="copy")
    for turn in range(4):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        assert_bits_equal(g(x), x * 8, f"turn {turn}")
    helper.raise_problem()
    settle(comm)
    assert_bits_equal(theirs, torch.full((5,), 4.0), "what the thread has done, once")


@runs_on("gpu_ranks")
def test_captures_from_any_stream(comm: Any) -> None:
    """A capture begins on any current stream, which stays the current one (C9)."""
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()
    for stream in (default, side, torch.cuda.Stream(priority=-1)):
        g = graph.capture(lambda x: ops.all_reduce(x * 2) + 1, outputs="copy")
        for turn in range(3):
            stream.wait_stream(default)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)  # what the capture reads is not there yet
                x = torch.full((1000,), turn + 1.0, device=comm.device)
                result = g(x)
                assert_equal(torch.cuda.current_stream(), stream, "the current stream")
            default.wait_stream(stream)
            assert_bits_equal(result, x * 4 + 1, f"turn {turn}")
        with torch.cuda.stream(default):  # and is replayed on another one
            assert_bits_equal(g(x), x * 4 + 1, "on the default stream")
    whole(comm)


@runs_on("unified_ranks")
def test_conditional_nodes(comm: Any) -> None:
    """torch.cond, in which no collective may stand, is refused by name (C10)."""

    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: ops.all_reduce(x), lambda x: x * 2, (x,))

    with raises((GraphError, NotImplementedError), "cond"):
        graph.capture(f)(torch.ones(3, device=comm.device))
    whole(comm)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@runs_on("unified_ranks")
def test_hooks_that_read_values(comm: Any, kind: str) -> None:
    """A module's hook that reads a value is named by operator and line (C11)."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(comm.device)
    seen: list[float] = []

    def look(_: object, tensors: Any, *more: object) -> None:
        tensor = tensors[0] if isinstance(tensors, tuple) else tensors
        seen.append(tensor.sum().item())

    line = f"{__file__}:{look.__code__.co_firstlineno + 2}"
    remove = getattr(module[1], f"register_{kind}_hook")(look).remove
    x = torch.ones(2, 3, device=comm.device)
    g = graph.capture(module, outputs="copy")
    with raises(GraphError, "item can't be captured", line):
        g(x)
    assert_equal(seen, [], "what it has read")
    whole(comm)
    remove()
    for turn in range(3):
        assert_bits_equal(g(x + turn), module(x + turn), f"turn {turn} without the hook")


def two_threads(comm: Any, what: str) -> None:
    """Two threads capture at once, each its own function (C12)."""
    rings = [ring_of(comm, 90 + i) for i in range(2)]
    meet = threading.Barrier(2)
    errors: list[Any] = [None, None]

    def one(i: int) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            if in_capture() and not on_gpu(comm):  # on a GPU the second one waits for the first
                meet.wait(WAIT_S)
            y = x * (i + 2)
            return rings[i].all_reduce(torch.empty_like(y), y) if what == "collectives" else y + 1

        g = graph.capture(f, outputs="copy")
        if on_gpu(comm):
            torch.cuda.set_device(comm.device)
        meet.wait(WAIT_S)
        for turn in range(5):
            x = torch.full((100,), turn + 1.0, device=comm.device)
            want = x * (i + 2) * 2 if what == "collectives" else x * (i + 2) + 1
            assert_bits_equal(g(x), want, f"thread {i}, turn {turn}")
        assert_equal(
            [len(row["collectives"]) for row in graph.report(g)], [int(what == "collectives")]
        )

    def guarded(i: int) -> None:
        try:
            one(i)
        except BaseException as error:
            errors[i] = error
            meet.abort()

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert_equal([thread.is_alive() for thread in threads], [False] * 2, "threads that hang")
    assert_equal(errors, [None, None], "what went wrong")
    whole(comm)


def test_two_threads_capture(unified_ranks: Ranks) -> None:
    unified_ranks(two_threads, "tensors")


def test_two_threads_capture_collectives(cpu_ranks: Ranks) -> None:
    """On a GPU these would be two orders of two rings on one stream (D3)."""
    cpu_ranks(two_threads, "collectives")
