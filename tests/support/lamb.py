"""LAMB in float64 NumPy, and the programs that tests compare with it."""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

import commlib
from commlib import ops
from tests.support.checks import Array, assert_bits_equal, assert_equal, sample, wide

SHAPES = ((8, 3, 3, 3), (8,), (16, 8, 3, 3), (16,), (10, 16), (10,), (), (130, 7))
STEPS = 6
# Of operators.md: float32, and what 16 bits leave of the sum of gradients and of the weights.
ATOL = {torch.float32: 1.5e-7, torch.float16: 8e-4, torch.bfloat16: 8e-3}


@dataclass(frozen=True)
class Case:
    """Settings of one run.

    ``low`` is the dtype of every parameter whose number is odd. ``shards`` are the ranks that
    divide the state; 0 for all.
    """

    low: torch.dtype = torch.float32
    max_grad_norm: float = 0.0
    clip_after_allreduce: bool = True
    is_grad_scaled_by_nranks: bool = True
    gradient_accumulation_steps: int = 1
    use_master_acc_grad: bool = True
    use_master_param_norm: bool = True
    shards: int = 0
    crosses: bool = False
    shapes: tuple[tuple[int, ...], ...] = SHAPES
    lr: float = 2e-3
    weight_decay: float = 0.1

    def dtype(self, number: int) -> torch.dtype:
        return self.low if number % 2 else torch.float32

    @property
    def keywords(self) -> dict[str, Any]:
        others = ("low", "shards", "crosses", "shapes")
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if field.name not in others
        }


def parameters(case: Case, device: Any, seed: int = 0) -> list[torch.nn.Parameter]:
    """Return weights of about 0.1; every fourth one has no weight decay."""
    return [
        torch.nn.Parameter((sample(seed, shape, torch.float32, n) * 0.1).to(device, case.dtype(n)))
        for n, shape in enumerate(case.shapes)
    ]


def gradients(case: Case, rank: int, step: int) -> list[torch.Tensor]:
    """Return what ``rank`` computes in microbatch ``step``."""
    return [
        (sample(rank, shape, torch.float32, 100 * step + n) * 0.05).to(case.dtype(n))
        for n, shape in enumerate(case.shapes)
    ]


def optimizer(comm: Any, case: Case, params: list[torch.nn.Parameter]) -> Any:
    """Return the optimizer of ``case``; its rings are numbered from 20."""
    rings: dict[str, Any] = {}
    if case.shards:
        mine, ways = comm.rank // case.shards, comm.size // case.shards
        for node in range(ways):
            members = range(node * case.shards, (node + 1) * case.shards)
            made = commlib.new_ring(20 + node, members)
            rings |= {"shard_ring": made} if node == mine else {}
        for shard in range(case.shards if case.crosses else 0):
            made = commlib.new_ring(30 + shard, range(shard, comm.size, case.shards))
            rings |= {"cross_ring": made} if shard == comm.rank % case.shards else {}
    skipped = {id(params[n]) for n in range(3, len(params), 4)}
    return ops.DistributedFusedLamb(
        params,
        comm,
        exclude_from_weight_decay=lambda p: id(p) in skipped,
        **{**case.keywords, **rings},
    )


class Reference:
    """LAMB of whole float64 tensors, without shards."""

    def __init__(self, case: Case, weights: list[torch.Tensor]) -> None:
        self.case, self.steps = case, 0
        self.weights = [wide(w).astype("f8") for w in weights]
        self.means = [np.zeros_like(w) for w in self.weights]
        self.squares = [np.zeros_like(w) for w in self.weights]

    def step(self, by_rank: list[list[Array]]) -> None:
        """Update by every rank's gradients, which are sums over its microbatches."""
        case, ranks = self.case, len(by_rank)
        limit = case.max_grad_norm
        if limit and not case.clip_after_allreduce:
            ways = ranks if case.is_grad_scaled_by_nranks else 1
            by_rank = [clipped(grads, limit, ways) for grads in by_rank]
        total = [np.sum(each, axis=0) for each in zip(*by_rank, strict=True)]
        if not case.is_grad_scaled_by_nranks:
            total = [g / ranks for g in total]
        if limit and case.clip_after_allreduce:
            total = clipped(total, limit)
        self.steps += 1
        for n, grad in enumerate(total):
            self._update(n, grad)

    def _update(self, n: int, grad: Array) -> None:
        self.means[n] = 0.9 * self.means[n] + 0.1 * grad
        self.squares[n] = 0.999 * self.squares[n] + 0.001 * grad**2
        mean, square = (
            self.means[n] / (1 - 0.9**self.steps),
            self.squares[n] / (1 - 0.999**self.steps),
        )
        direction = mean / (np.sqrt(square) + 1e-6)
        if n < 3 or (n - 3) % 4:
            direction = direction + self.case.weight_decay * self.weights[n]
        weight_norm, other = np.linalg.norm(self.weights[n]), np.linalg.norm(direction)
        ratio = weight_norm / other if weight_norm > 0 and other > 0 else 1.0
        self.weights[n] = self.weights[n] - self.case.lr * ratio * direction


def clipped(grads: list[Array], limit: float, ways: int = 1) -> list[Array]:
    """Return gradients whose norm, times ``ways``, is at most ``limit``."""
    norm = ways * np.sqrt(sum((g**2).sum() for g in grads))
    return [g * min(1.0, limit / (norm + 1e-6)) for g in grads]


def give(case: Case, params: list[torch.nn.Parameter], rank: int, step: int) -> None:
    """Set the gradients of one microbatch: in the buffer, or elsewhere in every second one."""
    for param, grad in zip(params, gradients(case, rank, step), strict=True):
        if step % 2 or param.grad is None:
            param.grad = grad.to(param.device)
        else:
            param.grad.copy_(grad)


def train(
    case: Case, made: Any, params: list[torch.nn.Parameter], rank: int, first: int, last: int
) -> None:
    """Run the updates ``first`` to ``last``."""
    micro = case.gradient_accumulation_steps
    for step in range(first * micro, last * micro):
        give(case, params, rank, step)
        made.step()
        made.zero_grad(set_to_none=step % 3 == 0)


def summed(case: Case, rank: int, step: int) -> list[Array]:
    """Return the float64 sums of the gradients of all microbatches of an update."""
    micro = case.gradient_accumulation_steps
    drawn = [gradients(case, rank, step * micro + m) for m in range(micro)]
    return [
        np.sum([wide(grads[n]).astype("f8") for grads in drawn], axis=0)
        for n in range(len(case.shapes))
    ]


def agrees(comm: Any, case: Case, steps: int = STEPS) -> None:
    """The weights of all ranks are those of the reference after ``steps`` updates."""
    # Rank 0 has the right weights, which the optimizer sends to all.
    params = parameters(case, comm.device, seed=comm.rank)
    made = optimizer(comm, case, params)
    reference = Reference(case, list(parameters(case, "cpu")))
    for step in range(steps):
        train(case, made, params, comm.rank, step, step + 1)
        assert_equal(made.skipped.item(), False, f"skipped in step {step} of {case}")
        sums = [summed(case, rank, step) for rank in range(comm.size)]
        reference.step(sums)
    for n, (param, wanted) in enumerate(zip(params, reference.weights, strict=True)):
        assert_bits_equal(param, wanted, f"parameter {n} of {case}", atol=ATOL[case.dtype(n)])
    close_rings()


def close_rings() -> None:
    """Close the rings that ``optimizer`` has created."""
    for ring in range(20, 40):
        if commlib.CommContextManager.instance().has(ring):
            commlib.close_ring(ring)


def bits_of(params: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    """Return copies of the weights."""
    return [p.detach().clone() for p in params]


def small(case: Case) -> Case:
    """Return ``case`` with few parameters."""
    return replace(case, shapes=((3, 5), (70,), (), (9, 9), (4,)))
