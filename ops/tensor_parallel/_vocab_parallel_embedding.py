"""vocab_parallel_embedding: look up ids in this rank's shard, zeros for other ids."""

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
        ArgumentError: ``start_index`` is negative or a tensor, or an id is out of range.
        DtypeError: ``ids`` are not int32 or int64.
        ShapeError: ``weight`` is not a non-empty matrix.
    """
    _check(ids, weight, start_index, vocab_size)
    local = ids - start_index
    in_shard = (local >= 0) & (local < weight.shape[0])
    rows = torch.nn.functional.embedding(local.masked_fill(~in_shard, 0), weight)
    return rows.masked_fill(~in_shard.unsqueeze(-1), 0)


def _check(ids: torch.Tensor, weight: torch.Tensor, start_index: int, vocab_size: int) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"vocab_parallel_embedding: ids are {ids.dtype}; pass ids.long()")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ShapeError(
            f"vocab_parallel_embedding: weight has shape {tuple(weight.shape)}; expected "
            f"[rows, dim] with rows and dim above 0"
        )
    if isinstance(start_index, torch.Tensor) or start_index < 0:
        raise ArgumentError(
            f"vocab_parallel_embedding: start_index={start_index!r:.60}; expected a whole number "
            f">= 0, the first id of this rank's rows; the operator takes no ring"
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
