"""vocab_parallel_embedding: look up the ids whose rows this rank holds, zeros for the others."""

import torch

from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.registered.library import needs_op
from commlib.streams import sees_capture


def vocab_parallel_embedding(
    ids: torch.Tensor, weight: torch.Tensor, start_index: int = 0, *, vocab_size: int = -1
) -> torch.Tensor:
    """Return rows of this rank's shard of an embedding table; an all_reduce (sum) completes them.

    ``ids``: any shape, int32 or int64, ids of the whole vocabulary. ``weight``: [rows, dim], the
    rows ``start_index`` to ``start_index + rows`` of the table. Result: ids.shape + [dim] of
    weight's dtype; ids of other shards give zeros. Gradient: scatter-add into the own rows. No
    communication. ``vocab_size >= 0`` checks in eager code that every id lies in [0, vocab_size),
    which on a GPU waits for the ids (not under compile or capture). Raises ``ArgumentError``.
    """
    _check(ids, weight, start_index, vocab_size)
    local = ids - start_index
    mine = (local >= 0) & (local < weight.shape[0])
    found = torch.nn.functional.embedding(local.masked_fill(~mine, 0), weight)
    return found.masked_fill(~mine.unsqueeze(-1), 0)


def _check(ids: torch.Tensor, weight: torch.Tensor, start_index: int, vocab_size: int) -> None:
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"vocab_parallel_embedding: ids are {ids.dtype}; pass ids.long()")
    if weight.dim() != 2 or 0 in weight.shape:
        raise ShapeError(
            f"vocab_parallel_embedding: weight has shape {tuple(weight.shape)}; expected "
            f"[rows, dim] with rows and dim above 0"
        )
    if start_index < 0:
        raise ArgumentError(f"vocab_parallel_embedding: start_index={start_index}; expected >= 0")
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
