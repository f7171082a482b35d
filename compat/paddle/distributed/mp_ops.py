"""Tensor-parallel operators over a group: ``fleet.layers.mpu.mp_ops``, and ``split``.

Each returns None, with a warning, on a process that is not a member of the group. Results are new
tensors; upstream sums in place in ``_mp_allreduce``.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from commlib.compat.paddle.distributed.groups import Group, member_ring
from commlib.compat.paddle.distributed.mp_linear import (
    _linear,
    _parallel_embedding,
    _parallel_linear,
    _set_var_distributed,
    set_var_distributed,
)
from commlib.compat.paddle.distributed.mp_losses import (
    _c_softmax_with_cross_entropy,
    _c_softmax_with_multi_label_cross_entropy,
)
from commlib.compat.paddle.distributed.reduce_op import ReduceOp
from commlib.compat.paddle.distributed.weights import checked_part
from commlib.compat.paddle.tensor_parallel import (
    c_concat,
    c_embedding,
    c_identity,
    c_split,
    mp_allreduce_sum,
)
from commlib.compat.paddle.unported import unported
from commlib.core.context import CommContext
from commlib.errors import ArgumentError, ShapeError

__all__ = [
    "_c_concat",
    "_c_identity",
    "_c_lookup_table",
    "_c_softmax_with_cross_entropy",
    "_c_softmax_with_multi_label_cross_entropy",
    "_c_split",
    "_linear",
    "_mp_allreduce",
    "_parallel_embedding",
    "_parallel_linear",
    "_set_var_distributed",
    "set_var_distributed",
    "split",
]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


Tensor = torch.Tensor


def _c_identity(
    tensor: Tensor, group: Group | None = None, skip_c_identity_dynamic: bool = False
) -> Tensor | None:
    """Return a copy of ``tensor`` whose gradient is summed over the group.

    Args:
        tensor: Any shape, the same on every rank.
        group: Default: the group of all ranks.
        skip_c_identity_dynamic: Ignored. Upstream saves the copy with it.
    """
    ring = member_ring("_c_identity", group)
    return None if ring is None else c_identity(tensor, ring.ring_id)


def _c_concat(tensor: Tensor, group: Group | None = None) -> Tensor | None:
    """Return the ``tensor`` of all ranks, concatenated along the last axis.

    Args:
        tensor: [..., n], the same shape on every rank.
        group: Default: the group of all ranks.
    """
    ring = member_ring("_c_concat", group)
    return None if ring is None else c_concat(tensor, ring.rank, ring.size, ring.ring_id)


def _c_split(tensor: Tensor, group: Group | None = None) -> Tensor | None:
    """Return this rank's part of ``tensor`` along the last axis.

    Args:
        tensor: [..., n]; the size of the group must divide n.
        group: Default: the group of all ranks.

    Raises:
        ShapeError: It does not divide n.
    """
    ring = member_ring("_c_split", group)
    return None if ring is None else c_split(tensor, ring.rank, ring.size, ring.ring_id, True)


def _mp_allreduce(
    tensor: Tensor,
    op: ReduceOp = ReduceOp.SUM,
    group: Group | None = None,
    use_calc_stream: bool = True,
    use_model_parallel: bool = True,
    skip_c_identity_dynamic: bool = False,
) -> Tensor | None:
    """Return the sum of ``tensor`` over the group; the gradient passes unchanged.

    Args:
        tensor: Any shape, the same on every rank.
        op: ``ReduceOp.SUM``.
        group: Default: the group of all ranks.
        use_calc_stream: True runs on the current stream, False on the ring's comm stream as
            ``mp_allreduce_sum`` does.
        use_model_parallel: Ignored.
        skip_c_identity_dynamic: Ignored.

    Raises:
        ArgumentError: ``op`` is another reduction.
    """
    ring = member_ring("_mp_allreduce", group)
    if ring is None:
        return None
    if op != ReduceOp.SUM:
        raise ArgumentError(
            f"{ring._describe('_mp_allreduce')}: op={op!r}; expected ReduceOp.SUM; call all_reduce "
            f"for other reductions"
        )
    return mp_allreduce_sum(tensor, ring.ring_id, use_calc_stream)


def _c_lookup_table(
    table: Tensor, index: Tensor, start_index: int = 0, vocab_size: int = -1, name: object = None
) -> Tensor:
    """Return the rows of this rank's shard that ``index`` names, and zeros for other ids.

    Args:
        table: [rows, dim], this rank's shard.
        index: int32 or int64 ids, any shape.
        start_index: Id of the first row of the shard.
        vocab_size: Number of ids; -1 checks nothing.
        name: Ignored.
    """
    return c_embedding(table, index, start_index, vocab_size)


def split(
    x: Tensor,
    size: Sequence[int],
    operation: str,
    axis: int = 0,
    num_partitions: int = 1,
    gather_out: bool = True,
    weight_attr: Tensor | None = None,
    bias_attr: Tensor | None = None,
    name: object = None,
) -> Tensor:
    """Return a linear layer or an embedding of ``x`` whose weight is split over all ranks.

    In upstream's static graphs the program creates the weight and owns it. Here the caller does:
    ``weight_attr`` and ``bias_attr`` are this rank's parts. The parallel layers create their own.

    Args:
        x: The input; ids for an embedding.
        size: Rows and columns of the whole weight.
        operation: "linear" or "embedding".
        axis: Axis of the weight that is split: 0 for an embedding, 0 (rows) or 1 (columns) for a
            linear layer. With 0 an ``x`` of full width is split first.
        num_partitions: Number of parts, the number of ranks.
        gather_out: True sums the results of rows, or concatenates those of columns.
        weight_attr: This rank's part of the weight.
        bias_attr: The bias of a linear layer: whole for axis 0, this rank's part for axis 1.
            Default: no bias.
        name: Ignored.

    Returns:
        [..., columns].

    Raises:
        ArgumentError: An argument is wrong, or ``weight_attr`` is not a tensor.
        ShapeError: ``size`` does not divide, or ``weight_attr`` has another shape.
    """
    ring = member_ring("split", None)
    assert ring is not None  # all processes are in the group of all ranks
    weight = _checked_part(ring, size, operation, axis, num_partitions, weight_attr)
    if operation == "embedding":
        return _summed(_c_lookup_table(weight, x, ring.rank * weight.shape[0], size[0]), ring)
    if axis == 0:
        rows = c_split(x, ring.rank, ring.size, ring.ring_id, True) if x.shape[-1] == size[0] else x
        out = rows @ weight
        out = _summed(out, ring) if gather_out else out
        return out if bias_attr is None or not gather_out else out + bias_attr
    out = c_identity(x, ring.ring_id) @ weight
    out = out if bias_attr is None else out + bias_attr
    return c_concat(out, ring.rank, ring.size, ring.ring_id) if gather_out else out


def _summed(x: Tensor, ring: CommContext) -> Tensor:
    return mp_allreduce_sum(x, ring.ring_id, use_calc_stream=True)


def _checked_part(
    ring: CommContext,
    size: Sequence[int],
    operation: str,
    axis: int,
    num_partitions: int,
    weight: Any,
) -> Tensor:
    """Return this rank's weight if it and the other arguments of ``split`` fit."""
    start = ring._describe("split")
    if operation not in ("linear", "embedding"):
        raise ArgumentError(f"{start}: operation={operation!r}; expected 'linear' or 'embedding'")
    if axis not in ((0, 1) if operation == "linear" else (0,)):
        raise ArgumentError(
            f"{start}: axis={axis!r}; expected 0, or 1 to split the columns of a linear layer"
        )
    if num_partitions != ring.size:
        raise ArgumentError(
            f"{start}: num_partitions={num_partitions}; expected the number of ranks; pass "
            f"num_partitions={ring.size}"
        )
    if len(size) != 2 or size[axis] % ring.size:
        raise ShapeError(
            f"{start}: size={tuple(size)}; expected rows and columns, number {axis} a multiple of "
            f"the {ring.size} ranks"
        )
    part = [length // (ring.size if number == axis else 1) for number, length in enumerate(size)]
    return checked_part(ring, "split", weight, part, "weight_attr")


if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Refuse an unknown name, with the nearest one or the reason why it is missing."""
        raise unported(__name__, __all__, name)
