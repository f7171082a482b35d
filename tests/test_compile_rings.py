"""torch.compile and rings that are closed and created again: other sizes, orders, worlds."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from torch._higher_order_ops.effects import with_effects
from torch.fx.experimental.proxy_tensor import make_fx

import commlib
from commlib import ops
from commlib.errors import PeerError, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.operator import calls, compile_whole, generating
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on

Tensor = torch.Tensor
RING = 1
ALL_RANKS = 2
COMPILE_S = 200  # the other ranks may wait for one that compiles on a busy machine
ORDERS = ((0, 1), (0, 1, 2), (2, 1, 0), (1, 0))

# Every operator whose result, or whose gradient, depends on the ring's size or the own position.
# Only powers of two and sums of small integers, so that no rounding differs.
BODIES: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": lambda x: ops.all_reduce(x, RING) * 2,
    "all_gather": lambda x: ops.all_gather(x * 2, RING) + 1,
    "reduce_scatter": lambda x: ops.reduce_scatter(x, RING) * 2,
    "all_to_all": lambda x: ops.all_to_all(x, RING) * 2,
    "concat": lambda x: ops.concat(x, RING) * 2,
    "split": lambda x: ops.split(x, RING) * 2,
    "identity": lambda x: ops.identity(x, RING) * 2,
    "broadcast": lambda x: ops.broadcast(x, RING, root=1) * 2,
    "gather": lambda x: ops.gather(x, RING, root=1).sum() * 2 + x.sum(),
    "scatter": lambda x: ops.scatter(x, RING, root=1) * 2 + x.sum(),
    "reduce": lambda x: ops.reduce(x, RING, root=1) * 2 + x.sum(),
    "partial_all_gather": lambda x: ops.partial_all_gather(x, RING) * 2 + x.sum(),
}


def all_of_them(x: Tensor) -> Tensor:
    """Return all results in one graph."""
    return torch.cat([body(x).reshape(-1) for body in BODIES.values()])


def routed(x: Tensor) -> Tensor:
    """Send row r of the own x to the r-th rank's expert and back."""
    size = len(commlib.comm(RING).ranks)
    counts = torch.full((size,), len(x) // size)
    received = ops.global_scatter(x, counts, counts, RING)
    return ops.global_gather(received * 2, counts, counts, RING)


def rings(comm: Any) -> Iterator[Any]:
    """Yield ring 1 in each of its forms on its members; all ranks meet in between."""
    everyone = commlib.new_ring(ALL_RANKS, comm.ranks, timeout=COMPILE_S)
    assert everyone is not None
    for ranks in ORDERS:
        if comm.rank in ranks:
            yield commlib.new_ring(RING, ranks, timeout=COMPILE_S)
            commlib.CommContextManager.instance().close(RING)
        everyone.barrier()
    commlib.CommContextManager.instance().close(ALL_RANKS)


def outcome(body: Callable[[Tensor], Tensor], rank: int) -> tuple[Tensor, Tensor]:
    """Return result and gradient for the input of ``rank``."""
    x = sample(rank, (12, 12), torch.int32).remainder(8).double().requires_grad_()
    out = body(x)
    out.backward(torch.arange(out.numel()).remainder(8).double().view(out.shape))
    assert x.grad is not None
    return out.detach(), x.grad


def created_again(comm: Any, names: tuple[str, ...], how: dict[str, Any]) -> None:
    """Compiled code gives eager's bits on every form of the ring."""
    named = {"all_of_them": all_of_them, "routed": routed, **BODIES}
    for name in names:
        compiled = compile_whole(named[name], **how)
        for ring in rings(comm):
            want, got = outcome(named[name], comm.rank), outcome(compiled, comm.rank)
            for one, other, label in zip(got, want, ("result", "gradient"), strict=True):
                assert_bits_equal(one, other, f"{name} on {ring}: {label}")


def test_rings_created_again(three_ranks: Ranks) -> None:
    three_ranks(created_again, ("all_of_them",), {}, deadline=240)


# What is compiled knows no engine: one of them is enough for what takes long.
@pytest.mark.parametrize("three_ranks", ["unified"], indirect=True)
def test_rings_created_again_with_any_sizes(three_ranks: Ranks) -> None:
    three_ranks(created_again, ("all_of_them",), {"dynamic": True}, deadline=240)


def test_rings_created_again_with_experts(three_ranks: Ranks) -> None:
    three_ranks(created_again, ("routed",), {}, deadline=120)


@pytest.mark.parametrize("three_ranks", ["unified"], indirect=True)
def test_rings_created_again_with_generated_code(three_ranks: Ranks) -> None:
    generating(three_ranks)(created_again, ("all_of_them",), {"backend": "inductor"}, deadline=300)


@runs_on("three_ranks")
def test_lost_root(comm: Any) -> None:
    """A root that the smaller ring has not is refused by compiled code before any launch."""
    x = torch.ones(6, 6)
    bodies: list[Callable[[Tensor], Tensor]] = [
        lambda x: ops.gather(x, RING, root=2),
        lambda x: ops.scatter(x, RING, root=2),
        lambda x: ops.reduce(x, RING, root=2),
        lambda x: ops.broadcast(x, RING, root=2),
    ]
    for body in bodies:
        compiled = compile_whole(body)
        commlib.new_ring(RING, (0, 1, 2))
        compiled(x)
        commlib.CommContextManager.instance().close(RING)
        ring = commlib.new_ring(RING, (0, 1))
        if ring is not None:
            before = calls(ring)
            with raises(PeerError, "root", "2", "ring 1"):
                compiled(x)
            assert_equal(calls(ring) - before, 0, "calls launched by a refused one")
            commlib.CommContextManager.instance().close(RING)
        comm.barrier()


REGISTERED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "all_gather": lambda to, x: to.all_gather(x, RING, 2, True),
    "reduce_scatter": lambda to, x: to.reduce_scatter(x, RING, 2, "sum", True),
    "all_to_all": lambda to, x: to.all_to_all(x, RING, 2, None, None, True),
    "concat": lambda to, x: to.concat(x, RING, 2, True),
    "split": lambda to, x: to.split(x, RING, 2, True),
    "gather": lambda to, x: to.gather(x, RING, 2, commlib.comm(RING).rank, 1, True),
    "scatter": lambda to, x: to.scatter(x, RING, 2, 1, True),
}


@runs_on("three_ranks")
def test_stale_graphs(comm: Any) -> None:
    """What has no guards, a graph that was traced by hand or a backward, names both rings."""
    x, graphs = torch.ones(6, 6, dtype=torch.float64), {}
    if commlib.new_ring(RING, (0, 1)) is not None:
        for name, op in REGISTERED.items():
            graphs[name] = make_fx(partial(op, torch.ops.commlib))(x)
            graphs[name](x)
        late = ops.all_gather(x.clone().requires_grad_(), RING).sum()
        commlib.CommContextManager.instance().close(RING)
        for graph in graphs.values():
            with raises(RingError, "ring 1", "closed"):
                graph(x)
    ring = commlib.new_ring(RING, (2, 1, 0))
    assert ring is not None
    for name, graph in graphs.items():
        with raises(RingError, "ring 1", name, " 2", " 3"):
            graph(x)
    if graphs:
        with raises(RingError, "ring 1", "reduce_scatter", " 2", " 3"):
            late.backward()
    assert_equal(calls(ring), 0, "calls launched by refused ones")


@runs_on("cpu_ranks")
def test_closed_ring(comm: Any) -> None:
    """Compiled code of a ring that is closed, and not created again, says so."""
    compiled = compile_whole(BODIES["all_gather"])
    x = torch.ones(2, 2)
    commlib.new_ring(RING, (1, 0))
    compiled(x)
    commlib.CommContextManager.instance().close(RING)
    with pytest.raises(Exception, match="ring 1 was closed"):
        compiled(x)


def remembered(x: Tensor) -> Tensor:
    """One ordered operator of each kind, and two that nobody orders."""
    ops.all_reduce(x)  # unused, twice, and yet two calls
    ops.all_reduce(x)
    x = ops.concat(ops.split(x * 2))
    x = ops.reduce_scatter(ops.all_gather(x + 1))
    last: Tensor = ops.broadcast(ops.all_to_all(x), root=1)
    return last


def halved(x: Tensor) -> Tensor:
    """Two operators that send nothing forward: torch caches these graphs in any case."""
    return ops.split(ops.identity(x) * 2) + 1


def cached(comm: Any, hits: bool) -> None:
    """Code from the persistent cache has eager's bits, calls and order."""
    for body in (remembered, halved):
        torch._dynamo.reset()
        counters.clear()
        before = calls(comm)
        want, eager = outcome(body, comm.rank), calls(comm)
        got = outcome(torch.compile(body, fullgraph=True), comm.rank)
        assert_equal(calls(comm) - eager, eager - before, "collectives of forward and backward")
        assert_bits_equal(got[0], want[0], f"result of {body.__name__}")
        assert_bits_equal(got[1], want[1], f"gradient of {body.__name__}")
        if hits and with_effects.cacheable():  # as far as this torch caches ordered ops at all
            for cache, entry in (("inductor", "fxgraph"), ("aot_autograd", "autograd")):
                assert_equal(
                    counters[cache][f"{entry}_cache_hit"] > 0, True, f"a hit in {cache}'s cache"
                )


@pytest.mark.parametrize("new_ranks", ["unified"], indirect=True)
def test_persistent_cache(new_ranks: NewRanks) -> None:
    """A second run finds the code of the first one, and no world uses that of another size."""
    for size, hits in ((2, False), (2, True), (3, False), (2, True)):
        with new_ranks(size) as ranks:
            generating(ranks)(cached, hits, deadline=120)
