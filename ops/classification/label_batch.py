"""A batch of labels on its device: facts, remapped labels and one rank's sample."""

from itertools import accumulate, pairwise

import torch

from commlib.core.tensors import dense_copy, is_dense
from commlib.ops.classification.permutation import HALF, STEP, mixed, permuted
from commlib.ops.triton_support import has_triton

Tensor = torch.Tensor

SEEDS = 2**62


def batch_of(label: Tensor) -> "Batch":
    """Return the batch in the form for its device."""
    kind = KernelBatch if label.is_cuda and has_triton() else Batch
    return kind(label if is_dense(label) else dense_copy(label))


class Batch:
    """The labels of a batch, with torch operators; the host waits for a GPU."""

    def __init__(self, label: Tensor) -> None:
        self.label = label

    def facts(self) -> list[int]:
        """Return a digest of the labels, the least and the greatest."""
        x = self.label.long()
        index = torch.arange(x.numel(), device=x.device)
        marks = mixed(mixed((x + index * STEP) & HALF) ^ ((x >> 32) & HALF))
        return [int(fact) for fact in (marks.sum(), *x.aminmax())]

    def sampled(
        self, bounds: list[int], rank: int, samples: int, seed: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the remapped labels, the sample of ``rank`` padded with -1, and its size [1].

        Rank q has the classes from ``bounds[q]`` on; the last of them is the number of all classes.
        """
        label = self.label.long()
        class_ids, places = label.unique(return_inverse=True)
        edges = torch.tensor(bounds, device=label.device)
        starts = torch.searchsorted(class_ids, edges)
        ends: list[int] = starts.tolist()
        counts = [max(samples, end - begin) for begin, end in pairwise(ends)]
        shift = torch.tensor([0, *accumulate(counts)], device=label.device) - starts
        owner = torch.bucketize(label, edges, right=True) - 1
        outside = (owner < 0) | (owner == len(counts))
        remapped = (places + shift[owner]).masked_fill_(outside, -1)
        first, end = bounds[rank], bounds[rank + 1]
        positives = class_ids[ends[rank] : ends[rank + 1]] - first
        others = self._others(positives, end - first, counts[rank] - len(positives), rank, seed)
        sampled = self.label.new_full((length_of(label, end - first, samples),), -1)
        sampled[: counts[rank]] = torch.cat([positives, others])
        return remapped.to(self.label.dtype), sampled, label.new_tensor(counts[rank : rank + 1])

    def _others(
        self, positives: Tensor, classes: int, count: int, rank: int, seed: int | None
    ) -> Tensor:
        """Return ``count`` classes that are not positives."""
        device, count_positives = positives.device, len(positives)
        if seed is None:
            seed = int(torch.empty(1, dtype=torch.int64, device=device).random_(SEEDS))
        others = permuted(seed + rank, count, classes - count_positives, device)
        # A positive precedes the i-th other class if at most i others precede the positive.
        skipped = positives - torch.arange(count_positives, device=device)
        return others + torch.searchsorted(skipped, others, right=True)


class KernelBatch(Batch):
    """The same on a GPU in a few kernels; the host waits only for the labels' facts.

    One bit per class marks the classes of the batch, so nothing is sorted.
    """

    def __init__(self, label: Tensor) -> None:
        from commlib.ops.classification import sample_kernels

        super().__init__(label)
        self.kernels = sample_kernels

    def facts(self) -> list[int]:
        """Return the same as ``Batch.facts``."""
        with torch.cuda.device(self.label.device):
            facts: list[int] = self.kernels.facts(self.label).tolist()
        return facts

    def sampled(
        self, bounds: list[int], rank: int, samples: int, seed: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the same as ``Batch.sampled``, without waiting."""
        label = self.label
        with torch.cuda.device(label.device):
            marked = self.kernels.marked(label, bounds[-1])
            start = torch.empty(1, dtype=torch.int64, device=label.device)
            start = start.random_(SEEDS) if seed is None else start.fill_(seed)
            edges = _on_device(bounds, label.device)
            length = length_of(label, bounds[rank + 1] - bounds[rank], samples)
            result: tuple[Tensor, Tensor, Tensor] = self.kernels.sample(
                label, *marked, edges, start, rank, samples, length
            )
        return result


def length_of(label: Tensor, classes: int, samples: int) -> int:
    """Return the most that a rank can sample."""
    length: int = torch.sym_max(samples, torch.sym_min(label.numel(), classes))
    return length


def _on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return ``numbers`` on a GPU without waiting; a capture can't copy from the host."""
    if not torch.cuda.is_current_stream_capturing():
        return torch.tensor(numbers, device="cpu").to(device, non_blocking=True)
    cells = torch.empty(len(numbers), dtype=torch.int64, device=device)
    for cell, number in zip(cells, numbers, strict=True):
        cell.fill_(number)
    return cells
