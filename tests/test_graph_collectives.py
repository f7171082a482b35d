"""graph.capture: collectives, streams and agreement between the ranks of a ring."""

import gc
import time
from typing import Any

import pytest
import torch

import commlib
from commlib import graph, ops
from commlib.core.work import Work
from commlib.errors import CommError
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises, settle
from tests.support.hidden import HiddenCount
from tests.support.runs_on import runs_on
from tests.test_graph import whole


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
            assert_bits_equal(one, want, f"turn {turn}")
    (row,) = graph.report(g)
    assert_equal([text.split()[0] for text in row["collectives"]],
         ["all_gather", "all_reduce", "all_reduce", "reduce_scatter", "all_to_all", "broadcast",
          "send", "recv"])  # fmt: skip


@pytest.mark.parametrize("use_calc_stream", [True, False], ids=["calc", "comm"])
@runs_on("unified_ranks")
def test_collectives_with_a_root(comm: Any, use_calc_stream: bool) -> None:
    """On both streams each gives the bits of the eager call, for either root."""

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        for root in range(comm.size):
            total = ops.reduce(x * 3, root=root, use_calc_stream=use_calc_stream)
            most = ops.reduce(x, root=root, op="max", use_calc_stream=use_calc_stream)
            rows = ops.gather(total + most, root=root, use_calc_stream=use_calc_stream)
            parts = torch.cat([x + part for part in range(comm.size)])
            part = ops.scatter(parts, root=root, use_calc_stream=use_calc_stream)
            outputs += [total, most, rows * 2, part - x]
        return outputs

    g = graph.capture(f, outputs="copy")
    for turn in range(4):
        x = torch.randn(6, 2, generator=torch.Generator().manual_seed(2 * turn + comm.rank))
        x = x.to(comm.device)
        for number, (one, want) in enumerate(zip(g(x), f(x), strict=True)):
            assert_bits_equal(one, want, f"result {number}, turn {turn}")
    (row,) = graph.report(g)
    names = [text.split()[0] for text in row["collectives"]]
    assert_equal(names, ["reduce", "reduce", "gather", "scatter"] * comm.size, "in the graph")
    assert_equal((row["replays"], row["eager"]), (3, None), "replays")


def works() -> int:
    """Return how many handles of asynchronous calls this process holds."""
    gc.collect()
    return sum(type(one) is Work for one in gc.get_objects())


@runs_on("unified_ranks")
def test_a_broadcast_only_reads_the_tensor_of_its_root(comm: Any) -> None:
    """No run counts a write of the root, so that what its backward reads stays valid."""
    factor = torch.ones(3, device=comm.device)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x)
        for shared in (factor, y.detach() if comm.rank == 0 else torch.empty_like(x)):
            comm.broadcast(shared, shared, root=0)
        return y * factor

    g, before = graph.capture(f, outputs="copy"), factor._version
    for turn in range(4):
        x = torch.full((3,), 1.0 + turn, device=comm.device, requires_grad=True)
        g(x).sum().backward()
        s = torch.sigmoid(x.detach())
        assert_equal(torch.allclose(x.grad, s * (1 - s)), True, f"gradient of turn {turn}")
    assert_equal(factor._version > before, comm.rank != 0, "writes")


@runs_on("unified_ranks")
def test_works_of_a_capture(comm: Any) -> None:
    """Neither the capture nor the graph keeps a handle, waited for or not."""

    def f(x: torch.Tensor) -> torch.Tensor:
        work = ops.all_reduce(x, use_calc_stream=False, sync_op=False)
        ops.all_gather(x, use_calc_stream=False, sync_op=False)  # nobody waits
        y = x * 2
        return y + work.wait()

    x = torch.full((1000,), comm.rank + 1.0, device=comm.device)
    want = f(x)
    settle(comm)
    before = works()
    g = graph.capture(f, outputs="copy")
    for turn in range(3):
        assert_bits_equal(g(x), want, f"turn {turn}")
        settle(comm)
        assert_equal(works() - before, 0, f"works after call {turn}")
    assert_equal(graph.report(g)[0]["replays"], 2, "replays")


@runs_on("unified_ranks")
def test_streams(comm: Any) -> None:
    """A collective on the comm stream that nobody waits for joins by itself."""
    x = torch.ones(4, device=comm.device)

    def forgotten(x: torch.Tensor) -> Any:
        ops.all_reduce(x, use_calc_stream=False, sync_op=False)  # nobody waits
        return x + 1

    f = graph.capture(forgotten, outputs="copy")
    for turn in range(3):
        assert_bits_equal(f(x + turn), x + turn + 1)
    settle(comm)


@runs_on("gpu_ranks")
def test_other_streams(comm: Any) -> None:
    """Work on a stream outside the capture is refused with its line."""
    side, total = torch.cuda.Stream(), torch.zeros(4, device=comm.device)

    def elsewhere(joined: bool) -> None:
        current = torch.cuda.current_stream()
        if joined:
            side.wait_stream(current)
        with torch.cuda.stream(side):
            total.add_(1)
        if joined:
            current.wait_stream(side)

    g = graph.capture(elsewhere)
    with raises(
        GraphError, "add_", "not part of the capture", "test_graph_collectives.py", "wait_stream"
    ):
        g(False)
    whole(comm)
    total.zero_()
    for turn in range(1, 4):
        g(True)
        assert_equal(total.tolist(), [float(turn)] * 4, "on a stream of the capture")


@runs_on("unified_ranks")
def test_different_collectives(comm: Any) -> None:
    """Ranks that capture different collectives are notified, each with its first one."""

    def f(x: torch.Tensor) -> Any:
        y = ops.all_reduce(x)
        return ops.all_reduce(y, op="max" if comm.rank else "sum")

    g = graph.capture(f)
    if on_gpu(comm):
        with raises(GraphError, "different collectives", "number 1", "rank 0", "rank 1"):
            g(torch.ones(3, device=comm.device))
        settle(comm)
    h = graph.capture(lambda x: ops.all_reduce(x), outputs="copy")
    for turn in range(3):
        x = torch.full((3,), float(turn), device=comm.device)
        assert_bits_equal(h(x), x * comm.size, "the next capture")


@runs_on("unified_ranks")
def test_one_rank_fails(comm: Any) -> None:
    """An exception on one rank in the capture is an error on all of them; the next one works.

    No rank waits for the ring's timeout to notice it.
    """
    runs, over = HiddenCount(), list[int]()

    def f(x: torch.Tensor) -> Any:
        run = next(runs)
        y = ops.all_reduce(x)
        if comm.rank == 1 and run == 3 and not over:
            raise ValueError("rank 1 alone")
        return y * 2

    g = graph.capture(f, outputs="copy")
    x = torch.ones(3, device=comm.device)
    began = time.monotonic()
    with raises(GraphError, "rank 1:", "ValueError: rank 1 alone"):
        g(x)
    took = time.monotonic() - began
    assert took < comm.timeout / 2, f"noticed after {took:.1f} s of {comm.timeout:g} s"
    over.append(1)
    whole(comm)
    for _ in range(3):
        assert_bits_equal(g(x), torch.full((3,), 2.0 * comm.size), "captured at last")


@runs_on("unified_ranks")
def test_teardown(comm: Any) -> None:
    """A ring releases its graphs before its communicator; a call after that is refused."""
    ring = commlib.new_ring(90, range(comm.size))
    assert ring is not None
    g = graph.capture(lambda x: ring.all_reduce(torch.zeros_like(x), x))
    x = torch.ones(4, device=comm.device)
    g(x)
    held = g(x)
    assert_bits_equal(held, torch.full((4,), float(comm.size)))
    commlib.CommContextManager.instance().close(90)
    assert_equal(len(g.entries), 0, "graphs left")
    with raises(RuntimeError, "release"):
        print(held + 1)
    with raises(CommError, "closed"):
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
        assert_bits_equal(f(x), module(x), "written in place")
        module.weight.data = torch.zeros_like(module.weight)
        with raises(GraphError, "weight", "copy_", "reset()"):
            f.check()
        f.reset()
        assert_bits_equal(f(x), module(x), "captured again")
        module.bias = torch.nn.Parameter(torch.ones_like(module.bias))
        with raises(GraphError, "bias"):
            f.check()


@runs_on("unified_ranks")
def test_agree(comm: Any) -> None:
    """With agree= keys are compared before anything runs; where one rank has none, all capture."""
    g = graph.capture(lambda x, n: x * n, agree=0, outputs="copy")
    x = torch.ones(2, device=comm.device)
    for turn in range(2):
        assert_bits_equal(g(x, 3), x * 3, f"turn {turn}")
    if comm.rank == 0:
        g.reset()
    assert_bits_equal(g(x, 3), x * 3, "captured on all ranks")
    assert_equal(graph.report(g)[0]["replays"], 0, "replays of the new graph")
    with raises(GraphError, "different keys", "rank 0", "rank 1"):
        g(x, comm.rank)
    assert_bits_equal(g(x, 3), x * 3, "after the refusal")
