"""All ranks capture the same collectives in the same order, or none captures."""

import hashlib
import re
from collections.abc import Sequence

from commlib.core.ring import Ring
from commlib.errors import CommError, GraphError
from commlib.graph.watching.recorded_collective import PEER_TO_PEER, Collective

# What differs between ranks in the text of equal keys: the number of a device, an address.
_PLACE = re.compile(r", index=\d+| at 0x[0-9a-f]+")
_WORD = 7  # bytes of a digest in a number: it stays below 2**63


def raise_together(
    rings: Sequence[Ring],
    collectives: Sequence[Collective],
    problem: Exception | None,
    *,
    counted: bool,
) -> None:
    """Compare the outcomes of all members, then raise the error of this rank or of another one.

    ``counted``: work of the call has been done, so that it must not be made again.
    """
    try:
        if rings:
            check_ranks_agree(rings, collectives, problem, counted=counted)
    except CommError as error:
        if problem is None:
            raise
        if any(ring._health.fault is not None for ring in rings) and not isinstance(
            error, GraphError
        ):
            raise GraphError(f"the ring fails in the function: {problem}") from problem
        raise error from problem
    if counted and isinstance(problem, GraphError):
        raise GraphError(f"{problem}; work of the call had been done", done=True) from problem
    if problem is not None:
        raise problem


def check_ranks_agree(
    rings: Sequence[Ring],
    collectives: Sequence[Collective],
    problem: Exception | None,
    *,
    counted: bool,
) -> None:
    """Compare what this rank has seen with the other members of each ring; every one calls it.

    Blocks the host, at most each ring's timeout. Raises ``GraphError`` on all members when one has
    a ``problem``, or if their lists of collectives differ.
    """
    status = 2 * (counted or getattr(problem, "done", False)) + (problem is not None)
    status += 4 * getattr(problem, "reads", False)
    for ring in rings:
        ring_calls = [c for c in collectives if c.ring is ring and c.collective not in PEER_TO_PEER]
        rows = ring._hosts.exchange([status, *(_number(str(call)) for call in ring_calls)])
        done = any(row[0] & 2 for row in rows)
        if any(row[0] & 1 for row in rows):
            texts = _gather_texts(ring, _text_of(problem))
            failed: dict[str, list[int]] = {}  # ranks with the same text share one entry
            for position, row in enumerate(rows):
                if row[0] & 1:
                    failed.setdefault(texts[position], []).append(ring.ranks[position])
            bad = "; ".join(f"{_ranks_text(ranks)}: {text}" for text, ranks in failed.items())
            text = f"no rank of ring {ring.ring_id} captures: {bad}"
            raise GraphError(text, done=done, reads=any(row[0] & 4 for row in rows))
        if any(row[1:] != rows[0][1:] for row in rows):
            raise GraphError(_part(ring, ring_calls, [row[1:] for row in rows]), done=done)


def _text_of(problem: Exception | None) -> str:
    if problem is None or isinstance(problem, GraphError):
        return str(problem or "")
    return f"{type(problem).__name__}: {problem}"


def _ranks_text(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def same_key(ring: Ring, key: object, known: bool) -> bool:
    """Return True if every member has a graph for the common key; every member calls it.

    Blocks the host, at most the ring's timeout. Raises ``GraphError`` on all members if the keys
    differ in more than the number of a device.
    """
    text = _PLACE.sub("", repr(_ordered(key)))
    rows = ring._hosts.exchange([int(known), _number(text)])
    if any(row[1] != rows[0][1] for row in rows):
        keys = "; ".join(
            f"rank {ring.ranks[r]}: {its}" for r, its in enumerate(_gather_texts(ring, text))
        )
        raise GraphError(f"the ranks of ring {ring.ring_id} call with different keys: {keys}")
    return all(row[0] for row in rows)


def _ordered(key: object) -> object:
    """Return a key whose sets are in an order that does not depend on the process."""
    if isinstance(key, tuple):
        return tuple(map(_ordered, key))
    return sorted(map(repr, key)) if isinstance(key, frozenset) else key


def _part(ring: Ring, own: Sequence[Collective], lists: Sequence[list[int]]) -> str:
    """Return a text that names the first call in which the ranks' lists differ."""
    shortest = min(map(len, lists))
    first = next(
        (i for i in range(shortest) if len({row[i] for row in lists}) > 1),
        shortest,
    )
    mine = f"{own[first]} at {own[first].where}" if first < len(own) else "no further call"
    texts = _gather_texts(ring, mine)
    calls = "; ".join(f"rank {ring.ranks[r]}: {text}" for r, text in enumerate(texts))
    return (
        f"the ranks of ring {ring.ring_id} capture different collectives; number {first} is {calls}"
    )


def _gather_texts(ring: Ring, text: str) -> list[str]:
    """Return every member's text, by position in the ring."""
    return [
        data.decode(errors="replace") for data in ring._hosts.exchange_bytes(text.encode()[:2000])
    ]


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:_WORD], "little")
