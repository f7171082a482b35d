"""Rank agreement: ranks compare their arguments before an operator launches anything."""

import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch

from commlib.core.context import CommContext
from commlib.errors import ArgumentError, CommError

_DTYPES = {
    zlib.crc32(str(one).encode()): one
    for one in vars(torch).values()
    if isinstance(one, torch.dtype)
}


class Fact(NamedTuple):
    """A value that must be the same on every rank, and the error if it differs."""

    name: str
    value: int | float | torch.dtype
    error: type[ArgumentError] = ArgumentError


@contextmanager
def refuse_together(ring: CommContext, collective: str, *, awaited: bool = True) -> Iterator[None]:
    """Report an argument error of the block to the other ranks, then raise it here.

    If the call is ``awaited``, the other ranks wait in ``check_ranks_agree`` and raise there. This
    rank raises after they have arrived, or at the ring's deadline.
    """
    try:
        yield
    except CommError:
        if awaited:
            with suppress(CommError):  # this rank's error is the one to raise
                ring.exchange([_number(collective)])
        raise


def check_ranks_agree(
    ring: CommContext, collective: str, facts: Sequence[Fact], values: Sequence[int] = ()
) -> list[list[int]]:
    """Return the ``values`` of every rank, in rank order; their lengths may differ.

    The hosts exchange their facts once; nothing is launched.

    Raises:
        ArgumentError: On every rank, if a rank has invalid arguments or called another operator.
            If a fact differs, every rank raises the fact's error.
    """
    mine = [_number(collective), *(_code(fact.value) for fact in facts)]
    rows = ring.exchange([*mine, *values])
    prefix = ring._describe(collective)
    others = [rank for rank, row in enumerate(rows) if row[:1] != mine[:1]]
    if others:
        raise ArgumentError(
            f"{prefix}: ranks {others} of the ring called another operator; every rank must "
            f"call the same operators in the same order"
        )
    invalid = [rank for rank, row in enumerate(rows) if len(row) == 1]
    if invalid:
        raise ArgumentError(f"{prefix}: invalid arguments on ranks {invalid}")
    for column, fact in enumerate(facts, 1):
        codes = [row[column] for row in rows]
        if len(set(codes)) > 1:
            differing = by_rank([_decoded(code, fact.value) for code in codes])
            raise fact.error(f"{prefix}: {fact.name}: {differing}; expected the same on every rank")
    return [row[len(mine) :] for row in rows]


def by_rank(values: Sequence[Any]) -> str:
    """List the ranks per value: ``5 on ranks [0, 2], 6 on ranks [1]``."""
    owners: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        owners.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on ranks {ranks}" for value, ranks in owners.items())


def _number(collective: str) -> int:
    return zlib.crc32(collective.encode())


def _code(value: float | torch.dtype) -> int:
    """Return ``value`` as a 64-bit integer."""
    if isinstance(value, torch.dtype):
        return zlib.crc32(str(value).encode())
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value)


def _decoded(code: int, like: object) -> object:
    """Return the value of another rank; ``like`` gives its type."""
    if isinstance(like, torch.dtype):
        return _DTYPES[code]
    return struct.unpack("<d", struct.pack("<q", code))[0] if isinstance(like, float) else code
