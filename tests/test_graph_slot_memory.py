"""The GPU memory of slots: what they share, and what the runs before a capture leave."""

import gc
from ctypes import c_int64
from typing import Any
from unittest.mock import patch

import torch

from commlib import graph
from commlib.graph.backends.base import CpuBackend
from commlib.graph.backends.graph_memory import usage
from tests.support.checks import assert_bits_equal
from tests.support.runs_on import runs_on

SIDE = 2048
NBYTES = 4 * SIDE**2  # of a weight, and of its gradient
WIDTH, MICROBATCHES = 1024, 8


def release() -> None:
    """Release what earlier tests have left: a cached block would serve what a test allocates."""
    gc.collect()
    torch.cuda.empty_cache()


@runs_on("gpu_ranks")
def test_slots_share_the_memory_of_their_backwards(comm: Any) -> None:
    """Each backward copies its gradients at once, so that another one may write there."""
    torch.manual_seed(3)
    weight = torch.randn(SIDE, SIDE, device=comm.device, requires_grad=True)
    inputs = [torch.randn(8, SIDE, device=comm.device) for _ in range(8)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        return (x @ weight).sin()

    g = graph.capture(fn, inputs="copy", outputs="copy", verify=False)

    def gradients(call: Any, count: int) -> torch.Tensor:
        outs = [call(x) for x in inputs[:count]]
        grads = [torch.autograd.grad(out.sum(), weight)[0] for out in (*outs[1::2], *outs[::2])]
        return torch.stack(grads)

    gradients(g, 2)
    before = usage(comm.device, 0)["graph_bytes"]
    grads = gradients(g, 8)
    grown = usage(comm.device, 0)["graph_bytes"] - before
    assert_bits_equal(grads, gradients(fn, 8), "gradients of eight slots")
    assert grown < 6 * NBYTES / 2, f"six more slots took {grown / 2**20:.0f} MiB"


@runs_on("gpu_ranks")
def test_what_the_runs_before_a_capture_have_taken(comm: Any) -> None:
    """They run on a separate stream: nothing else could use the memory that torch keeps."""
    weight = torch.ones(SIDE, SIDE, device=comm.device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        parts = [weight * i for i in range(12)]
        return x + torch.stack(parts).sum()

    before = torch.cuda.memory_reserved(comm.device)
    g = graph.capture(fn, inputs="copy", outputs="copy", verify=False)
    g(torch.ones(3, device=comm.device))
    graphs = usage(comm.device, 0)["graph_bytes"]
    grown = torch.cuda.memory_reserved(comm.device) - before - graphs
    assert grown < 12 * NBYTES, f"{grown / 2**20:.0f} MiB more are taken outside of graphs"


@runs_on("gpu_ranks")
def test_what_a_verified_call_has_taken(comm: Any) -> None:
    """It runs the function itself, and nothing may be kept of the memory that this takes."""
    weight = torch.ones(SIDE, SIDE, device=comm.device, requires_grad=True)
    x = torch.ones(3, device=comm.device)

    def fn(x: torch.Tensor) -> torch.Tensor:
        parts = [weight * i for i in range(12)]
        return x + torch.stack(parts).sum()

    g = graph.capture(fn, inputs="copy", outputs="copy", verify=2)

    def train() -> None:
        torch.autograd.grad(g(x).sum(), weight)

    def infer() -> None:
        with torch.no_grad():
            g(x)

    for call in (train, infer):
        call()
        for _ in range(3):
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved(comm.device)
            call()
            grown = torch.cuda.memory_reserved(comm.device) - before
            assert grown < 4 * NBYTES, f"{call.__name__}: {grown / 2**20:.0f} MiB are kept"
    assert all(row["verify_seconds"] > 0 for row in graph.report(g)), "verified replays"


def saving(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Sum twelve values of the size of the weight; autograd saves each."""
    return x + torch.stack([(weight * i).sin().sum() for i in range(12)]).sum()


def outside_of_graphs(device: torch.device) -> int:
    """Return the bytes that torch has taken for all but graphs."""
    of_graphs: int = usage(device, 0)["graph_bytes"]
    return torch.cuda.memory_reserved(device) - of_graphs


def held_outside_of_graphs(device: torch.device) -> int:
    """Return the bytes of all tensors but those of graphs, in new memory or not."""
    return sum(
        segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) == (0, 0)
    )


@runs_on("gpu_ranks")
def test_what_a_first_backward_has_taken(comm: Any) -> None:
    """It runs on a side stream, where later calls only allocate gradients."""
    weight = torch.ones(SIDE, SIDE, device=comm.device, requires_grad=True)
    x = torch.ones(3, device=comm.device)
    release()
    before, held = outside_of_graphs(comm.device), held_outside_of_graphs(comm.device)
    g = graph.capture(lambda x: saving(weight, x), outputs="copy", verify=False)
    loss = g(x).sum()
    saved = held_outside_of_graphs(comm.device) - held
    assert saved > 10 * NBYTES, f"the call has saved {saved / 2**20:.0f} MiB"
    loss.backward()
    grown = outside_of_graphs(comm.device) - before
    assert grown < 4 * NBYTES, f"{grown / 2**20:.0f} MiB are kept"


@runs_on("gpu_ranks")
def test_what_verified_calls_in_flight_have_taken(comm: Any) -> None:
    """Two calls wait for their backward, so that none of the two takes memory at its end."""
    weight = torch.ones(SIDE, SIDE, device=comm.device, requires_grad=True)
    x = torch.ones(3, device=comm.device)
    g = graph.capture(lambda x: saving(weight, x), outputs="copy", slots=2, verify=True)
    g(x).sum().backward()
    release()
    before, held = outside_of_graphs(comm.device), held_outside_of_graphs(comm.device)
    for _ in range(2):
        losses = [g(x).sum() for _ in range(2)]
        saved = held_outside_of_graphs(comm.device) - held
        assert saved > 20 * NBYTES, f"both have saved {saved / 2**20:.0f} MiB"
        for loss in losses:
            loss.backward()
        del losses, loss
        grown = outside_of_graphs(comm.device) - before
        assert grown < 4 * NBYTES, f"{grown / 2**20:.0f} MiB are kept"
    assert all(row["verify_seconds"] > 0 for row in graph.report(g)), "verified replays"


class Saved:
    """Something that autograd keeps for a backward; counts where no capture finds the numbers."""

    alive, most = c_int64(0), c_int64(0)

    def __init__(self) -> None:
        self.alive.value += 1
        self.most.value = max(self.most.value, self.alive.value)

    def __del__(self) -> None:
        self.alive.value -= 1


class Keeping(torch.autograd.Function):
    """A step that keeps a ``Saved`` as long as its output's history lives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.kept = Saved()
        return x * 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 3


@runs_on("unified_ranks")
@patch.object(CpuBackend, "copies_arguments", new=False)  # as on a GPU
def test_a_second_capture_of_a_slot(comm: Any) -> None:
    """What the first one has saved is released before, so that it takes the same memory."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Keeping.apply(x)  # type: ignore[no-untyped-call]
        return out

    g = graph.capture(fn, outputs="copy", verify=False)
    xs = [torch.randn(5, device=comm.device, requires_grad=True) for _ in range(2)]
    g(xs[0]).sum().backward()
    Saved.most.value = Saved.alive.value = 1  # that of the slot; rehearsals have had more
    before = graph.report(g)[0]["capture_seconds"]
    g(xs[1]).sum().backward()
    assert graph.report(g)[0]["capture_seconds"] != before, "captured again, with memory for x"
    assert (Saved.alive.value, Saved.most.value) == (1, 1), "never two at once"


class Block(torch.nn.Module):
    """The MLP of a transformer block, with what it adds to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + more


class Shared(torch.nn.Module):
    """Another module over the same block."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(x)
        return out


def trained(block: Block, calls: list[Any], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the gradients of the last microbatch; all forwards come first."""
    outs = [call(x) for call, x in zip(calls, inputs, strict=True)]
    grads = list[torch.Tensor]()
    for x in inputs:
        grads.clear()
        out = outs.pop(0)
        grads = [*torch.autograd.grad(out, [x, *block.parameters()], torch.ones_like(out))]
    return grads


@runs_on("gpu_ranks")
def test_memory_of_many_slots(comm: Any) -> None:
    """As many forwards in flight as microbatches: little more than eager calls, in one pool."""
    torch.manual_seed(3)
    block, device = Block().to(comm.device), comm.device
    inputs, samples = (
        [torch.randn(4096, WIDTH, device=device, requires_grad=True) for _ in range(MICROBATCHES)]
        for _ in range(2)
    )
    trained(block, [block] * MICROBATCHES, inputs)  # workspaces of cuBLAS
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    wanted = trained(block, [block] * MICROBATCHES, inputs)
    eager = torch.cuda.max_memory_allocated(device) - before

    start = usage(device, 0)["graph_bytes"]
    g = graph.capture(block, outputs="copy", slots=MICROBATCHES, verify=False)
    for _ in range(3):
        actual = trained(block, [g] * MICROBATCHES, inputs)
    slots = usage(device, 0)["graph_bytes"] - start
    for number, (one, want) in enumerate(zip(actual, wanted, strict=True)):
        assert torch.allclose(one, want, rtol=1e-3, atol=1e-3), f"gradient {number}"

    start = usage(device, 0)["graph_bytes"]
    graphed = [torch.cuda.make_graphed_callables(Shared(block), (x,)) for x in samples]
    trained(block, graphed, inputs)
    private = usage(device, 0)["graph_bytes"] - start
    named = {"eager": eager, "slots": slots, "private pools": private}
    text = ", ".join(f"{name} {nbytes / 2**20:.0f} MiB" for name, nbytes in named.items())
    print(text, flush=True)
    assert slots < 1.3 * eager, text
    assert slots < private, text
