"""Verdicts of a roll-call, and the errors that members raise for the negative ones."""

import json
from typing import Any

from commlib.errors import CommError, CommTimeout, EngineError, RingError, RingOrderError
from commlib.rendezvous.wait_table import long

GO = "go:"
LATE = "late:"
ORDER = "order:"
FAILED = "failed:"


def verdict_error(verdict: str, prefix: str, again: str = "") -> CommError:
    """Return the error that every member raises for ``verdict``.

    Args:
        verdict: The verdict.
        prefix: The start of the error text.
        again: The call that makes the ring, and on which ranks. Not read once all have joined.
    """
    if verdict.startswith(FAILED):
        return EngineError(f"{prefix}: {verdict[len(FAILED) :]}")
    if verdict.startswith(ORDER):
        return _order_error(json.loads(verdict[len(ORDER) :])["orders"], prefix)
    late = json.loads(verdict[len(LATE) :])
    step = "join" if "ring" in late else "finish connecting"
    remedy = f"{_remedy(late, again)}, or raise timeout= or FLAGS_comm_timeout_s"
    return CommTimeout(
        f"{prefix}: rank {late['by']} timed out after {late['seconds']:g} s waiting for ranks "
        f"{late['missing']} to {step}; {remedy}"
    )


def _order_error(orders: dict[str, list[list[Any]]], prefix: str) -> RingError:
    """Return the error for a cycle: different orders, or different members for one ring id."""
    created = [
        (rank, [(ring_id, long(members)) for ring_id, members in made])
        for rank, made in sorted(orders.items(), key=lambda item: int(item[0]))
    ]
    waiting = [(rank, *made[-1]) for rank, made in created]
    ring_ids, lists = ({str(each[field]) for each in waiting} for field in (1, 2))
    if len(ring_ids) == 1 and len(lists) > 1:
        text = "; ".join(f"rank {rank} gave {members}" for rank, _, members in waiting)
        return RingError(
            f"{prefix}: the ranks gave different members: {text}; pass the same list of ranks, "
            f"in the same order, on every rank"
        )
    lines = "; ".join(
        f"rank {rank} created {', then '.join(f'ring {i} {m}' for i, m in made)}"
        for rank, made in created
    )
    return RingOrderError(
        f"{prefix}: the members wait for each other: {lines}. Every rank must create the rings "
        f"that it shares with others in one order; make the calls of new_ring and split alike"
    )


def _remedy(late: dict[str, Any], again: str) -> str:
    """Return the remedy for missing ranks."""
    if "ring" not in late:  # they joined, and are still connecting
        return "check their logs"
    if not late["missing"]:
        return "all have joined, but the last of them did not start the ring: check the logs"
    if late["others"]:
        text = "; ".join(f"rank {rank} gave {other}" for rank, other in late["others"].items())
        return f"{text} for ring {late['ring']}: pass the same list on every rank"
    return f"start them or see their errors, then call {again}"
