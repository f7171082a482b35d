"""The host exchange of one ring: integers that every member sends to every member."""

import json
import threading
import zlib
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

from commlib.call_lines import call_line
from commlib.deadlines import Deadline, bounded
from commlib.errors import ArgumentError, CommTimeout, MismatchError
from commlib.rendezvous import host_exchange
from commlib.rendezvous.call_board import CallBoard
from commlib.rendezvous.connection import CLOSE_S, Connection
from commlib.rendezvous.identity import Health, RingIdentity
from commlib.rendezvous.roll_call import Meeting
from commlib.rendezvous.shared_memory import Rounds, SharedMemoryAllGather, open_shared_memory
from commlib.rendezvous.store import BoundedStore, EngineStore

_LOOK_S = 0.05  # how often a barrier in the store looks
_LATE_S = 5.0  # how long the store may take in addition
_BYTES = 7  # bytes that are sent as one number: it stays below 2**63


class HostExchange:
    """Carries what ranks agree on before a launch: shapes, counts, options.

    Integers go through shared memory on one host and over TCP (gloo) between several. The first
    call sets this up. No GPU takes part, so an exchange is allowed during a capture.
    """

    def __init__(self, identity: RingIdentity, meeting: Meeting | None, health: Health) -> None:
        self.identity, self._meeting, self._health = identity, meeting, health
        self._lock = threading.Lock()
        self._connections: list[Connection] = []  # to the store, until the ring ends
        if meeting is not None:
            meeting.store.connection.hold()
            self._connections.append(meeting.store.connection)
        self._rounds: Rounds | None = None
        self._shared_memory: SharedMemoryAllGather | None = None
        self._group: Any = None  # the gloo group that this object has made
        self._engine_group: Any = None  # the engine's own gloo group
        self._pairs: Counter[tuple[int, bool, str]] = Counter()
        self._barriers = 0

    def share_group(self, group: Any) -> None:
        """Use the gloo group of an engine, which also releases it."""
        self._engine_group = group

    # -- exchanges ---------------------------------------------------------------------------------

    def exchange(
        self, values: Sequence[int], collective: str = "exchange", detail: str = ""
    ) -> list[list[int]]:
        """Return every rank's integers, in rank order; see ``CommContext.exchange``.

        Args:
            values: Integers of 64 bits.
            collective: What the program has called, the same on every member.
            detail: What else every member must give alike, such as a root.

        Raises:
            MismatchError: The members exchange for different calls.
        """
        try:
            numbers = host_exchange.whole_numbers(values)
        except ArgumentError as error:
            raise ArgumentError(f"{self.identity.describe(collective)}: {error}") from None
        purpose = f"{collective} {detail}".rstrip()
        code = -1 - zlib.crc32(purpose.encode())  # that of a compared collective is not negative
        rows = self.all_gather(collective, [code, *numbers])
        if any(row[0] != code for row in rows):
            raise self.mismatch(collective, purpose)
        return [row[1:] for row in rows]

    def exchange_bytes(
        self, data: bytes, collective: str = "exchange", detail: str = ""
    ) -> list[bytes]:
        """Return every rank's ``data``, in rank order; lengths may differ."""
        numbers = (data[at : at + _BYTES] for at in range(0, len(data), _BYTES))
        values = [len(data), *(int.from_bytes(part, "little") for part in numbers)]
        rows = self.exchange(values, collective, detail)
        return [
            b"".join(number.to_bytes(_BYTES, "little") for number in row[1:])[: row[0]]
            for row in rows
        ]

    def all_gather(self, collective: str, numbers: list[int]) -> list[list[int]]:
        """Exchange integers on behalf of ``collective``, and compare nothing."""
        with self._lock:
            if self._health.fault is not None:
                raise self._health.unusable(collective)
            if self.identity.size == 1:
                return [numbers]
            try:
                self._rounds = self._rounds or self._open_rounds()
                return host_exchange.all_gather(self._rounds, numbers)
            except Exception as error:
                raise self._health.failed(collective, error) from error
            except BaseException:
                self._health.interrupted(collective)
                raise

    def mismatch(self, collective: str, given: str) -> MismatchError:
        """Return the error of calls that differ; every member has seen it and calls this."""
        ranks = self.identity.ranks
        rows = self.exchange_bytes(json.dumps([given, call_line()]).encode())
        calls: dict[str, list[int]] = {}
        for rank, row in zip(ranks, rows, strict=True):
            calls.setdefault(" at ".join(json.loads(row)), []).append(rank)
        shown = "; ".join(
            f"rank{'s' * (len(callers) > 1)} {', '.join(map(str, callers))}: {call}"
            for call, callers in calls.items()
        )
        return MismatchError(
            f"{self.identity.describe(collective)}: detected mismatch between the calls of the "
            f"ranks: {shown}. Nothing was launched and the ring stays usable; make the same call "
            f"on every rank"
        )

    def pair(self, peer: int, sends: bool, group: Any = None, name: str = "") -> tuple[Any, int]:
        """Return the gloo group, and the number of the next message to or from ``peer`` in it.

        Args:
            peer: The other member.
            sends: True if this member sends.
            group: The gloo group of another order of calls. Default: the ring's.
            name: That order's, which is never used again.
        """
        if self._health.fault is not None:
            raise self._health.unusable("send" if sends else "recv")
        key = peer, sends, name
        number = self._pairs[key]
        self._pairs[key] += 1
        return group or self._gloo_group(), number

    def barrier(self, deadline: Deadline) -> list[int]:
        """Wait for all members in the store; return the positions of those that are late.

        No engine takes part, so the ring stays usable. A member that gives up takes its sign back,
        so that a late one waits for it in turn, and all can call it again.
        """
        size, number, my_key = self.identity.size, self._barriers, str(self.identity.rank)
        if size == 1:
            return []
        store, keys = self.store(f"barrier/{number}"), [str(rank) for rank in range(size)]
        look = Deadline(deadline.left() + _LATE_S)  # a slow store is not a late member
        store.set(my_key, "1", look)
        if not deadline.poll(lambda: store.check(keys, look), longest_sleep=_LOOK_S):
            late = [rank for rank in range(size) if not store.check([str(rank)], look)]
            if late:
                store.delete([my_key])
                store.check([my_key], look)  # after the deletion, for which nobody else waits
                return late
        self._barriers += 1
        if number and self.identity.rank == 0:  # all have left the one before
            self.store(f"barrier/{number - 1}").delete(keys)
        return []

    # -- set-up ------------------------------------------------------------------------------------

    def store(self, name: str) -> BoundedStore:
        """Return the part ``name`` of the store of this ring's members."""
        assert self._meeting is not None  # only a ring of one rank has none
        return self._meeting.store.under(name)

    @property
    def board(self) -> CallBoard | None:
        """Return the calls of the members, after an exchange; None between several hosts."""
        return None if self._shared_memory is None else self._shared_memory.board

    @property
    def one_network(self) -> bool:
        """Return True if all members share one loopback interface."""
        return self._meeting is not None and self._meeting.one_network

    def dead(self) -> list[int]:
        """Return the positions of members on this host whose process has ended."""
        return [] if self._shared_memory is None else self._shared_memory.dead()

    def _open_rounds(self) -> Rounds:
        """Return shared memory on one host, gloo between several."""
        rank, size = self.identity.rank, self.identity.size
        by_gloo = partial(host_exchange.gloo_round, self._gloo_group(), rank, size)
        args = rank, size, host_exchange.host_number(), self.identity.timeout
        self._shared_memory = open_shared_memory(by_gloo, *args)
        if self._group is not None:
            self.store("hosts").delete([host_exchange.address(rank)])
        return self._shared_memory or by_gloo

    def _gloo_group(self) -> Any:
        if self._engine_group is not None:
            return self._engine_group
        if self._group is None:
            me = self.identity
            deadline, wait = Deadline(me.timeout), timedelta(seconds=me.timeout)
            store = EngineStore(self.store("hosts"), deadline)
            args = store, me.rank, me.size, wait, self.one_network
            join = partial(host_exchange.connect, *args)
            try:
                self._group = bounded(join, deadline, me.describe("connecting the hosts"))
            except CommTimeout:
                store.give_up()
                raise
        return self._group

    # -- the end -----------------------------------------------------------------------------------

    def detach(self) -> None:
        """Drop the process group of the engine, which is released next."""
        self._rounds = self._engine_group = None

    def close(self, deadline: Deadline) -> None:
        """Release the gloo group, the shared memory and the store, at most until ``deadline``."""
        self._rounds = None
        group, self._group = [self._group], None
        if group[0] is not None:
            release = partial(host_exchange.release, group)
            self._health.attempt(release, deadline, "releasing the host exchange")
        shared, self._shared_memory = self._shared_memory, None
        if shared is not None and self._lock.acquire(timeout=deadline.left()):
            shared.close()
            self._lock.release()
        with suppress(IndexError):  # a second call, perhaps in another thread
            self._connections.pop().release(min(CLOSE_S, deadline.left()))

    def forget(self) -> None:
        """Take a new lock in a forked child: another thread of the parent may have held it."""
        self._lock = threading.Lock()
