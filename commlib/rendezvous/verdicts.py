"""The verdicts of a roll-call that refuse a ring, and the errors that they become."""

import json
from typing import Any

from commlib.errors import CommError, CommTimeout, EngineError, RingError, RingOrderError
from commlib.rendezvous.wait_table import long

GO = "go:"
LATE = "late:"
ORDER = "order:"
FAILED = "failed:"


def refusal(verdict: str, where: str) -> CommError:
    """Return the error that every member raises for ``verdict``."""
    if verdict.startswith(FAILED):
        return EngineError(f"{where}: {verdict[len(FAILED) :]}")
    if verdict.startswith(ORDER):
        return _crossed(json.loads(verdict[len(ORDER) :])["orders"], where)
    late = json.loads(verdict[len(LATE) :])
    verb = "arrive" if "ring" in late else "finish connecting"
    return CommTimeout(
        f"{where}: ranks {late['missing']} did not {verb} within {late['seconds']:g} s (rank "
        f"{late['by']} waited); {_remedy(late)}, or raise timeout= or FLAGS_comm_timeout_s"
    )


def _crossed(orders: dict[str, list[list[Any]]], where: str) -> RingError:
    """Return the error of a circle: other orders, or other members under one ring id."""
    ranked = [
        (rank, [(ring_id, long(members)) for ring_id, members in made])
        for rank, made in sorted(orders.items(), key=lambda item: int(item[0]))
    ]
    waiting = [(rank, *made[-1]) for rank, made in ranked]
    ids, lists = ({str(one[at]) for one in waiting} for at in (1, 2))
    if len(ids) == 1 and len(lists) > 1:
        given = "; ".join(f"rank {rank} gave {members}" for rank, _, members in waiting)
        return RingError(
            f"{where}: its members are not the same everywhere: {given}; pass the same list of "
            f"ranks, in one order, on every rank"
        )
    lines = "; ".join(
        f"rank {rank} created {', then '.join(f'ring {i} {m}' for i, m in made)}"
        for rank, made in ranked
    )
    return RingOrderError(
        f"{where}: the members wait for each other: {lines}. Every rank must create the rings "
        f"that it shares with others in one order; call new_ring in order of ring id"
    )


def _remedy(late: dict[str, Any]) -> str:
    """Return what makes the missing ranks join a ring."""
    if "ring" not in late:  # they came, and are still connecting
        return "look at their logs"
    ring_id, members = late["ring"], late["members"]
    if not late["missing"]:
        return "all have signed in, but the last of them did not start the ring: look at the logs"
    if late["others"]:
        given = "; ".join(f"rank {rank} gave {other}" for rank, other in late["others"].items())
        return f"{given} for ring {ring_id}: pass the same list on every rank"
    call = f"new_ring({ring_id}, {members})" if ring_id else "init()"
    return f"start them and have them call commlib.{call}"
