"""Memory for keys and values of earlier tokens: one block per sequence, or pages."""

from dataclasses import dataclass
from typing import Protocol

import torch

from commlib.ops.inference.config import DecoderConfig

Tensor = torch.Tensor


class KVCache(Protocol):
    """Keys and values of every layer: row b of a call's ``x`` is sequence b of the cache.

    ``keys`` and ``values`` have one tensor per layer, indexed by two numbers per position.
    """

    @property
    def keys(self) -> tuple[Tensor, ...]:
        """The keys of every layer."""

    @property
    def values(self) -> tuple[Tensor, ...]:
        """The values of every layer."""

    @property
    def sequences(self) -> int:
        """The number of sequences."""

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence."""

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two indices of tokens in the cache.

        Args:
            positions: [B, S], the position of each new token in its sequence.

        Returns:
            Two tensors [B, S], indices of the first two dims of each tensor of ``keys`` and
            ``values``.
        """

    def gathered(self, memory: Tensor, count: int) -> Tensor:
        """Return one layer's keys or values of the first sequences.

        Args:
            memory: One layer's tensor of ``keys`` or ``values``.
            count: Number of sequences, from the first one on.

        Returns:
            [count, capacity, heads, D].
        """


@dataclass(frozen=True, eq=False)
class ContiguousCache:
    """One block of ``capacity`` tokens per sequence.

    Args:
        keys: Per layer [sequences, capacity, key heads of the rank, head_dim].
        values: The same.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @classmethod
    def zeros(
        cls,
        config: DecoderConfig,
        *,
        layers: int,
        sequences: int,
        capacity: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "ContiguousCache":
        """Return an empty cache of one of ``ranks`` ranks."""
        shape = (sequences, capacity, config.local_kv_heads(ranks), config.head_dim)
        return cls(*_zeros(layers, shape, dtype, device))

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.keys[0].shape[0]

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence."""
        return self.keys[0].shape[1]

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two indices of tokens in the cache.

        Args:
            positions: [B, S], the position of each new token in its sequence.

        Returns:
            The sequences and the positions, two tensors [B, S].
        """
        rows = torch.arange(positions.shape[0], device=positions.device)
        return rows[:, None].expand_as(positions), positions

    def gathered(self, memory: Tensor, count: int) -> Tensor:
        """Return one layer's keys or values of the first sequences.

        Args:
            memory: One layer's tensor of ``keys`` or ``values``.
            count: Number of sequences, from the first one on.

        Returns:
            [count, capacity, heads, D], a view.
        """
        return memory[:count]


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Pages of ``page_size`` tokens; a table lists the pages of each sequence.

    The last page belongs to no sequence. Table entries without a page name it, so that a row of a
    padded batch can be written without harm.

    Args:
        keys: Per layer [pages + 1, page_size, key heads of the rank, head_dim].
        values: The same.
        table: [sequences, most pages of a sequence], int32 or int64.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    table: Tensor

    @classmethod
    def zeros(
        cls,
        config: DecoderConfig,
        *,
        layers: int,
        sequences: int,
        pages: int,
        page_size: int,
        pages_per_sequence: int,
        ranks: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "PagedCache":
        """Return an empty cache of one of ``ranks`` ranks, whose sequences have no pages yet."""
        shape = (pages + 1, page_size, config.local_kv_heads(ranks), config.head_dim)
        table = torch.full((sequences, pages_per_sequence), pages, device=device)
        return cls(*_zeros(layers, shape, dtype, device), table)

    @property
    def sequences(self) -> int:
        """The number of sequences."""
        return self.table.shape[0]

    @property
    def capacity(self) -> int:
        """The most tokens of a sequence."""
        return self.table.shape[1] * self.page_size

    @property
    def page_size(self) -> int:
        """The tokens of a page."""
        return self.keys[0].shape[1]

    @property
    def pages(self) -> int:
        """The number of pages that sequences can have."""
        return self.keys[0].shape[0] - 1

    def places(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two indices of tokens in the cache.

        Args:
            positions: [B, S], the position of each new token in its sequence.

        Returns:
            The pages and the offsets inside them, two tensors [B, S].
        """
        rows = self.table[: positions.shape[0]].long()
        return rows.gather(1, positions // self.page_size), positions % self.page_size

    def lacks(self, positions: Tensor) -> Tensor:
        """Return where a sequence that has pages has none for a position.

        Args:
            positions: [B, S], inside of the capacity.

        Returns:
            Bools [B, S].
        """
        rows = self.table[: positions.shape[0]].long()
        pages = rows.gather(1, positions // self.page_size)
        return ~self._is_page(pages) & self._is_page(rows[:, :1])

    def _is_page(self, numbers: Tensor) -> Tensor:
        return (numbers >= 0) & (numbers < self.pages)

    def gathered(self, memory: Tensor, count: int) -> Tensor:
        """Return one layer's keys or values of the first sequences.

        Args:
            memory: One layer's tensor of ``keys`` or ``values``.
            count: Number of sequences, from the first one on.

        Returns:
            [count, capacity, heads, D], a copy.
        """
        return memory[self.table[:count].long()].flatten(1, 2)


def _zeros(
    layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return keys and values."""
    keys, values = (
        tuple(torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers))
        for _ in range(2)
    )
    return keys, values
