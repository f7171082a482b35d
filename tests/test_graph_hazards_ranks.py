"""Hazards of graphs: what needs several ranks; rows D of docs/graph_hazards.md."""

import gc
import random
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import commlib
from commlib import graph, ops
from commlib.errors import CommError, CommTimeout
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises, settle
from tests.support.launchers import on_gpus
from tests.support.processes import run
from tests.support.runs_on import runs_on
from tests.test_graph import whole
from tests.test_graph_hazards import ring_of
from tests.test_graph_hazards_capture import Helper

LATE_S = 8  # the deadline of a ring whose member does not come


# -- D: several ranks ------------------------------------------------------------------------------


@runs_on("unified_ranks")
def test_one_rank_captures_alone(comm: Any) -> None:
    """A rank that captures while the other one replays learns which rank is late (D1)."""
    ring = ring_of(comm, 90, timeout=LATE_S)

    def f(x: torch.Tensor, scale: float) -> Any:
        return ring.all_reduce(torch.zeros_like(x), x * scale)

    g = graph.capture(f, outputs="copy", verify=False)
    x = torch.ones(4, device=comm.device)
    for _ in range(2):
        assert_bits_equal(g(x, 1.0), torch.full((4,), 2.0), "together")
    settle(comm)
    comm.exchange([])
    if comm.rank == 1:
        with raises((CommTimeout, CommError), "ring 90"):
            g(x, 2.0)
        assert_equal(ring.report()["state"] == "ready", False, "the ring has failed")
    else:
        g(x, 1.0)
    comm.exchange([])
    commlib.CommContextManager.instance().close(90, abort=True)
    settle(comm)
    assert_equal(len(g.entries), 0, "graphs of the ring")
    h = graph.capture(lambda x: ops.all_reduce(x) * 2, outputs="copy")
    assert_bits_equal(h(x), torch.full((4,), 4.0), "another ring")


class Hiding:
    """An object that hides its class as soon as ``hidden`` is set."""

    hidden = False

    @property
    def __class__(self) -> Any:
        if Hiding.hidden:
            raise RuntimeError("no class now")
        return Hiding


class Holder:
    """What the function reads, and an object that it does not name."""

    def __init__(self) -> None:
        self.scale, self.unnamed = 2.0, Hiding()


@runs_on("unified_ranks")
def test_an_object_that_hides_on_one_rank(comm: Any) -> None:
    """All ranks learn that there is no graph; none runs the function once more for one."""
    holder, x = Holder(), torch.ones(4, device=comm.device)

    def plain(x: torch.Tensor) -> Any:
        return comm.all_reduce(x * holder.scale)

    def hiding(x: torch.Tensor) -> Any:
        Hiding.hidden = True
        return comm.all_reduce(x * holder.scale)

    f = plain if comm.rank else hiding
    Hiding.hidden = False
    g = graph.capture(f, on_fail="eager")
    for turn in range(1, 4):
        assert_bits_equal(g(x * turn), x * turn * 4, f"turn {turn}")
    comm.exchange([])
    Hiding.hidden = False
    with raises(GraphError, "raises as it is looked at", "no class now"):
        graph.capture(f)(x)
    assert_bits_equal(comm.all_reduce(x), x * 2, "the ring goes on")


UNFIT = {
    "an object back": "returns an argument",
    "memory past operators": "no operator of torch",
    "a random number": "generator of random numbers",
}


@pytest.mark.parametrize("hazard", UNFIT)
@runs_on("unified_ranks")
def test_a_call_that_one_rank_can_not_repeat(comm: Any, hazard: str) -> None:
    """What only one rank's function does keeps all ranks from the runs before a capture."""
    table, x, batch = np.zeros(4), torch.ones(4, device=comm.device), SimpleNamespace(scale=1)
    memory, generator = torch.from_numpy(table), random.Random(1)

    def plain(x: torch.Tensor, batch: SimpleNamespace) -> Any:
        return comm.all_reduce(x * memory.shape[0])

    def unfit(x: torch.Tensor, batch: SimpleNamespace) -> Any:
        result = plain(x, batch)
        if hazard == "memory past operators":
            table[:] += 1
        if hazard == "a random number":
            generator.random()
        return (result, batch) if hazard == "an object back" else result

    with raises(GraphError, UNFIT[hazard]):
        graph.capture(plain if comm.rank else unfit)(x, batch)
    assert_bits_equal(comm.all_reduce(x), x * 2, "the ring goes on")


def of_two_rings(comm: Any) -> tuple[list[Any], list[Any]]:
    """Return two rings and a captured function over each."""
    rings = [ring_of(comm, 90 + i) for i in range(2)]
    return rings, [
        graph.capture(lambda x, ring=ring: ring.all_reduce(torch.zeros_like(x), x), outputs="copy")
        for ring in rings
    ]


@runs_on("unified_ranks")
def test_replays_of_two_rings(comm: Any) -> None:
    """Graphs of two rings are replayed in turn (D3)."""
    _, graphs = of_two_rings(comm)
    x = torch.ones(100, device=comm.device)
    for turn in range(8):
        assert_bits_equal(graphs[turn % 2](x + turn), (x + turn) * 2, f"turn {turn}")


@runs_on("gpu_ranks")
def test_replays_of_two_rings_on_streams(comm: Any) -> None:
    """The same from two streams, whose order is another one on each rank."""
    rings, graphs = of_two_rings(comm)
    x = torch.ones(100_000, device=comm.device)
    for g in graphs:
        assert_bits_equal(g(x), x * 2)
    streams, outputs = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for turn in range(20):
        for i, (g, stream) in enumerate(zip(graphs, streams, strict=True)):
            with torch.cuda.stream(stream):
                if (turn + i) % 2 == comm.rank:
                    torch.cuda._sleep(2_000_000)
                outputs.append(g(x))
    torch.cuda.synchronize()
    for one in outputs:
        assert_equal(one.unique().tolist(), [2.0], "sums")
    for ring in rings:
        ring.check()


@runs_on("many_ranks")
def test_sends_in_a_circle(comm: Any) -> None:
    """Everybody sends to the next and to the one before, over one ring, as in a pipeline (D4)."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    @graph.capture(outputs="copy")
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ahead, back = torch.zeros_like(x), torch.zeros_like(x)
        with comm.group():
            comm.send(x * 2, peer=after)
            comm.recv(ahead, peer=before)
            comm.send(x * 3, peer=before)
            comm.recv(back, peer=after)
        return ahead + 1, back + 1

    for turn in range(4):
        x = torch.full((2000,), comm.rank + turn * 10.0, device=comm.device)
        ahead, back = f(x)
        assert_bits_equal(
            ahead, torch.full((2000,), (before + turn * 10.0) * 2 + 1), f"ahead, turn {turn}"
        )
        assert_bits_equal(
            back, torch.full((2000,), (after + turn * 10.0) * 3 + 1), f"back, turn {turn}"
        )


@pytest.mark.parametrize("abort", [False, True])
@runs_on("unified_ranks")
def test_ring_ends_before_its_graphs(comm: Any, abort: bool) -> None:
    """A ring ends before its graphs, in mid use: graphs of all kinds go with it (D5)."""
    manager = commlib.CommContextManager.instance()
    ring = ring_of(comm, 90)
    weight = torch.ones(4, device=comm.device, requires_grad=True)

    def f(x: torch.Tensor) -> Any:
        y = x.detach() * 1
        return ring.all_reduce(torch.zeros_like(y), y) * weight

    both = graph.capture(lambda x: ops.all_reduce(ring.all_reduce(torch.zeros_like(x), x)))
    trained = graph.capture(f)
    x = torch.ones(4, device=comm.device)
    assert_bits_equal(both(x), torch.full((4,), 4.0), "over two rings")
    out = trained(x)
    out.sum().backward()
    assert_bits_equal(weight.grad, torch.full((4,), 2.0), "with gradients")
    pending = trained(x).sum()
    settle(comm)
    comm.exchange([])
    manager.close(90, abort=abort)
    assert_equal([len(both.entries), len(trained.entries)], [0, 0], "graphs left")
    with raises(GraphError, "released"):
        pending.backward()
    for g in (both, trained):
        with raises(CommError, "aborted" if abort else "closed"):
            g(x)
    whole(comm)
    del out, pending
    ring = ring_of(comm, 90)
    assert_bits_equal(both(x), torch.full((4,), 4.0), "captured again over the next ring")
    manager.close(90, abort=abort)
    del both, trained
    gc.collect()


def segments() -> None:
    """Replay collectives of all sizes in memory that torch's allocator maps piece by piece."""
    comm = commlib.init()
    for count in (100, 100_000, 20_000_000 if on_gpu(comm) else 1000):
        g = graph.capture(lambda x: ops.all_reduce(x * 2) + 1, outputs="copy")
        rest = []
        for turn in range(4):
            x = torch.full((count,), turn + 1.0, device=comm.device)
            assert g(x).unique().tolist() == [(turn + 1.0) * 2 * comm.size + 1]
            rest.append(x)  # the next one is elsewhere, in memory that was just mapped
        del rest
        if on_gpu(comm):
            torch.cuda.empty_cache()
            assert g(x).unique().tolist() == [8.0 * comm.size + 1]
    if comm.rank == 0:
        print("right")


@pytest.mark.gpu
def test_expandable_segments() -> None:
    """Graphs with NCCL's registration, under expandable segments (D7)."""
    code, out, err = run(
        *on_gpus("-m", "tests.test_graph_hazards_ranks"),
        fresh=True,  # torch reads the setting while it is loaded
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        FLAGS_dynamic_static_unified_comm="1",
    )
    assert code == 0, err
    assert out == "right\n"


@runs_on("unified_ranks")
def test_eager_calls_between_replays(comm: Any) -> None:
    """Eager calls of a ring between replays that hold calls of it (D8)."""
    for count in (7, 16_000_000 if on_gpu(comm) else 1000):
        g = graph.capture(lambda x: ops.all_reduce(x + 1), outputs="copy")
        x = torch.zeros(count, device=comm.device)
        for turn in range(8):
            x.fill_(turn)
            result = g(x)
            eager = ops.all_reduce(x * 2)
            apart = ops.all_reduce(x * 3, use_calc_stream=False)
            once_more = g(x)
            for one, want in ((result, turn + 1), (eager, turn * 2), (apart, turn * 3)):
                assert_bits_equal(one[:5], torch.full((5,), 2.0 * want), f"turn {turn}")
                assert_equal(bool((one == one[0]).all()), True, f"turn {turn}")
            assert_bits_equal(once_more[-5:], torch.full((5,), 2.0 * (turn + 1)), f"turn {turn}")


@runs_on("unified_ranks")
def test_threads_share_a_rank(comm: Any) -> None:
    """A process is one rank: its threads share rings and graphs (D9)."""
    g = graph.capture(lambda x: ops.all_reduce(x) * 3, outputs="copy")
    outputs: list[torch.Tensor] = []
    x = torch.ones(5, device=comm.device)

    def work() -> None:
        assert_equal(commlib.comm() is comm, True, "the ring of the process")
        for turn in range(3):
            outputs.append(g(x * (turn + 1)))
        settle(comm)

    helper = Helper(comm, work)
    settle(comm)
    helper.act()  # captured there
    helper.raise_problem()
    outputs.append(g(x * 4))  # and replayed here
    for turn, one in enumerate(outputs):
        assert_bits_equal(one, torch.full((5,), 6.0 * (turn + 1)), f"turn {turn}")
    assert_equal(len(g.entries), 1, "graphs")


@runs_on("gpu_ranks")
def test_priority_of_the_comm_stream(comm: Any) -> None:
    """Collectives on the comm stream go before other work, in a graph too (D10)."""
    least, greatest = torch.cuda.Stream.priority_range()
    assert_equal(greatest < least, True, "a device with priorities")
    for ring in (comm, ring_of(comm, 90)):
        assert_equal(ring.stream.priority, greatest, f"priority of ring {ring.ring_id}")


@runs_on("gpu_ranks")
def test_a_capture_that_begins_late(comm: Any) -> None:
    """What torch writes when a capture begins comes late: the replay after it draws right."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(*args: Any, **kwargs: Any) -> None:
        torch.cuda._sleep(1_000_000_000)  # longer than the capture takes
        begin(*args, **kwargs)

    def eager(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(2_000_000_000)  # the numbers are drawn after the late begin
        return torch.nn.functional.dropout(x)

    x = torch.ones(1000, device=comm.device)
    captured: Callable[..., Any] = graph.capture(eager, verify=False, outputs="copy")
    drawn: list[list[torch.Tensor]] = [[], []]
    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", late):
        for outputs, call in zip(drawn, (captured, eager), strict=True):
            torch.manual_seed(5)
            for _ in range(3):
                x = x.clone()  # the second call captures again, with memory of the graph's own
                outputs.append(call(x))
    for turn, (one, want) in enumerate(zip(*drawn, strict=True)):
        assert_bits_equal(one, want, f"call {turn}")


@runs_on("gpu_ranks")
def test_many_pools(comm: Any) -> None:
    """Torch numbers pools; numbers above 256 are objects, which torch's snapshot gives up."""
    for _ in range(300):
        torch.cuda.graph_pool_handle()
    for turn in range(10):
        module = torch.nn.Linear(4, 4).to(comm.device)
        captured, x = graph.capture(module), torch.ones(2, 4, device=comm.device)
        for _ in range(3):
            captured(x).sum().backward()
        grad = torch.clone(module.weight.grad)
        module.zero_grad()
        for _ in range(3):
            module(x).sum().backward()
        assert_bits_equal(grad, module.weight.grad, f"pool {turn}")
    numbers = [torch.cuda.graph_pool_handle()[1] for _ in range(3)]
    assert_equal(numbers, [numbers[0], numbers[0] + 1, numbers[0] + 2], "numbers of pools")


if __name__ == "__main__":
    segments()
    sys.exit(0)
