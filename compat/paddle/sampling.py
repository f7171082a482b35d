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
    """Return (remapped label, sampled local class centres) of ``ops.class_center_sample``.

    ``label``: [N] global ids, the same on every rank; ``num_classes`` of this rank. The first
    result is [N], the second [max(num_samples, distinct labels of this rank)]. ``seed`` counts with
    ``fix_seed`` alone, plus the rank; the draws are others than upstream's. On the current stream;
    no gradient. Raises ``ArgumentError`` when ``nranks`` or ``rank`` is not the ring's, otherwise
    as ``ops.class_center_sample``. Source: operator ``class_center_sample``.
    """
    ring_of_rank("class_center_sample", ring_id, nranks, rank)
    return ops.class_center_sample(
        label, num_classes, num_samples, ring_id, seed=seed if fix_seed else None
    )
