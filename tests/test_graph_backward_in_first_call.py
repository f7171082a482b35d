"""The backward of an earlier captured call, inside the function of a first call.

On a GPU it runs in a thread of autograd, for which the call waits.
"""

import threading
import time
from collections.abc import Callable, Sequence
from ctypes import c_int64
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.backends import cuda, cuda_graph, replay_order
from commlib.graph.backends.base import CpuBackend
from commlib.graph.backends.cuda import of_gpu
from commlib.graph.backends.cuda_graph import check_single
from commlib.graph.backends.replay_order import ReplayOrder
from commlib.graph.replaying.captured_call import CapturedCall
from commlib.graph.replaying.slot import Slot
from commlib.graph.watching.real_call import RealCall
from commlib.streams import capture_of
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

Pair = tuple[torch.Tensor, torch.Tensor]
# Which of two outputs a loss is made of: the backward from both of them is captured at once.
LOSSES: list[Callable[[Pair], torch.Tensor]] = [
    lambda outs: outs[0].sum(),
    lambda outs: (outs[1] * 2).sum(),
    lambda outs: (outs[0] + outs[1]).sum(),
]


def weight_of(device: torch.device) -> torch.Tensor:
    return torch.arange(1.0, 4.0, device=device).requires_grad_()


def pair(weight: torch.Tensor) -> Callable[[torch.Tensor], Pair]:
    return lambda x: ((weight * x).sin(), weight * weight * x)


def inside(device: torch.device, option: Any) -> None:
    """Compare the gradients of first calls that go back through a captured call."""
    weight, x = weight_of(device), torch.linspace(-1, 1, 3, device=device)
    fn = pair(weight)
    g = graph.capture(fn, outputs="copy", verify=option)
    for turn, loss in enumerate((*LOSSES, *LOSSES)):
        (want,) = torch.autograd.grad(loss(fn(x)), weight)
        step = graph.capture(lambda loss: loss.backward(), on_fail="eager")
        weight.grad = torch.zeros_like(weight)  # a call that begins gradients is not captured yet
        step(loss(g(x)))
        assert_bits_equal(weight.grad, want, f"turn {turn}")
    assert_equal(sum(row["replays"] for row in graph.report(g)), 5, "replays")


@pytest.mark.parametrize("option", [False, 1], ids=["plain", "verified"])
@runs_on("unified_ranks")
def test_inside_of_a_first_call(comm: Any, option: Any) -> None:
    """It is verified, or needs a further graph: neither waits for the call."""
    inside(comm.device, option)


@pytest.mark.parametrize("option", [False, 1], ids=["plain", "verified"])
@pytest.mark.parametrize("which", [0, 2], ids=["further", "known"])
@runs_on("unified_ranks")
def test_it_is_not_captured(comm: Any, which: int, option: Any) -> None:
    """No graph holds another one: the call counts, and its capture raises before it goes back."""
    weight, x = weight_of(comm.device), torch.ones(3, device=comm.device)
    fn, of = pair(weight), LOSSES[which]
    g = graph.capture(fn, outputs="copy", verify=option)
    g(x)
    loss = of(g(x))
    (want,) = torch.autograd.grad(of(fn(x)), weight)
    weight.grad = torch.zeros_like(weight)  # a call that begins gradients is not captured yet
    step = graph.capture(lambda: loss.backward(retain_graph=True), first="warmup")
    with raises(GraphError, "the backward of an earlier captured call", "effects of the call"):
        step()
    assert_bits_equal(weight.grad, want, "the call")
    loss.backward()
    assert_bits_equal(weight.grad, want * 2, "outside")


@pytest.mark.parametrize("option", [False, 1], ids=["plain", "verified"])
@runs_on("unified_ranks")
def test_in_an_eager_part(comm: Any, option: Any) -> None:
    """It goes back at each call, and in the runs before the capture too."""
    weight, x = weight_of(comm.device), torch.ones(3, device=comm.device)
    fn = pair(weight)
    g = graph.capture(fn, outputs="copy", verify=option)
    g(x)
    loss = LOSSES[0](g(x))
    (want,) = torch.autograd.grad(LOSSES[0](fn(x)), weight)
    weight.grad = torch.zeros_like(weight)

    @graph.eager
    def part() -> None:
        loss.backward(retain_graph=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        part()
        return y * 2

    step = graph.capture(function, outputs="copy", verify=False)
    expected = torch.zeros_like(want)
    for turn in range(3):
        assert_bits_equal(step(x), x * 4, f"turn {turn}")
        expected = expected + want
        assert_bits_equal(weight.grad, expected, f"gradients, turn {turn}")


@runs_on("cpu_ranks")
def test_a_run_does_not_see_captures_inside_of_it(comm: Any) -> None:
    """It would copy what they write, and on a GPU a capture holds the copy."""
    weight, x = weight_of(comm.device), torch.ones(3)
    g = graph.capture(pair(weight), outputs="copy", verify=False)
    g(x)
    loss = LOSSES[0](g(x))

    run = RealCall(comm.device, (), named=True)
    run.run(loss.backward)
    assert_equal(run.names.count("aten.cos.default"), 1, "the replay alone")


@runs_on("gpu_ranks")
def test_one_capture_at_a_time(comm: Any) -> None:
    """A second one raises, and leaves the first as it is: its thread holds the lock already."""
    backend, x = of_gpu(comm.device.index), torch.ones(3, device=comm.device)
    backend.begin()
    y = x + 1
    with raises(GraphError, "one graph at a time"):
        backend.begin()
    with raises(GraphError, "one graph at a time"):
        backend.own_pool()
    recording = backend.end()
    recording.replay()
    assert_bits_equal(y, torch.full_like(x, 2.0))


def test_a_second_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    check_single()
    monkeypatch.setattr(cuda_graph, "under_way", [object()])
    with raises(GraphError, "one graph at a time"):
        check_single()


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("grad", [False, True])
def test_a_second_capture_that_fails(
    grad: bool, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error is raised, and the next call is captured from the beginning."""
    monkeypatch.setattr(CpuBackend, "copies_arguments", False)  # as on a GPU
    fails = c_int64(0)  # captures do not find it

    def fn(x: torch.Tensor) -> torch.Tensor:
        if fails.value:
            raise kind("not now")
        return x * 3

    def check(turn: int) -> None:
        x = xs[turn]
        y = g(x)
        assert_bits_equal(y.detach(), x.detach() * 3, f"turn {turn}")
        if grad:
            assert_equal(torch.autograd.grad(y.sum(), x)[0].tolist(), [3.0] * 3, f"turn {turn}")

    g = graph.capture(fn, outputs="copy", verify=False)
    xs = [torch.full((3,), turn + 1.0, requires_grad=grad) for turn in range(4)]
    check(0)
    fails.value = 1  # the second call has other memory
    with pytest.raises((kind, GraphError), match="not now"):
        g(xs[1])
    fails.value = 0
    for turn in (2, 3):
        check(turn)
    (row,) = graph.report(g)
    assert_equal((row["replays"], row["eager"]), (1, None), "replays")


# -- threads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("moved", [False, True])
def test_replays_do_not_wait_for_captures(moved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that captures waits for other captures, and those wait for replays."""
    monkeypatch.setattr(CpuBackend, "copies_arguments", False)  # as on a GPU
    kind = CapturedCall if moved else Slot
    name = "_capture_again" if moved else "capture"
    original, observed = getattr(kind, name), list[bool]()
    weight = torch.ones(3, requires_grad=not moved)
    g = graph.capture(lambda x: weight * x, outputs="copy", verify=False)
    x = torch.ones(3)
    first = g(x)
    (entry,) = g.entries.values()
    lock = entry.parts[0].segments.lock

    def free() -> None:
        held = lock.acquire(blocking=False)
        observed.append(held)
        if held:
            lock.release()

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        thread = threading.Thread(target=free)
        thread.start()
        thread.join(10)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(kind, name, watched)
    result = None if moved else g(x)  # takes the slot
    second = g(torch.ones(3) if moved else x)
    assert_bits_equal(second.detach(), first.detach(), "the second call")
    assert_equal(observed, [True], "the lock of replays is free")
    del result


def in_two_threads(device: torch.device, work: Callable[[int], None]) -> None:
    """Begin ``work(0)`` and ``work(1)`` at the same time, and raise their first error."""
    meet, errors = threading.Barrier(2), list[BaseException]()

    def guarded(i: int) -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            meet.wait(50)
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert_equal([thread.is_alive() for thread in threads], [False] * 2, "threads that wait")
    for error in errors:
        raise error


@runs_on("unified_ranks")
def test_first_calls_of_two_threads(comm: Any) -> None:
    """One of them waits for the other, and neither for its own backward."""
    in_two_threads(comm.device, lambda _: inside(comm.device, option=False))


@runs_on("unified_ranks")
def test_further_slots_of_two_threads(comm: Any) -> None:
    """A first call and a further slot are captured one after the other."""
    weights = [weight_of(comm.device) for _ in range(2)]
    x = torch.ones(3, device=comm.device)
    outs: list[torch.Tensor] = []

    def work(i: int) -> None:
        for _ in range(5):
            g = graph.capture(lambda x: weights[i] * x, outputs="copy", verify=False)
            outs.extend([g(x) for _ in range(4)])

    in_two_threads(comm.device, work)
    torch.stack(outs).sum().backward()
    for weight in weights:
        assert_bits_equal(weight.grad, x * 20)


def slow_graph(threads: Sequence[threading.Thread], near: threading.Event) -> type:
    """Return a class of graphs whose captures take a while to end; ``near``: a thread has one."""

    class SlowGraph(torch.cuda.CUDAGraph):
        def __new__(cls, *args: Any, **kwargs: Any) -> "SlowGraph":
            if threading.current_thread() in threads:
                near.set()
            return super().__new__(cls, *args, **kwargs)

        def capture_end(self) -> None:
            time.sleep(0.3)
            super().capture_end()

    return SlowGraph


@pytest.mark.parametrize("pool", [False, True])
@runs_on("gpu_ranks")
def test_a_capture_begins_while_a_replay_is_ordered(comm: Any, pool: bool) -> None:
    """The replay is ordered after the capture stream, which another thread captures next.

    ``pool``: as each further slot does, to make a private pool.
    """
    backend = of_gpu(comm.device.index)
    x, stream = torch.ones(3, device=comm.device), backend.stream.cuda_stream
    original, threads, outs = ReplayOrder._fence, list[threading.Thread](), list[torch.Tensor]()
    pools, begun, near = list[object](), list[bool](), threading.Event()

    def call(factor: float) -> None:
        torch.cuda.set_device(comm.device)
        g = graph.capture(lambda x: x * factor, outputs="copy")
        outs.append([g(x) for _ in range(3)][-1])

    def make_pool() -> None:
        torch.cuda.set_device(comm.device)
        near.set()
        pools.append(backend.own_pool())

    def fence(order: ReplayOrder, after: int, previous: int) -> None:
        if previous == stream and not threads:
            begin = make_pool if pool else partial(call, 3.0)
            threads.append(threading.Thread(target=begin, daemon=True))
            threads[0].start()
            near.wait(20)
            end = time.monotonic() + 0.3
            while not capture_of(stream) and time.monotonic() < end:
                time.sleep(0.001)
            begun.append(capture_of(stream) != 0)
        original(order, after, previous)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", slow_graph(threads, near))
        patch.setattr(ReplayOrder, "_fence", fence)
        call(2.0)
        threads[0].join(50)
    assert_bits_equal(torch.stack(outs).sum(0), torch.full((3,), 2.0 if pool else 5.0))
    assert_equal((len(pools), begun), (int(pool), [False]), "pools, and captures that began")
    assert_equal(near.is_set(), True, "the other thread came near its capture")


@runs_on("gpu_ranks")
def test_captures_end_under_the_lock_of_replays(comm: Any) -> None:
    """Else an event that a replay has recorded could be one of a capture that has ended."""
    backend, x = of_gpu(comm.device.index), torch.ones(3, device=comm.device)
    held: list[bool] = []

    def look() -> None:
        held.append(not backend.lock.acquire(blocking=False))
        if not held[-1]:
            backend.lock.release()

    class WatchedGraph(torch.cuda.CUDAGraph):
        def capture_end(self) -> None:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join(20)
            super().capture_end()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "CUDAGraph", WatchedGraph)
        backend.own_pool()
        g = graph.capture(lambda x: x * 2, outputs="copy")
        outs = [g(x) for _ in range(3)]
    assert_equal(held, [True, True], "the lock is held")
    assert_bits_equal(outs[-1], torch.full((3,), 2.0))


def test_threads_get_one_backend_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two would order their replays apart, though torch has one generator for both."""

    def slow(device: torch.device) -> object:
        time.sleep(0.1)
        return object()

    monkeypatch.setattr(cuda, "CudaBackend", slow)
    backends: list[object] = []
    threads = [threading.Thread(target=lambda: backends.append(of_gpu(99))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert backends[0] is backends[1]


def test_no_replay_waits_for_a_stream_that_a_capture_has_drawn_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The capture takes the stream between the question for it and the record of the event."""
    order, log = ReplayOrder(torch.device("cuda", 0)), list[str]()
    captures = dict.fromkeys((1, 2), 0)

    def record(stream: object) -> None:
        log.append("recorded")
        captures.update(later)

    event = SimpleNamespace(record=record)
    streams = {i: SimpleNamespace(wait_event=lambda _: log.append("waited")) for i in (1, 2)}
    monkeypatch.setattr(ReplayOrder, "_stream", lambda _, handle: (streams[handle], event))
    monkeypatch.setattr(replay_order, "capture_of", captures.__getitem__)
    for later, waits in (({}, True), ({1: 7, 2: 7}, True), ({1: 7}, False)):
        captures.update({1: 0, 2: 0})
        log.clear()
        order._fence(2, 1)
        assert log == ["recorded", "waited"][: 1 + waits], later
