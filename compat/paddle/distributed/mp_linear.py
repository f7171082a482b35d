"""The parts of ``split`` under upstream's private names: ``_linear``, ``_parallel_linear``, …."""

from typing import Any

import torch

from commlib.compat.paddle.distributed.groups import Group, member_ring
from commlib.compat.paddle.distributed.weights import checked_part
from commlib.compat.paddle.tensor_parallel import (
    c_concat,
    c_embedding,
    c_identity,
    c_split,
    mp_allreduce_sum,
)
from commlib.errors import ArgumentError

Tensor = torch.Tensor


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, name: object = None) -> Tensor:
    """Return ``x @ weight + bias``; ``weight`` is [in, out]. It does not communicate.

    Args:
        x: [..., in].
        weight: [in, out].
        bias: [out], or None.
        name: Ignored.
    """
    out = x @ weight
    return out if bias is None else out + bias


def set_var_distributed(var: Tensor | None) -> None:
    """Mark a tensor as one that differs between tensor-parallel ranks.

    Args:
        var: A weight; its ``is_distributed`` becomes True. Nothing happens for None.
    """
    marked: Any = var
    if var is not None:
        marked.is_distributed = True


_set_var_distributed = set_var_distributed


def _parallel_linear(
    x: Tensor,
    num_rows: int,
    num_cols: int,
    axis: int,
    param_attr: Tensor | None,
    bias_attr: Tensor | None,
    gather_out: bool,
    inner_rank: int,
    nranks: int,
    split_tensor: bool,
    name: object,
    group: Group | None = None,
) -> Tensor | None:
    """Return a linear layer whose weight is split over the group.

    Args:
        x: [..., in].
        num_rows: Rows of this rank's weight.
        num_cols: Columns of this rank's weight.
        axis: 0 splits the rows, 1 the columns.
        param_attr: This rank's weight, [num_rows, num_cols].
        bias_attr: Whole for axis 0, this rank's part for axis 1; None for no bias.
        gather_out: True sums the results of rows, or concatenates those of columns.
        inner_rank: This rank's position in the group.
        nranks: The size of the group.
        split_tensor: True splits ``x`` along its last axis first; for axis 0.
        name: Ignored.
        group: Default: the group of all ranks.

    Raises:
        ArgumentError: ``axis``, ``inner_rank`` or ``nranks`` is wrong, or there is no weight.
        ShapeError: The weight has another shape.
    """
    ring = member_ring("_parallel_linear", group)
    if ring is None:
        return None
    if axis not in (0, 1) or (inner_rank, nranks) != (ring.rank, ring.size):
        raise ArgumentError(
            f"{ring._describe('_parallel_linear')}: axis={axis}, inner_rank={inner_rank}, "
            f"nranks={nranks}; expected 0 or 1, and this rank's place; pass "
            f"inner_rank={ring.rank}, nranks={ring.size}"
        )
    weight = checked_part(ring, "_parallel_linear", param_attr, [num_rows, num_cols])
    ring_args = ring.rank, ring.size, ring.ring_id
    if axis == 1:
        out = _linear(c_identity(x, ring.ring_id), weight, bias_attr)
        return c_concat(out, *ring_args) if gather_out else out
    out = (c_split(x, *ring_args, True) if split_tensor else x) @ weight
    if not gather_out:
        return out
    out = mp_allreduce_sum(out, ring.ring_id, use_calc_stream=True)
    return out if bias_attr is None else out + bias_attr


def _parallel_embedding(
    x: Tensor,
    per_part_embeddings: int,
    origin_size: tuple[int, int],
    param_attr: Tensor | None,
    inner_rank: int,
    num_partitions: int,
    name: object,
    group: Group | None = None,
) -> Tensor | None:
    """Return an embedding whose rows are split over the group.

    Args:
        x: int32 or int64 ids, any shape.
        per_part_embeddings: Rows of this rank's part.
        origin_size: Rows and columns of the whole table.
        param_attr: This rank's part, [per_part_embeddings, columns].
        inner_rank: This rank's position in the group.
        num_partitions: The size of the group.
        name: Ignored.
        group: Default: the group of all ranks.

    Raises:
        ArgumentError: ``inner_rank`` or ``num_partitions`` is wrong, or there is no table.
        ShapeError: The table has another shape.
    """
    ring = member_ring("_parallel_embedding", group)
    if ring is None:
        return None
    if (inner_rank, num_partitions) != (ring.rank, ring.size):
        raise ArgumentError(
            f"{ring._describe('_parallel_embedding')}: inner_rank={inner_rank}, "
            f"num_partitions={num_partitions}; expected this rank's place; pass "
            f"inner_rank={ring.rank}, num_partitions={ring.size}"
        )
    part = [per_part_embeddings, origin_size[1]]
    table = checked_part(ring, "_parallel_embedding", param_attr, part)
    rows = c_embedding(table, x, inner_rank * per_part_embeddings, origin_size[0])
    return mp_allreduce_sum(rows, ring.ring_id, use_calc_stream=True)
