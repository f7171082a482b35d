"""Hazards of graphs: the programs that the rows of docs/graph_hazards.md come from."""

from typing import Any

import torch

import commlib
from commlib import graph, ops
from commlib.compat import deepspeed
from commlib.errors import CommError
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu, raises
from tests.support.runs_on import runs_on
from tests.test_graph_hazards import ring_of

# -- the programs that the rows come from ----------------------------------------------------------

WIDTH, ROWS, RATE = 8, 6, 0.05


class Sharded:
    """A layer whose weight is spread over the ranks, and a tensor-parallel pair after it."""

    def __init__(self, comm: Any, ring: Any) -> None:
        draw = torch.Generator().manual_seed(11)

        def shared(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw) * 0.3

        flat, up, down = shared(WIDTH * WIDTH), shared(WIDTH, 2 * WIDTH), shared(2 * WIDTH, WIDTH)
        part = slice(comm.rank * WIDTH, (comm.rank + 1) * WIDTH)
        self.ring = ring
        self.shard = flat.chunk(comm.size)[comm.rank].clone().to(comm.device)
        self.up, self.down = up[:, part].to(comm.device), down[part].clone().to(comm.device)
        self.dropped = torch.Generator(device=comm.device).manual_seed(5 + comm.rank)
        self.steps = torch.zeros((), dtype=torch.int64, device=comm.device)

    def step(self, x: torch.Tensor, target: torch.Tensor, rate: float) -> Any:
        """Gather, go forward and back, scatter the gradient, update the shard; returns the loss."""
        ring = self.ring
        full = ring.all_gather(self.shard.new_empty(WIDTH * WIDTH), self.shard)
        leaves = [full.view(WIDTH, WIDTH), self.up, self.down]
        weight, up, down = leaves = [one.detach().requires_grad_() for one in leaves]
        mask = torch.empty_like(x).bernoulli_(0.9, generator=self.dropped)
        hidden = ops.identity(torch.tanh(x @ weight) * mask, ring.ring_id)
        partial = torch.relu(hidden @ up) @ down
        y = ops.all_reduce(partial, ring.ring_id, backward="identity")
        loss = (y - target).square().mean()
        grads = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            mean = ring.reduce_scatter(
                torch.empty_like(self.shard), grads[0].reshape(-1).contiguous()
            )
            self.shard.sub_(mean, alpha=rate / ring.size)
            self.up.sub_(grads[1], alpha=rate)
            self.down.sub_(grads[2], alpha=rate)
            self.steps.add_(1)
        return loss.detach()


@runs_on("unified_ranks")
def test_a_sharded_step(comm: Any) -> None:
    """Sharded data parallel and tensor parallel as one captured step, bit for bit as eager."""
    manager = commlib.CommContextManager.instance()
    ring = ring_of(comm, 90)
    draw = torch.Generator().manual_seed(3 + comm.rank)
    x, target = (torch.zeros(ROWS, WIDTH, device=comm.device) for _ in range(2))
    plain, captured = Sharded(comm, ring), Sharded(comm, ring)
    step = graph.capture(captured.step, outputs="copy")
    losses = []
    for turn in range(4):
        x.copy_(torch.randn(ROWS, WIDTH, generator=draw))
        target.copy_(torch.randn(ROWS, WIDTH, generator=draw))
        assert_bits_equal(
            step(x, target, RATE), plain.step(x, target, RATE), f"loss of step {turn}"
        )
        for name in ("shard", "up", "down", "steps"):
            assert_bits_equal(getattr(captured, name), getattr(plain, name), f"{name}, step {turn}")
        assert_equal(
            captured.dropped.get_state().tolist() == plain.dropped.get_state().tolist(),
            True,
            f"random numbers, step {turn}",
        )
        losses.append(captured.shard.tolist())
    assert_equal(len({tuple(one) for one in losses}), 4, "updates")
    (row,) = graph.report(step)
    arguments = 0 if on_gpu(comm) else x.nbytes + target.nbytes  # a CPU always copies these
    assert_equal(row["bytes_copied"], arguments, "bytes copied: no parameters")
    assert_equal([text.split()[0] for text in row["collectives"]],
         ["all_gather", "all_reduce", "all_reduce", "reduce_scatter"])  # fmt: skip
    assert_bits_equal(
        step(x, target, 0.0), plain.step(x, target, 0.0), "another rate is another graph"
    )
    assert_equal(len(step.entries), 2, "kinds of calls")
    manager.close(90)  # before its graphs, on purpose
    assert_equal(len(step.entries), 0, "graphs left")
    with raises(CommError, "closed"):
        step(x, target, RATE)


@runs_on("unified_ranks")
def test_deepspeed_clip(comm: Any) -> None:
    """DeepSpeed's norm and clip: the coefficient stays on the device, lists may change."""

    def clip(tensors: list[torch.Tensor], most: float) -> Any:
        def clip_tensors(tensors: list[torch.Tensor], most: float) -> Any:
            squares = torch.stack([t.square().sum() for t in tensors]).sum()
            norm = ops.all_reduce(squares).sqrt()
            factor = torch.clamp(most / (norm + 1e-6), max=1.0)
            for t in tensors:
                t.mul_(factor)
            return norm

        return deepspeed.graph_process(True, clip_tensors, tensors, most)

    for length in (2, 5, 2):
        for most in (1.0, 100.0):
            for turn in range(5):
                tensors = [
                    torch.full((3,), turn + i + 1.0, device=comm.device) for i in range(length)
                ]
                want = torch.cat(tensors * comm.size).norm()
                factor = torch.clamp(most / (want + 1e-6), max=1.0)
                after = [t * factor for t in tensors]
                assert_bits_equal(clip(tensors, most), want, "norm", atol=1e-4)
                for t, expected in zip(tensors, after, strict=True):
                    assert_bits_equal(t, expected, f"clipped, turn {turn}", atol=1e-5)
    deepspeed.graph_clear()


@runs_on("unified_ranks")
def test_deepspeed_numbers_in_closures(comm: Any) -> None:
    """A number that the function's closure holds may change between calls."""
    total = torch.zeros(3, device=comm.device)
    value, want, places = 0.0, 0.0, set()

    def add_value() -> None:
        total.add_(value)

    for turn in range(6):
        drawn = [turn * 100.0 + i for i in range(1000)]
        value = next((one for one in drawn if id(one) in places), drawn[0])  # where one was before
        places.add(id(value))
        del drawn
        want += value
        deepspeed.graph_process(True, add_value)
        assert_equal(total.tolist(), [want] * 3, f"turn {turn}")
    deepspeed.graph_clear()


@runs_on("unified_ranks")
def test_deepspeed_gradient_is_none(comm: Any) -> None:
    """A gradient that the first call makes is added to by the later ones."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    total = torch.zeros(3, device=comm.device)

    def accumulate() -> None:
        (weight * 2).sum().backward()
        total.add_(weight.grad)

    for first in (True, False):
        weight.grad = None
        total.zero_()
        for turn in range(1, 6):
            deepspeed.graph_process(first, accumulate)
            assert_bits_equal(weight.grad, torch.full((3,), 2.0 * turn), f"turn {turn}, grad")
            assert_bits_equal(total, torch.full((3,), turn * (turn + 1.0)), f"turn {turn}")
    deepspeed.graph_clear()


@runs_on("unified_ranks")
def test_deepspeed_failed_capture(comm: Any) -> None:
    """A capture that fails leaves no entry that later calls would replay in vain."""
    total = torch.zeros(3, device=comm.device)
    reads = [True]

    def update() -> None:
        total.add_(1)
        if reads[0]:
            total.sum().item()

    for _ in range(2):
        with raises(GraphError, "item"):
            deepspeed.graph_process(True, update)
        assert_bits_equal(total, torch.zeros(3), "after the refusal")
    reads[0] = False
    for turn in range(1, 6):
        deepspeed.graph_process(True, update)
        assert_bits_equal(total, torch.full((3,), float(turn)), f"turn {turn}")
    deepspeed.graph_clear()
