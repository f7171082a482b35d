"""graph.capture: calls that fail count once or not at all; odd arguments are taken or refused."""

import threading
from ctypes import c_int
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import commlib
from commlib import flags, graph
from commlib.engines.reduction_names import RingReduction
from commlib.errors import CommError
from commlib.graph import GraphError
from commlib.graph.watching.recorder import Recorder
from commlib.graph.watching.runs import WarmUpRun, inside
from commlib.graph.watching.undo import UndoLog
from tests.support.autograd_threads import by_autograd
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises, settle
from tests.support.hidden import HiddenCount
from tests.support.runs_on import runs_on

# -- calls that fail -------------------------------------------------------------------------------


class Sum:
    """A function that adds up, maybe through an eager part, and in one of its runs is another."""

    def __init__(self, comm: Any, odd: int | None, *, broken: bool) -> None:
        self.total = torch.zeros(1, device=comm.device)
        self._odd, self._broken, self._runs = odd, broken, HiddenCount()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        run = next(self._runs)
        self.total.add_(x)
        y = _outside(x) if self._broken else x
        return y * 2 + 1 if run == self._odd else y * 2


@graph.eager
def _outside(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


@runs_on("unified_ranks")
def test_failures_count_once(comm: Any) -> None:
    """A call counts once, whether it is captured, stays eager or raises."""
    x = torch.ones(1, device=comm.device)
    for first in ("once", "warmup"):
        for odd, broken in ((None, True), (None, False), (3, True), (3, False)):
            f = Sum(comm, odd, broken=broken)
            g = graph.capture(f, first=first, on_fail="eager")
            for turn in range(1, 4):
                assert_bits_equal(g(x), x * 2, f"{first}, {odd}, {broken}, turn {turn}")
                assert_bits_equal(f.total, x * turn, f"{first}, {odd}, {broken}, turn {turn}")
            assert_equal(len(g.eager), int(odd is not None), "calls that stay eager")
    for broken in (False, True):
        f = Sum(comm, 3, broken=broken)
        with raises(GraphError, "differ"):
            graph.capture(f)(x)
        assert_equal(f.total.tolist(), [0.0], "as before")


@runs_on("unified_ranks")
def test_a_slot_that_breaks(comm: Any) -> None:
    """A further slot that can't be captured is not an error: with on_fail="eager" it goes on."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    broken = c_int(0)  # no key sees it

    def f(x: torch.Tensor) -> torch.Tensor:
        if broken.value:
            broken.value -= 1
            raise ValueError("broken")
        return x * weight

    x = torch.full((3,), 2.0, device=comm.device)
    for on_fail in ("eager", "raise"):
        g = graph.capture(f, on_fail=on_fail, outputs="copy", verify=False)
        flights = [g(x), g(x)]
        broken.value += 1
        if on_fail == "raise":
            with raises(GraphError, "broken"):
                g(x)
        flights += [g(x), g(x)]
        for flight in flights:
            (grad,) = torch.autograd.grad(flight.sum(), weight)
            assert_bits_equal(grad, x)


@runs_on("unified_ranks")
def test_replays_in_an_eager_part(comm: Any) -> None:
    """An eager part may call and go back through other captured functions, at replays too."""
    inner = graph.capture(lambda x: (x * x).sum())

    @graph.eager
    def part(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().clone().requires_grad_()
        with torch.enable_grad():
            (grad,) = torch.autograd.grad(inner(y), y)
        return grad

    g = graph.capture(lambda x: part(x + 1) * 3, outputs="copy")
    for turn in range(4):
        x = torch.full((3,), float(turn), device=comm.device)
        assert_bits_equal(g(x), 6 * (x + 1), f"turn {turn}")


@runs_on("unified_ranks")
def test_moved_arguments_of_pieces(comm: Any) -> None:
    """A function with an eager part that is captured again counts once too."""
    f = Sum(comm, None, broken=True)
    g = graph.capture(f, outputs="copy")
    places = [torch.ones(1, device=comm.device) for _ in range(4)]
    for turn, x in enumerate(places, 1):
        assert_bits_equal(g(x), x * 2)
        assert_bits_equal(f.total, x * turn, f"turn {turn}")


@runs_on("unified_ranks")
def test_collectives_of_a_failing_run(comm: Any) -> None:
    """A collective that a failing run has begun ends before its writes are undone."""

    def f(x: torch.Tensor) -> torch.Tensor:
        work = comm.all_reduce(x, x, use_calc_stream=False, sync_op=False)
        x.sum().item()
        return work.wait()  # type: ignore[no-any-return]

    for turn in range(3):
        x = torch.ones(1_000_000, device=comm.device)
        graph.capture(f, on_fail="eager")(x)
        settle(comm)
        assert_equal(x.unique().tolist(), [float(comm.size)], f"turn {turn}")


@pytest.mark.parametrize("how", ["differs", "advances"])
@runs_on("unified_ranks")
def test_one_rank_tells_the_others(comm: Any, how: str) -> None:
    """What one rank finds out about its runs, all ranks raise."""
    state: list[torch.Tensor] = []
    runs = [HiddenCount()]

    def differs(x: torch.Tensor) -> torch.Tensor:
        y = x + 0 if next(runs[0]) == 2 and comm.rank == 0 else x
        return comm.all_reduce(torch.zeros_like(x), y)  # type: ignore[no-any-return]

    def advances(x: torch.Tensor) -> torch.Tensor:
        run = next(runs[0])
        if comm.rank == 0 and state:
            state[0].add_(1)
        elif comm.rank == 0 and run == 2:
            state.append(torch.zeros(1, device=comm.device))
        return comm.all_reduce(torch.zeros_like(x), x)  # type: ignore[no-any-return]

    x = torch.ones(4, device=comm.device)
    f, words = {"differs": (differs, "differ"), "advances": (advances, "runs no Python")}[how]
    with raises(GraphError, "rank 0", words):
        graph.capture(f)(x)
    runs[0] = HiddenCount()
    g = graph.capture(f, on_fail="eager", outputs="copy")
    for _ in range(3):
        assert_bits_equal(g(x), x * comm.size, "eager on all ranks")
    assert_equal(len(g.eager), 1, "calls that stay eager")
    assert_bits_equal(comm.all_reduce(torch.zeros_like(x), x), x * comm.size, "the ring works")


@runs_on("unified_ranks")
def test_runs_that_count_are_not_repeated(comm: Any) -> None:
    """Where the call counts and the capture differs between ranks, it stays eager on all."""
    with flags.override("FLAGS_comm_check", 0):  # else the calls themselves are compared on CPUs
        ring = commlib.new_ring(91, comm.ranks)
    assert ring is not None
    runs: list[int] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        op: RingReduction = "max" if comm.rank and len(runs) == 2 else "sum"
        return ring.all_reduce(torch.zeros_like(x), x, op=op)

    x = torch.ones(3, device=comm.device)
    kwargs: dict[str, Any] = {"first": "warmup", "warmup": 1}
    g = graph.capture(f, on_fail="eager", **kwargs)
    assert_bits_equal(g(x), x * comm.size, "the call")
    assert_equal([len(runs), len(g.eager)], [1, 1], "runs that count, and calls that stay eager")
    runs.clear()
    with raises(GraphError, "different collectives", "the effects of the call were kept"):
        graph.capture(f, **kwargs)(x)
    assert_equal(len(runs), 1, "runs that count")


@runs_on("cpu_ranks")
def test_overlap_on_one_rank(comm: Any) -> None:
    """Arguments that overlap on one rank alone are refused on all.

    On a GPU the first call's graph uses the memory of its arguments, so that nothing is refused.
    """
    memory = torch.zeros(6, device=comm.device)
    shift = 1 if comm.rank == 0 else 3

    @graph.capture(outputs="copy")
    def f(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return comm.all_reduce(torch.zeros_like(b), b)  # type: ignore[no-any-return]

    with raises(GraphError, "rank 0", "overlap"):
        f(memory[:3], memory[shift : shift + 3])


@runs_on("unified_ranks")
def test_the_first_problem_is_kept(comm: Any) -> None:
    """A rank whose function fails says so, also where its peer does not receive it."""
    ring = commlib.new_ring(72, range(comm.size), timeout=5)
    assert ring is not None

    def f(x: torch.Tensor) -> torch.Tensor:
        y = ring.all_reduce(torch.zeros_like(x), x)
        raise ValueError("the real reason")
        return y

    x = torch.ones(4, device=comm.device)
    if comm.rank:
        ring.all_reduce(torch.zeros_like(x), x)
    else:
        with pytest.raises(CommError) as excinfo:
            graph.capture(f)(x)
        assert_equal("the real reason" in str(excinfo.value.__cause__), True, f"{excinfo.value!r}")
    comm.exchange([])
    commlib.CommContextManager.instance().close(72, abort=True)


@runs_on("gpu_ranks")
def test_inside_a_foreign_capture(comm: Any) -> None:
    """A capture that can't begin leaves the thread as it was: the next one captures."""
    x = torch.ones(3, device=comm.device)
    g = graph.capture(lambda x: x * 2, outputs="copy")
    foreign, out = torch.cuda.CUDAGraph(), torch.zeros(3, device=comm.device)
    with torch.cuda.graph(foreign, capture_error_mode="thread_local"):
        with raises(GraphError, "inside another one", "before"):
            g(x)
        out.add_(1)
    foreign.replay()
    assert_bits_equal(out, torch.ones(3), "the foreign graph")
    for _ in range(2):
        assert_bits_equal(g(x), x * 2)
    assert_equal(len(g.entries), 1, "captured")


@runs_on("unified_ranks")
def test_calls_from_a_backward(comm: Any) -> None:
    """A captured function that a backward calls again is part of the graph, in any thread."""
    inner = graph.capture(lambda x: x * 2)
    names: list[str] = []
    note = names.append  # a list that the function can reach would be put back

    def again(x: torch.Tensor) -> torch.Tensor:
        note(threading.current_thread().name)
        return inner(x).sin()  # type: ignore[no-any-return]

    g = graph.capture(lambda x: checkpoint(again, x, use_reentrant=False), outputs="copy")
    for turn in range(3):
        x = torch.full((3,), turn + 1.0, device=comm.device, requires_grad=True)
        y = g(x)
        assert_bits_equal(y, (x * 2).sin())
        y.sum().backward()
        assert_bits_equal(x.grad, 2 * (x * 2).cos())
    # The first call is eager code: its backward calls the inner one by itself.
    assert_equal(len(inner.entries), 1, "graphs of the inner one")
    assert_equal(len(set(names)), 2 if on_gpu(comm) else 1, f"threads {set(names)}")


@pytest.mark.parametrize("watched", [False, True])
def test_threads_of_a_backward(watched: bool) -> None:
    """They work for the run before a capture that has begun them, and for none after it."""

    def seen() -> tuple[str, bool]:
        result: tuple[str, bool] = by_autograd(lambda: (threading.current_thread().name, inside()))
        return result

    with Recorder(torch.device("cpu")) if watched else WarmUpRun(UndoLog()).under_way():
        thread_name, during = seen()
    _, after = seen()
    assert thread_name != threading.current_thread().name
    assert (during, after) == (True, False)


# -- threads and keys ------------------------------------------------------------------------------


@runs_on("unified_ranks")
def test_threads_share_a_function(comm: Any) -> None:
    """Two threads that call one captured function each get their own result."""
    g = graph.capture(lambda x: x * 2, outputs="copy")
    wrong: list[float] = []

    def call(base: float) -> None:
        for turn in range(100):
            x = torch.full((1000,), base + turn, device=comm.device)
            values = g(x).unique().tolist()
            if values != [2 * (base + turn)]:
                wrong.append(values[0])

    call(0.0)
    workers = [threading.Thread(target=call, args=(base,)) for base in (1000.0, 2000.0)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert_equal(wrong, [], "results of the other thread")


@runs_on("unified_ranks")
def test_sets_as_keys(comm: Any) -> None:
    """A set in a key is the same on ranks whose hashes differ."""
    g = graph.capture(lambda x, names: x * len(names), agree=0, outputs="copy")
    x = torch.ones(2, device=comm.device)
    for _ in range(2):
        assert_bits_equal(g(x, frozenset({"a", "b", "c", "d", "e"})), x * 5)
