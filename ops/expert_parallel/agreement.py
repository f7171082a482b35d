"""Ranks compare the numbers that decide the sizes of their messages, before the first such call."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from commlib.core.context import CommContext
from commlib.errors import ArgumentError, CommTimeout, DtypeError, MismatchError, ShapeError
from commlib.ops.expert_parallel.checks import FLOATS
from commlib.ops.expert_parallel.plain_exchange import SAME_MASK, PlainExchange
from commlib.p2p.experts.tables import ExpertSpec

CAPACITY = (
    "expected the same number on every rank; make it from numbers that are equal on all ranks"
)


class Number(NamedTuple):
    """A number that must be the same on every rank, and the error if it differs.

    Attributes:
        value: The number.
        given: The text of the error, with ``{}`` for the values of all ranks.
        expected: What was expected, and the remedy.
        error: The class of the error.
        names: What the values 0, 1, ... are shown as. Empty: as numbers.
    """

    value: int
    given: str
    expected: str
    error: type[ArgumentError] = ArgumentError
    names: Sequence[object] = ()


# What every rank of a ring has compared. All ranks compare the same calls, so these are equal.
_compared: WeakKeyDictionary[CommContext, set[tuple[Any, ...]]] = WeakKeyDictionary()


def check_spec(
    ring: CommContext, collective: str, spec: ExpertSpec, exchange: PlainExchange | None = None
) -> None:
    """Raise on every rank unless all ranks make this call with the same numbers.

    Args:
        ring: The ring.
        collective: What the kernels and the call log name it.
        spec: The call. Ranks may differ in ``weighted`` and ``reports``.
        exchange: The exchange of the plain form, which knows the ranks that take part.

    Raises:
        ArgumentError: A number differs. Nothing was launched, and the ring stays usable.
        CommTimeout: Ranks do not compare: they make another call, or have compared theirs before.
        MismatchError: Ranks compare another call; every call with ``FLAGS_comm_check=2``.
    """
    if exchange is not None and exchange.may_miss_ranks:
        numbers = _numbers(collective, spec) + _mask(exchange)
        rows = exchange.all_gather(torch.tensor(_values(numbers), device=ring.device))
        _check_equal(ring, collective, numbers, rows.tolist())
        return
    check_once(ring, collective, spec[:6], lambda: _numbers(collective, spec))


def check_once(
    ring: CommContext,
    collective: str,
    key: tuple[Any, ...],
    numbers: Callable[[], Sequence[Number]],
) -> None:
    """Compare ``numbers`` unless all ranks have done so for this ``key``.

    The hosts wait for each other, at most the ring's timeout. No device takes part.
    """
    seen = _compared.setdefault(ring, set())
    if (collective, *key) in seen:
        return
    entries = numbers()
    try:
        rows = ring._hosts.exchange(_values(entries), collective, "with new numbers")
    except (CommTimeout, MismatchError) as error:
        shown = ", ".join(number.given.format(_shown(number, number.value)) for number in entries)
        raise type(error)(
            f"{error}; on this rank it is the first {collective} where {shown}: ranks that have "
            f"made such a call do not wait for others; pass the same numbers on every rank"
        ) from error
    _check_equal(ring, collective, entries, rows)
    seen.add((collective, *key))


def _numbers(collective: str, spec: ExpertSpec) -> list[Number]:
    role = "y" if collective == "expert_combine" else "x"
    experts = "expected the same number on every rank; pass the number of experts of all ranks"
    top_k = "expected the same top_k on every rank; fill rows up with -1"
    dtype = f"expected one dtype on every rank; cast {role}"
    width = "expected the same width on every rank; pad the rows"
    quantize = "expected the same quantize= on every rank"
    dtypes, forms = FLOATS, (None, "fp8")
    return [
        Number(spec.num_experts, "num_experts is {}", experts),
        Number(spec.capacity, "capacity is {}", CAPACITY, ShapeError),
        Number(spec.top_k, "expert_ids has {} choices per token", top_k, ShapeError),
        Number(dtypes.index(spec.dtype), f"{role} is {{}}", dtype, DtypeError, dtypes),
        Number(spec.width, f"{role} has width {{}}", width, ShapeError),
        Number(int(spec.quantize), "quantize is {}", quantize, names=forms),
    ]


def _mask(exchange: PlainExchange) -> list[Number]:
    """Return a number per rank: whether it takes part."""
    assert exchange.present is not None
    expected = f"expected the same mask on every rank that takes part; {SAME_MASK}"
    return [
        Number(int(present), f"active[{rank}] is {{}}", expected, names=(False, True))
        for rank, present in enumerate(exchange.present.tolist())
    ]


def _values(numbers: Sequence[Number]) -> list[int]:
    return [1, *(number.value for number in numbers)]


def _shown(number: Number, value: int) -> object:
    return number.names[value] if number.names else value


def _check_equal(
    ring: CommContext, collective: str, numbers: Sequence[Number], rows: list[list[int]]
) -> None:
    """Raise unless the rows of all ranks are equal; that of a rank that is left out is 0."""
    for column, number in enumerate(numbers, 1):
        if len({row[column] for row in rows if row[0]}) > 1:
            values = [_shown(number, row[column]) if row[0] else "left out" for row in rows]
            raise number.error(
                f"{ring._describe(collective)}: {number.given.format(values)}, by rank; "
                f"{number.expected}"
            )
