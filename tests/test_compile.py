"""torch.compile: collectives keep their number, order and bits, whatever the backend does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from commlib import ops
from tests.support.checks import assert_bits_equal, assert_equal, bits, sample
from tests.support.operator import calls, compile_whole, generating, well_registered
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on


def chain(x: torch.Tensor) -> torch.Tensor:
    """Every differentiable operator after the other; only exact arithmetic between them.

    Scalings are powers of two, so that no backend's fused multiply-add can change a bit.
    """
    x = ops.identity(x) * 2
    x = ops.all_reduce(x) * 0.5
    x = ops.all_gather(torch.relu(x))
    x = ops.reduce_scatter(x * 0.25)
    x = ops.all_to_all(x + x)
    x = ops.broadcast(x * 2, root=1)
    x = ops.concat(ops.split(x) * 4)
    x = ops.all_reduce(x, op="avg", use_calc_stream=False)
    return ops.all_reduce(x, backward="identity", use_calc_stream=False, sync_op=False).wait()


def forward_and_backward(comm: Any, backend: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Result and gradient of the compiled chain have eager's bits."""
    for dtype in dtypes:
        compiled = compile_whole(chain, backend=backend)
        results = []
        for call in (chain, compiled, compiled):
            x = sample(comm.rank, (4, 6), dtype).to(comm.device).requires_grad_()
            before = calls(comm)
            out = call(x)
            out.backward(sample(5, (4, 6), dtype).to(comm.device))
            results.append((out.detach(), x.grad, calls(comm) - before))
        for out, grad, count in results[1:]:
            assert_bits_equal(out, results[0][0], f"result {dtype}")
            assert_bits_equal(grad, results[0][1], f"gradient {dtype}")
            assert_equal(count, results[0][2], "collectives of forward and backward")


def test_forward_and_backward(ranks: Ranks) -> None:
    ranks(forward_and_backward, "aot_eager", (torch.float64, torch.bfloat16))


def test_forward_and_backward_with_generated_code(ranks: Ranks) -> None:
    generating(ranks)(forward_and_backward, "inductor", (torch.float32,), deadline=240)


def unused(x: torch.Tensor) -> torch.Tensor:
    """Collectives whose results nobody uses, equal ones among them, around some that count."""
    ops.all_reduce(x)
    ops.all_reduce(x)
    ops.broadcast(x, root=1)
    y = ops.all_gather(x[:1])
    ops.barrier()
    ops.gather(x, root=1)
    ops.all_to_all(x)
    ops.reduce(x, root=1)
    z = ops.reduce_scatter(x.flip(0))
    ops.scatter(x)
    ops.all_reduce(y, op="max")
    return torch.cat([y, z, ops.broadcast(z, root=0)])


UNUSED_CALLS = 12


def one_compiled(comm: Any, backend: str) -> None:
    """One rank runs the graph, the other eager code: a call dropped or moved would not match.

    The shapes differ from call to call, so that no two neighbours could be exchanged unseen.
    """
    both = [sample(rank, (6, 3), torch.float64).to(comm.device) for rank in range(2)]
    compiled = compile_whole(unused, backend=backend)
    wants = []
    for ways in ((unused, unused), (compiled, unused), (unused, compiled), (compiled, compiled)):
        before = calls(comm)
        wants.append(ways[comm.rank](both[comm.rank]))
        assert_equal(calls(comm) - before, UNUSED_CALLS, "collectives")
        assert_bits_equal(wants[-1], wants[0], ways)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_unused_results(ranks: Ranks, backend: str) -> None:
    generating(ranks)(one_compiled, backend, deadline=180)


def relay(x: torch.Tensor, other: torch.Tensor, rank: int) -> torch.Tensor:
    """Messages in both directions whose order is all that pairs them."""
    for turn in range(3):
        if rank == turn % 2:
            ops.send(x * 2**turn, peer=1 - rank)
            ops.send(x[:1] + turn, peer=1 - rank)
        else:
            other = ops.recv(other, peer=1 - rank)
            ops.recv(other[:1], peer=1 - rank)
    return other


@runs_on("ranks")
def test_sends_and_receives(comm: Any) -> None:
    """A compiled chain of sends and receives against an eager one."""
    x = sample(comm.rank, (4,), torch.float64).to(comm.device)
    compiled = compile_whole(relay)
    wants = []
    for ways in ((relay, relay), (compiled, relay), (relay, compiled)):
        wants.append(ways[comm.rank](x, torch.zeros_like(x), comm.rank).clone())
        assert_bits_equal(wants[-1], wants[0], ways)


@runs_on("ranks", deadline=120)
def test_sizes(comm: Any) -> None:
    """Sizes may change: at most one graph for a first size and one for all others."""
    for call in (chain, unused):
        counter = CompileCounterWithBackend("aot_eager")
        compiled = compile_whole(call, backend=counter)
        for rows in (4, 6, 10, 16, 22):
            x = sample(comm.rank, (rows, 6), torch.float64).to(comm.device)
            assert_bits_equal(compiled(x), call(x), f"{call.__name__} of {rows} rows")
        if counter.frame_count > 2:
            raise AssertionError(f"{call.__name__}: {counter.frame_count} graphs for five sizes")
        compiled = compile_whole(call, dynamic=True)
        for rows in (4, 8):
            x = sample(comm.rank, (rows, 6), torch.float64).to(comm.device)
            assert_bits_equal(
                compiled(x), call(x), f"{call.__name__} of {rows} rows, dynamic from the start"
            )


@runs_on("ranks")
def test_mutation(comm: Any) -> None:
    """Inputs that are outputs elsewhere: aliases, in-place arithmetic, views of one buffer."""

    def body(x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        first = ops.all_reduce(x)
        x.add_(1)
        second = ops.all_reduce(x.t())
        x[:, 0].mul_(2)
        ops.all_reduce(x[::2], out=x[::2])
        return torch.cat([first, second.t(), x])

    x = sample(comm.rank, (4, 3), torch.float64).to(comm.device)
    before = bits(x)
    assert_bits_equal(compile_whole(body)(x), body(x), "in-place arithmetic around collectives")
    assert_equal(bool((bits(x) == before).all()), True, "input unchanged")


@runs_on("ranks")
def test_wrong_call(comm: Any) -> None:
    """A graph with a wrong call fails where it is compiled, before anything is launched."""
    x = torch.ones(3, 3, device=comm.device)
    before = calls(comm)
    bodies: list[Callable[[], Any]] = [
        lambda: ops.reduce_scatter(x),
        lambda: ops.split(x),
        lambda: ops.all_reduce(x, 77),
        lambda: ops.all_gather(x, 77),
    ]
    for body in bodies:
        try:
            compile_whole(body)()
        except Exception as error:  # torch wraps ours; the text must come through
            assert_equal("ring" in str(error), True, f"the text {error}")
        else:
            raise AssertionError("nothing was refused")
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_registrations(comm: Any) -> None:
    """Run torch's own checks of a registered operator: schema, fake against real, autograd."""
    x = sample(comm.rank, (4, 6), torch.float64).to(comm.device)
    registered = torch.ops.commlib
    rows: list[tuple[Any, tuple[Any, ...]]] = [
        (registered.all_reduce, (0, "sum", None, "all_reduce", True)),
        (registered.all_gather, (0, 2, True)),
        (registered.reduce_scatter, (0, 2, "sum", True)),
        (registered.all_to_all, (0, 2, None, None, True)),
        (registered.broadcast, (0, 1, True)),
        (registered.identity, (0, True)),
        (registered.concat, (0, 2, True)),
        (registered.split, (0, 2, True)),
    ]
    for operator, rest in rows:
        leaf = x.clone().requires_grad_()
        well_registered(operator.default, (leaf, *rest))
