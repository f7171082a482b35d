"""The legacy sampling of class centres, on the given ring (in Paddle: ring 0)."""

import torch

from commlib import ops
from commlib.compat.paddle.checks import ring_of_rank

Tensor = torch.Tensor


def class_center_sample(
    label: Tensor,
    num_classes: int,
    num_samples: int,
    ring_id: int = 0,
    rank: int = 0,
    nranks: int = 1,
    fix_seed: bool = False,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """Sample this rank's class centres, among them every class that a label names.

    Source: operator ``class_center_sample``. It runs on the current stream and has no gradient.
    Its random draws differ from upstream's.

    Args:
        label: [N] global class ids, the same on every rank.
        num_classes: Number of this rank's classes.
        num_samples: Least number of classes to sample on each rank.
        ring_id: The ring.
        rank: This rank's position in the ring.
        nranks: Size of the ring.
        fix_seed: True draws from ``seed`` plus the rank, False from torch's default generator.
        seed: Ignored without ``fix_seed``.

    Returns:
        A pair: the index of each label in the samples of rank 0, 1, …, [N]; and the sampled
        classes of this rank, [max(num_samples, distinct labels of this rank)].

    Raises:
        ArgumentError: ``nranks`` or ``rank`` differs from the ring's.
        CommError: As ``ops.class_center_sample``.
    """
    ring_of_rank("class_center_sample", ring_id, nranks, rank)
    return ops.class_center_sample(
        label, num_classes, num_samples, ring_id, seed=seed if fix_seed else None
    )
