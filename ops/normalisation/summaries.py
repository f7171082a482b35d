"""The summaries of one batch of data_norm, and the groups that it skips."""

import torch

Tensor = torch.Tensor

SKIP_BELOW = 1e-7  # a group of columns whose first value is nearer to 0 is skipped


def skipped_groups(x: Tensor, slot_dim: int) -> Tensor:
    """Return a mask [N, C] of the groups whose first value is almost 0."""
    return (x[:, ::slot_dim].abs() < SKIP_BELOW).repeat_interleave(slot_dim, 1)


def batch_summaries(
    x: Tensor, means: Tensor, epsilon: float, slot_dim: int, average: bool
) -> Tensor:
    """Return [3, C]: size, sum and square sum of the batch."""
    count, squares = x.new_full((x.shape[1],), len(x)), (x - means).square_()
    if slot_dim > 0:
        skipped = skipped_groups(x, slot_dim)
        count = (len(x) - skipped.sum(0)).to(x.dtype)
        x, squares = x.masked_fill(skipped, 0), squares.masked_fill_(skipped, 0)
    batch = torch.stack([count, x.sum(0), squares.sum(0)])
    if average or slot_dim > 0:
        batch /= count.clamp(min=1)
    weight = count.clamp(max=1) if average else count
    batch[2] += weight * epsilon
    return batch
