"""Checks of the positions of new tokens, and of the pages that they are written to."""

import torch

from commlib.errors import ArgumentError
from commlib.ops.inference.kv_cache import KVCache, PagedCache

Tensor = torch.Tensor


def check_starts(where: str, x: Tensor, cache: KVCache, start: int | Tensor, *, read: bool) -> None:
    """Raise for positions outside of the cache, without a page, or in a page of two sequences.

    Args:
        where: The start of the error text.
        x: [sequences, tokens, hidden].
        cache: Keys and values.
        start: Position of the first new token, or one per sequence.
        read: Look at tensors too: that waits for a GPU.

    Raises:
        ArgumentError: A position does not fit.
    """
    count, length = x.shape[:2]
    first = last = start
    if isinstance(start, Tensor):
        if not read:
            return
        first, last = (int(bound) for bound in start.aminmax())
    if first < 0 or last > cache.capacity - length:
        starts = start.tolist() if isinstance(start, Tensor) else [start]
        sequence = next(
            row for row, at in enumerate(starts) if not 0 <= at <= cache.capacity - length
        )
        raise ArgumentError(
            f"{where}: position out of range: sequence {sequence} has {length} tokens "
            f"from position {starts[sequence]} on; expected positions 0 to "
            f"{cache.capacity - 1}; pass start from 0 to {cache.capacity - length}, or make "
            f"the cache larger"
        )
    if read and isinstance(cache, PagedCache):
        begins = start + x.new_zeros(count, dtype=torch.int64)
        _check_assigned(where, cache, begins + length)
        _check_own(where, cache, begins, length)


def _check_assigned(where: str, cache: PagedCache, lengths: Tensor) -> None:
    """Raise unless each sequence has the pages of its first ``lengths`` tokens."""
    table = cache.table[: len(lengths)]
    first = torch.arange(table.shape[1], device=table.device) * cache.page_size
    missing = (first < lengths[:, None]) & ((table < 0) | (table >= cache.pages))
    if bool(missing.any()):
        sequence = int(missing.any(1).nonzero()[0])
        length = int(lengths[sequence])
        raise ArgumentError(
            f"{where}: the cache is too small: {int(missing[sequence].sum())} of the "
            f"{-(-length // cache.page_size)} pages that sequence {sequence} needs for "
            f"{length} tokens are not assigned; call PagePool.reserve({sequence}, {length})"
        )


def _check_own(where: str, cache: PagedCache, starts: Tensor, length: int) -> None:
    """Raise if the new tokens of two sequences go into one page; reading a page is shared."""
    table = cache.table[: len(starts)].long()
    first = torch.arange(table.shape[1], device=table.device) * cache.page_size
    written = first + cache.page_size > starts[:, None]
    written &= first < starts[:, None] + length
    pages, uses = table[written].unique(return_counts=True)
    if bool((uses > 1).any()):
        page = int(pages[uses > 1][0])
        sequences = (written & (table == page)).any(1).nonzero().flatten().tolist()
        raise ArgumentError(
            f"{where}: sequences {sequences} write new tokens to page {page}; expected a page of "
            f"one sequence; assign pages by PagePool.reserve"
        )
