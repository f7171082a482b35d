"""Memory that an exchange of rows needs: the error where there is none says what to pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch

from commlib.core.context import CommContext
from commlib.errors import ArgumentError, CommError
from commlib.ops.expert_parallel.row_counts import COLLECTIVES
from commlib.p2p.experts.tables import ExpertSpec, local_experts

_FEWER = "pass a smaller capacity, such as the largest number of rows that {} gets"
_LARGE = 1 << 30  # bytes from which on memory is tried before an exchange
_SUMS = 4  # results that the plain form holds at a time while it adds
_OPERATORS = {False: "expert_dispatch", True: "expert_combine"}
_WORDS = "allocate", "overflow"  # of torch's allocators on a CPU, and of sizes beyond 64 bits


class Needed(NamedTuple):
    """The memory of one call, and the text of the error where it can't be allocated.

    Attributes:
        collective: What the program calls.
        nbytes: How much.
        problem: What needs it, and that it can't be allocated.
        remedy: What the caller may pass instead.
    """

    collective: str
    nbytes: int
    problem: str
    remedy: str


def rows_needed(ring: CommContext, spec: ExpertSpec, copies: int, *, back: bool = False) -> Needed:
    """Return what ``copies`` of the rows of a rank's experts need; ``back``: on their way back."""
    local, capacity, width = local_experts(spec.num_experts, ring.size), spec.capacity, spec.width
    count = local * capacity * width * spec.dtype.itemsize * copies
    subject = f"x with {capacity} rows" if spec.counted and back else f"capacity={capacity}"
    experts = "1 expert" if local == 1 else f"{local} experts"
    rows = f"rows of width {width}" if spec.counted else f"the rows of {experts} with width {width}"
    remedy = _FEWER.format("a rank" if spec.counted else "an expert")
    if spec.counted and back:
        remedy += ", to global_scatter"
    return Needed(
        call_name(spec.counted, back), count, _problem(ring, subject, count, rows), remedy
    )


def result_needed(ring: CommContext, spec: ExpertSpec, tokens: int, copies: int = 1) -> Needed:
    """Return what ``copies`` of the result of the way back need: a row for each token."""
    dtype = spec.dtype if copies == 1 else torch.promote_types(spec.dtype, torch.float32)
    count = tokens * spec.width * dtype.itemsize * copies
    subject = f"capacity={tokens}" if spec.counted else f"the result of {tokens} tokens"
    problem = _problem(ring, subject, count, f"rows of width {spec.width}")
    remedy = _FEWER.format("a rank") if spec.counted else "pass fewer tokens to expert_dispatch"
    return Needed(call_name(spec.counted, True), count, problem, remedy)


def tables_needed(ring: CommContext, capacity: int, back: bool) -> Needed:
    """Return the error of tables of ``global_scatter`` and ``global_gather``."""
    problem = f"the tables of capacity={capacity} can't be allocated on {ring.device}"
    return Needed(COLLECTIVES[back], 0, problem, _FEWER.format("a rank"))


def _problem(ring: CommContext, subject: str, count: int, rows: str) -> str:
    return f"{subject} needs {count} bytes on {ring.device} for {rows}, which can't be allocated"


def call_name(counted: bool, back: bool) -> str:
    """Return what the program calls to send rows (``back``: to get them back).

    ``counted``: by their numbers, as in ``global_scatter``, in place of chosen experts.
    """
    return (COLLECTIVES if counted else _OPERATORS)[back]


@contextmanager
def enough_memory(ring: CommContext, needed: Callable[[], Needed]) -> Iterator[None]:
    """Raise ``ArgumentError`` if memory inside can't be allocated, and let other errors pass."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        if not (isinstance(error, torch.OutOfMemoryError) or _is_of_allocator(str(error))):
            raise
        collective, _, problem, remedy = needed()
        raise ArgumentError(f"{ring._describe(collective)}: {problem}; {remedy}") from error


def _is_of_allocator(text: str) -> bool:
    return any(word in text for word in _WORDS)


def check_memory(
    ring: CommContext, spec: ExpertSpec, *, back: bool = False, tokens: int = 0
) -> None:
    """Raise unless there is memory for the plain exchange, before it is launched.

    Args:
        ring: The ring.
        spec: The call.
        back: The way back, whose rows are the given ones.
        tokens: Of the result of the way back.
    """
    rows = partial(rows_needed, ring, spec, 2 * ring.size, back=back)  # sent and received
    for needed in (rows, partial(result_needed, ring, spec, tokens, _SUMS)):
        count = needed().nbytes
        if count >= _LARGE:
            with enough_memory(ring, needed):
                torch.empty(count, dtype=torch.uint8, device=ring.device)
