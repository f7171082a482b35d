"""The peer of benchmark `lamb`: an all_reduce per bucket and LAMB by foreach operators."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

Tensor = torch.Tensor

BUCKET_BYTES = 25 * 2**20  # as DistributedDataParallel
BETAS, EPS = (0.9, 0.999), 1e-6


class ForeachLamb:
    """LAMB with float32 copies of all weights on every rank; gradients are views of buckets.

    Args:
        params: Parameters of one dtype.
        lr: Learning rate.
        weight_decay: Weight decay of all parameters.
        max_grad_norm: Limit of the global norm.
    """

    def __init__(
        self, params: Sequence[Tensor], *, lr: float, weight_decay: float, max_grad_norm: float
    ) -> None:
        self.params, self.steps = list(params), 0
        self.lr, self.weight_decay, self.max_grad_norm = lr, weight_decay, max_grad_norm
        self.master = [p.detach().float() for p in params]
        self.means = [torch.zeros_like(w) for w in self.master]
        self.squares = [torch.zeros_like(w) for w in self.master]
        self.buckets = _buckets(self.params)

    @property
    def state(self) -> list[Tensor]:
        """The tensors that the optimizer keeps between steps."""
        return [*self.master, *self.means, *self.squares]

    @torch.no_grad()
    def step(self) -> None:
        """Average the gradients over the ranks, and update."""
        self._average()
        self.steps += 1
        grads = [p.grad.float() for p in self.params if p.grad is not None]
        norm = torch.stack(torch._foreach_norm(grads)).square().sum().sqrt()
        torch._foreach_mul_(grads, (self.max_grad_norm / (norm + EPS)).clamp(max=1))
        torch._foreach_lerp_(self.means, grads, 1 - BETAS[0])
        torch._foreach_mul_(self.squares, BETAS[1])
        torch._foreach_addcmul_(self.squares, grads, grads, 1 - BETAS[1])
        roots = torch._foreach_div(self.squares, 1 - BETAS[1] ** self.steps)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, EPS)
        directions = torch._foreach_div(self.means, 1 - BETAS[0] ** self.steps)
        torch._foreach_div_(directions, roots)
        torch._foreach_add_(directions, self.master, alpha=self.weight_decay)
        weights = torch.stack(torch._foreach_norm(self.master))
        lengths = torch.stack(torch._foreach_norm(directions))
        nonzero = (weights > 0) & (lengths > 0)
        ratios = torch.where(nonzero, weights / lengths, 1.0) * self.lr
        torch._foreach_mul_(directions, list(ratios.unbind()))
        torch._foreach_sub_(self.master, directions)
        torch._foreach_copy_(self.params, self.master)

    def _average(self) -> None:
        on_gpu = self.buckets[0].is_cuda
        op = dist.ReduceOp.AVG if on_gpu else dist.ReduceOp.SUM  # gloo has no mean
        works = [dist.all_reduce(bucket, op, async_op=True) for bucket in self.buckets]
        for work in works:
            assert work is not None
            work.wait()
        if not on_gpu:
            torch._foreach_div_(self.buckets, dist.get_world_size())


def _buckets(params: Sequence[Tensor]) -> list[Tensor]:
    """Move the gradients into buckets, in the order of the parameters."""
    groups: list[list[Tensor]] = [[]]
    size = 0
    for param in params:
        if size and size + param.nbytes > BUCKET_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(param)
        size += param.nbytes
    buckets = []
    for group in groups:
        bucket = group[0].new_empty(sum(p.numel() for p in group))
        parts = bucket.split([p.numel() for p in group])
        for param, part in zip(group, parts, strict=True):
            assert param.grad is not None
            part.view(param.shape).copy_(param.grad)
            param.grad = part.view(param.shape)
        buckets.append(bucket)
    return buckets
