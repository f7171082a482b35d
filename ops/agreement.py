"""What the ranks of a ring tell each other before an operator launches anything."""

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
    """What must be the same on every rank, and the error of a call where it is not."""

    what: str
    value: int | float | torch.dtype
    error: type[ArgumentError] = ArgumentError


@contextmanager
def told(context: CommContext, verb: str, *, awaited: bool = True) -> Iterator[None]:
    """Let the other ranks know when this one refuses its arguments in the block.

    They wait for it in ``agree``, if the call is ``awaited`` there, and raise too. This rank raises
    what the block raised once they have come; if they do not, at the ring's deadline.
    """
    try:
        yield
    except CommError:
        if awaited:
            with suppress(CommError):  # what is wrong here counts more
                context.exchange([_number(verb)])
        raise


def agree(
    context: CommContext, verb: str, facts: Sequence[Fact], own: Sequence[int] = ()
) -> list[list[int]]:
    """Return the ``own`` numbers of every rank, in rank order; their lengths may differ.

    One exchange between the hosts; nothing is launched. Raises on every rank: ``ArgumentError``
    where a rank has refused its arguments or is in another operator, and a fact's error where its
    values differ.
    """
    mine = [_number(verb), *(_code(fact.value) for fact in facts)]
    every = context.exchange([*mine, *own])
    where = context._describe(verb)
    strangers = [rank for rank, row in enumerate(every) if row[:1] != mine[:1]]
    if strangers:
        raise ArgumentError(
            f"{where}: ranks {strangers} of the ring are in another operator; every rank must "
            f"call the same operators in the same order"
        )
    refused = [rank for rank, row in enumerate(every) if len(row) == 1]
    if refused:
        raise ArgumentError(f"{where}: the arguments of ranks {refused} are refused there")
    for place, fact in enumerate(facts, 1):
        codes = [row[place] for row in every]
        if len(set(codes)) > 1:
            values = by_rank([_decoded(code, fact.value) for code in codes])
            raise fact.error(f"{where}: {fact.what}: {values}; expected the same on every rank")
    return [row[len(mine) :] for row in every]


def by_rank(values: Sequence[Any]) -> str:
    """Write who has what: ``5 on ranks [0, 2], 6 on ranks [1]``."""
    owners: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        owners.setdefault(str(value), []).append(rank)
    return ", ".join(f"{value} on ranks {ranks}" for value, ranks in owners.items())


def _number(verb: str) -> int:
    return zlib.crc32(verb.encode())


def _code(value: float | torch.dtype) -> int:
    """Return a whole number of 64 bits that stands for ``value``."""
    if isinstance(value, torch.dtype):
        return zlib.crc32(str(value).encode())
    if isinstance(value, float):
        return int(struct.unpack("<q", struct.pack("<d", value))[0])
    return int(value)


def _decoded(code: int, like: object) -> object:
    """Return the value of another rank, of the kind of ``like``."""
    if isinstance(like, torch.dtype):
        return _DTYPES[code]
    return struct.unpack("<d", struct.pack("<q", code))[0] if isinstance(like, float) else code
