"""The pages of each sequence of a paged cache, assigned on the host."""

from commlib.errors import ArgumentError
from commlib.ops.inference.kv_cache import PagedCache


class PagePool:
    """Assigns the pages of a ``PagedCache`` to its sequences, on the host.

    It is separate from the cache, because captured code reads the table and not the host's lists.
    """

    def __init__(self, cache: PagedCache) -> None:
        if not isinstance(cache, PagedCache):
            raise ArgumentError(
                f"PagePool: cache is {type(cache).__name__}; expected a PagedCache; pass "
                f"PagedCache.zeros(...)"
            )
        self._cache = cache
        self._free = list(range(cache.pages))[::-1]
        self._owned: list[list[int]] = [[] for _ in range(cache.sequences)]

    @property
    def free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    def reserve(self, sequence: int, tokens: int) -> None:
        """Give a sequence enough pages for its first ``tokens`` tokens.

        Args:
            sequence: The sequence's row of the table.
            tokens: Number of tokens that the sequence has in all.

        Raises:
            ArgumentError: The sequence does not exist, the tokens do not fit into a row of the
                table, or too few pages are free. Nothing is reserved then.
        """
        cache, owned = self._cache, self._pages(sequence)
        if not _is_number(tokens) or tokens < 0:
            raise ArgumentError(
                f"PagePool.reserve: tokens={tokens!r} for sequence {sequence}; expected an integer "
                f"from 0 on; pass the number of tokens that the sequence has in all"
            )
        missing = -(-tokens // cache.page_size) - len(owned)
        if tokens > cache.capacity:
            raise ArgumentError(
                f"PagePool.reserve: tokens={tokens} for sequence {sequence}; expected at most "
                f"{cache.capacity}, {cache.table.shape[1]} pages of {cache.page_size}; make the "
                f"cache with more pages_per_sequence"
            )
        if missing > self.free:
            raise ArgumentError(
                f"PagePool.reserve: sequence {sequence} needs {missing} more pages and {self.free} "
                f"of {cache.pages} are free; call release on a finished sequence, or make the "
                f"cache with more pages"
            )
        for _ in range(missing):
            page = self._free.pop()
            cache.table[sequence, len(owned)] = page
            owned.append(page)

    def release(self, sequence: int) -> None:
        """Free all pages of a finished sequence.

        Args:
            sequence: The sequence's row of the table.

        Raises:
            ArgumentError: The sequence does not exist.
        """
        owned = self._pages(sequence)
        self._free += owned[::-1]
        owned.clear()
        self._cache.table[sequence] = self._cache.pages

    def _pages(self, sequence: int) -> list[int]:
        if not _is_number(sequence) or not 0 <= sequence < len(self._owned):
            raise ArgumentError(
                f"PagePool: sequence={sequence!r}; expected 0 to {len(self._owned) - 1}; pass the "
                f"row of the table"
            )
        return self._owned[sequence]


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
