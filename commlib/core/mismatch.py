"""Calls are compared with those of the other members before they are launched (level 2).

Collectives go through the host exchange: one round of a number per call. A send and its receive
concern two members: these swap a header over the gloo group of the hosts, with their own tags.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch

from commlib.call_lines import call_line
from commlib.core.calls.call import Call
from commlib.core.calls.log import PAIRED, Facts
from commlib.core.failures import named
from commlib.core.launches import failure_of
from commlib.core.ring import Ring
from commlib.errors import MismatchError
from commlib.rendezvous.host_exchange import USER_TAGS

_HEADER = 2048  # bytes
_FIRST, _MOST = 16, 1 << 27  # of the tags of data, which the sender numbers
_HEADERS = 2 * USER_TAGS  # from here on two tags per tag of the program: a sender's, a receiver's


def compare(ring: Ring, calls: list[Call[Any]]) -> list[Call[Any]]:
    """Compare calls that are about to be launched as one with those of the other members.

    Blocks the host, at most the ring's timeout. Sends and receives on a CPU block nothing: their
    headers are compared while the call is under way. A send or receive of a group on GPUs that does
    not fit raises at its launch. The other calls of the group are launched first, because other
    members wait for them.

    Returns:
        The calls to launch instead.

    Raises:
        MismatchError: The members' calls differ; every member raises it.
    """
    collectives = [call for call in calls if call.entry is not None]
    if collectives or not calls:
        _agree(ring, collectives, calls[0].collective if len(calls) == 1 else "group")
    pairs = {at: _Pair(ring, call) for at, call in enumerate(calls) if call.collective in PAIRED}
    fit, unfit = [], []
    for at, call in enumerate(calls):
        if at not in pairs:
            fit.append(call)
        elif ring._fences is None:
            fit.append(_launched_by(call, _once_it_fits(pairs[at], call.launch)))
        elif (text := pairs[at].difference()) is None:
            fit.append(call)
        else:
            unfit.append(_launched_by(call, _refusal(text)))
    return fit + unfit


def _launched_by(call: Call[Any], launch: Callable[..., Any]) -> Call[Any]:
    """Return the same call with another launch: the given one may be made again."""
    return replace(call, launch=launch)


def _agree(ring: Ring, calls: list[Call[Any]], collective: str) -> None:
    """Compare collectives: codes of all of them, and who sends how much to whom."""
    summaries = [Facts.of(call.entry) for call in calls if call.entry is not None]  # all
    splits = [
        c.args for c, t in zip(calls, summaries, strict=True) if t.elements is None and c.args
    ]
    codes = [len(calls), *(one.code for one in summaries)]
    numbers = [number for takes, sends in splits for number in (*takes, *sends)]
    rows = ring._hosts.all_gather(collective, [*codes, *numbers])
    if all(row[: len(codes)] == codes for row in rows) and _fit(ring.size, rows, len(codes)):
        return
    shown = (_shown(call, str(fact)) for call, fact in zip(calls, summaries, strict=True))
    raise ring._hosts.mismatch(collective, ", then ".join(shown))


def _fit(size: int, rows: list[list[int]], start: int) -> bool:
    """Return True if every rank takes from each peer what that peer sends to it."""
    for at in range(start, len(rows[0]), 2 * size):
        takes = [row[at : at + size] for row in rows]
        sends = [row[at + size : at + 2 * size] for row in rows]
        if any(takes[i][j] != sends[j][i] for i in range(size) for j in range(size)):
            return False
    return True


def _shown(call: Call[Any], fact: str) -> str:
    """Describe a call to the reader of an error: also its shapes and splits."""
    tensor = call.out if call.x is None else call.x
    text = fact if tensor is None else f"{fact}, shape {tuple(tensor.shape)}"
    if call.collective == "all_to_all":
        text += f", receives {call.args[0]}, sends {call.args[1]}"
    return text


class _Pair:
    """The headers of one send and its receive; both members post theirs and read the other's.

    Messages with one tag meet in their order. The data has another tag, which the sender's header
    names: threads may launch it in another order.
    """

    def __init__(self, ring: Ring, call: Call[Any]) -> None:
        """Post this member's header, and the receive of the peer's; blocks nothing."""
        self.ring, self.collective, self.peer = ring, call.collective, call.args[0]
        sends = call.collective == "send"
        order = self.order = call.order
        engine = None if order is None else order.engine
        apart = () if engine is None else (engine.pg, order.name)
        group, number = ring._hosts.pair(self.peer, sends, *apart)
        tag = _HEADERS + 2 * sum(one - USER_TAGS for one in call.args[1:])
        self.tag = _FIRST + number % _MOST
        tensor = call.x if sends else call.out
        assert tensor is not None
        dtype = str(tensor.dtype).removeprefix("torch.")
        self.given = [dtype, tensor.numel(), "" if order is None else order.name]
        tagged = "".join(f" with tag {number - USER_TAGS}" for number in call.args[1:])
        named_group = "" if order is None else f" in group {order.name!r}"
        shown = f"{call.collective} {dtype} {tuple(tensor.shape)}{tagged}{named_group}"
        self.shown = f"{shown[:100]} at {call_line()[-200:]}"
        text = json.dumps([*self.given, self.tag, self.shown]).encode()[:_HEADER].ljust(_HEADER)
        self._own = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._other = torch.empty(_HEADER, dtype=torch.uint8, device="cpu")
        self._posted = [
            group.send([self._own], self.peer, tag if sends else tag + 1),
            group.recv([self._other], self.peer, tag + 1 if sends else tag),
        ]

    def difference(self) -> str | None:
        """Wait for the peer's header; return the text of a mismatch, None if the calls fit."""
        try:
            for work in self._posted:
                work.wait()
        except Exception as error:
            raise failure_of(self.ring, self.order, self.collective, error, (self.peer,)) from error
        *theirs, tag, shown = json.loads(bytes(self._other.tolist()))
        if theirs == self.given:
            if self.collective == "recv":
                self.tag = tag
            return None
        ring = self.ring
        return (
            f"{ring._describe(self.collective)}: detected mismatch with "
            f"{named([self.peer], ring.ranks)}: "
            f"rank {ring.ranks[ring.rank]}: {self.shown}; rank {ring.ranks[self.peer]}: {shown}. "
            f"Nothing was sent and the ring stays usable; send and receive as many elements of "
            f"one dtype"
        )


class _Handle:
    """A send or receive on a CPU whose headers and data a separate thread waits for.

    No call waits for a peer at its launch: two members may both send before they receive.
    """

    def __init__(self, step: Callable[[], None], name: str) -> None:
        self._step, self._error = step, None  # type: tuple[Callable[[], None], Exception | None]
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._step()
        except Exception as error:
            self._error = error

    def wait(self, timeout: timedelta | None = None) -> None:
        """Block until the call has ended, and raise what it met; as a work of torch does."""
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError("Operation timed out")
        if self._error is not None:
            raise self._error

    def is_completed(self) -> bool:
        """Return True if the call has ended."""
        return not self._thread.is_alive()


def _once_it_fits(pair: _Pair, launch: Callable[..., Any]) -> Callable[..., _Handle]:
    """Return a launch that moves data on a CPU once the header fits the peer's."""
    empty = getattr(launch, "__name__", "") == "nothing"

    def under_way(*args: Any) -> _Handle:
        def step() -> None:
            text = pair.difference()
            if text is not None:
                raise MismatchError(text)
            handle = launch(*args[:3], *(() if empty else (pair.tag,)))
            if handle is not None:
                handle.wait()

        return _Handle(step, f"commlib {pair.collective}")

    return under_way


def _refusal(text: str) -> Callable[..., None]:
    """Return a launch that raises instead."""

    def refused(*args: Any) -> None:
        raise MismatchError(text)

    return refused
