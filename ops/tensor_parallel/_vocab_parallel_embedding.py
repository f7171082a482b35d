"""vocab_parallel_embedding: look up ids in this rank's shard, zeros for other ids."""

from numbers import Integral
from typing import Any

import torch

from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.registered.library import needs_op
from commlib.streams import sees_capture


def vocab_parallel_embedding(
    ids: torch.Tensor, weight: torch.Tensor, start_index: int = 0, *, vocab_size: int = -1
) -> torch.Tensor:
    """Look up ids in this rank's shard of an embedding table.

    An all_reduce (sum) of the results completes the lookup; this operator does not communicate.
    The gradient is added to the shard's rows.

    Args:
        ids: Any shape, int32 or int64 ids of the whole vocabulary.
        weight: [rows, dim], the rows ``start_index`` to ``start_index + rows`` of the table.
        start_index: First id of the shard.
        vocab_size: If >= 0, check in eager code that every id is in [0, vocab_size). On a GPU the
            host then waits for the ids. Compiled and captured code does not check.

    Returns:
        ids.shape + [dim] of weight's dtype; zeros for ids of other shards.

    Raises:
        ArgumentError: ``ids`` or ``weight`` is not a tensor, ``start_index`` or ``vocab_size`` is
            not a whole number, ``start_index`` is negative, or an id is out of range.
        DtypeError: ``ids`` are not int32 or int64.
        ShapeError: ``weight`` is not a non-empty matrix.
    """
    _check(ids, weight, start_index, vocab_size)
    local = ids.long() - start_index  # 32 bits may not hold the difference
    in_shard = (local >= 0) & (local < weight.shape[0])
    rows = torch.nn.functional.embedding(local.masked_fill(~in_shard, 0), weight)
    return rows.masked_fill(~in_shard.unsqueeze(-1), 0)


def _check(ids: torch.Tensor, weight: torch.Tensor, start_index: int, vocab_size: int) -> None:
    for role, value in (("ids", ids), ("weight", weight)):
        if not isinstance(value, torch.Tensor):
            raise ArgumentError(
                f"vocab_parallel_embedding: {role} is {type(value).__name__}; expected a "
                f"torch.Tensor"
            )
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"vocab_parallel_embedding: ids are {ids.dtype}; pass ids.long()")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ShapeError(
            f"vocab_parallel_embedding: weight has shape {tuple(weight.shape)}; expected "
            f"[rows, dim] with rows and dim above 0"
        )
    if not _is_whole(start_index) or not 0 <= start_index < 2**63:
        raise ArgumentError(
            f"vocab_parallel_embedding: start_index={start_index!r:.60}; expected a whole number "
            f"from 0 to 2**63 - 1, the first id of this rank's rows; the operator takes no ring"
        )
    if not _is_whole(vocab_size):
        raise ArgumentError(
            f"vocab_parallel_embedding: vocab_size={vocab_size!r:.60}; expected a whole number, "
            f"the ids of all ranks; leave it away to check no ids"
        )
    if vocab_size < 0 or needs_op(ids) or not ids.numel():
        return
    if sees_capture(ids):
        return
    low, high = (int(bound) for bound in ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise ArgumentError(
            f"vocab_parallel_embedding: ids run from {low} to {high}; expected 0 to "
            f"{vocab_size - 1}"
        )


def _is_whole(value: Any) -> bool:
    """Return True for a whole number of Python, NumPy or a trace."""
    return isinstance(value, (Integral, torch.SymInt)) and not isinstance(value, bool)
