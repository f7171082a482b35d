"""Who is in a ring, which streams it has, and how it fails and ends."""

import json
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakSet

import torch

from commlib.core import failures
from commlib.core.call_log import PAIRED, CallLog, call_line, level
from commlib.core.call_reports import CallReports
from commlib.deadlines import Deadline, bounded
from commlib.errors import (
    ArgumentError,
    CommError,
    CommTimeout,
    EngineError,
    MismatchError,
    PeerTimeout,
    RingError,
    StreamError,
)
from commlib.keepalive import keep_forever
from commlib.rendezvous import host_exchange
from commlib.rendezvous.roll_call import Meeting
from commlib.rendezvous.shared_memory import Mailbox, Rounds, open_mailbox
from commlib.rendezvous.store import BoundedStore, EngineStore
from commlib.streams import Fences, issue_lock, stream_captures

if TYPE_CHECKING:
    from commlib.core.dispatch import Call
    from commlib.core.group import Group

# How long giving up may take: the library below is told to stop, and is not waited for any longer.
ABORT_S = 4.0

# How long reset() lets other work of a device go on behind a fault.
REST_S = 10.0
_PATIENCE = 5  # half deadlines without one

_SUSPENDED = "suspended; call ring.resume() on every member"

_WORD = 7  # bytes that are exchanged as one number: it stays below 2**63


class Unconnected(Exception):
    """A call needs a connection that its ring does not have yet; nothing was launched.

    ``connect`` makes it. It blocks the host, so it is called while no lock is held.
    """

    def __init__(self, connect: Callable[[], None]) -> None:
        super().__init__()
        self.connect = connect


class Channel(Protocol):
    """Memory that the ranks of a ring share, and kernels that work in it."""

    def ready(self) -> None:
        """Raise what the next call would raise."""

    def check(self) -> None:
        """Raise what a kernel has reported; never blocks."""

    def reset(self) -> None:
        """Begin anew, when no kernel of any rank runs."""

    def close(self) -> None:
        """Free the memory once every rank has let go of it."""


class Ring(ABC):
    """The part of a context that has nothing to do with any collective."""

    engine: ClassVar[str]

    def __init__(
        self,
        ring_id: int,
        rank: int,
        ranks: tuple[int, ...],
        device: torch.device,
        deadline: Deadline,
        meeting: Meeting | None,
    ) -> None:
        """Set the engine up with the other members of ``meeting``, at most until ``deadline``.

        ``meeting`` is None for a ring of one rank, which needs no communicator. The length of the
        deadline is also that of every later wait on a CPU.
        """
        self.ring_id, self.rank, self.size, self.ranks = ring_id, rank, len(ranks), ranks
        self.device, self.timeout = device, deadline.seconds
        self.device_number = -1 if device.index is None else device.index  # as get_device()
        self.fences = Fences(device) if device.type == "cuda" else None
        self.lock = issue_lock(device)
        self.calls = 0
        self.last_verb: str | None = None
        self.fault: str | None = None
        self.groups: dict[int, Group] = {}  # the open one of each thread, by the thread's number
        self.ended = False  # aborted or closed: everything is freed, the id may be used again
        self.forgotten = False  # a forked child's copy of a ring of its parent
        self.communicator_bytes = self.workspace_bytes = 0  # GPU memory that the ring has taken
        self.graphs: WeakSet[Any] = WeakSet()  # whatever has captured calls of this ring
        self._errors: list[str] = []
        self.fills = False  # True if this ring's own kernels may fill a GPU
        self._suspended = False
        self._repairable = False  # whether reset() may clear the fault
        self._meeting, self._hosts, self._exchanging = meeting, None, threading.Lock()
        self._rounds: Rounds | None = None
        self._mailbox: Mailbox | None = None
        self._unfenced: deque[tuple[torch.cuda.Event, list[Call]]] = deque()
        self._token = torch.zeros(1, dtype=torch.int32, device=device)
        check = 0 if meeting is None else level()
        self.compares = check == 2  # every call, before its launch
        self.call_log: CallLog | None = None
        self._reports: CallReports | None = None
        self._pairs: Counter[tuple[int, bool]] = Counter()
        self._verdict: str | None = None  # what the members' logs said of the first failure
        if check:
            capturing = None if self.fences is None else stream_captures
            self.call_log = CallLog(self.size, capturing)
            self._reports = CallReports(ring_id, rank, ranks, deadline.seconds, self.call_log)
        if meeting is not None:
            try:
                self._connect(meeting, deadline)
                if self._reports is not None:
                    self._reports.open(partial(self.store, "calls"))
                if self.compares:
                    self.exchange([])  # sends and receives of two members can't set it up
            except BaseException:
                self.abort()  # frees the parts that were made
                raise

    @staticmethod
    def credentials() -> bytes:
        """What the first member hands to the others when they meet."""
        return b""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} ring {self.ring_id}: rank {self.rank} of {self.size} "
            f"{list(self.ranks)} on {self.device}, engine {self.engine}, {self.state}>"
        )

    # -- who and where ---------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``ready``, or why the ring can't be used."""
        return "ready" if self.fault is None else self.fault

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The ring's own high-priority comm stream; None on a CPU."""
        return None if self.fences is None else self.fences.comm

    @property
    def has_communicator(self) -> bool:
        """Whether the engine holds a communicator; a ring of one rank never has one."""
        return self.size > 1 and self.fault is None

    def stream_for(self, use_calc_stream: bool) -> torch.cuda.Stream | None:
        """Return the stream a verb runs on: the caller's current one, or the ring's own."""
        if self.fences is None:
            return None
        return torch.cuda.current_stream(self.device) if use_calc_stream else self.fences.comm

    @property
    def open_group(self) -> "Group | None":
        """The group that collects the calls of the calling code; None if they are launched."""
        group = self.groups.get(get_ident()) if self.groups else None
        return group if group is not None and group.collects() else None

    def where(self, verb: str) -> str:
        """Begin an error text: which verb on which ring and rank."""
        return f"{verb} on ring {self.ring_id} (rank {self.rank} of {self.size}, {self.engine})"

    # -- failure ---------------------------------------------------------------------------------

    def errors(self) -> list[str]:
        """Return what went wrong on this ring so far, oldest first; empty if nothing did."""
        return self._errors + ([] if self._reports is None else self._reports.found)

    def failed(self, verb: str, error: Exception, args: tuple[Any, ...] = ()) -> CommError:
        """Mark the ring as failed by ``error`` of what is below and return what to raise.

        ``args`` are those of the launch: the first one of a send or a receive is the peer.
        """
        if isinstance(error, ArgumentError):
            return error  # nothing was launched
        if self._verdict is None and not isinstance(error, StreamError):
            self._verdict = "" if self._reports is None else self._reports.verdict(verb)
        logs = f"; {self._verdict}" if self._verdict else ""
        if isinstance(error, PeerTimeout | StreamError):
            text = f"{self.where(verb)}: {error}{logs}"
            self._errors.append(text)
            self._repairable = self._repairable or self.fault is None
            self.fault = self.fault or f"a kernel gave up in {verb}; every member types reset()"
            return type(error)(text)
        kind, reason = self._reason(verb, error, args)
        text = f"{self.where(verb)}{reason}{logs}"
        self._errors.append(text)
        self._repairable = False
        self.fault = self.fault or f"failed in {verb}; {self._anew}"
        return kind(f"{text}; {self._anew}")

    def _reason(
        self, verb: str, error: Exception, args: tuple[Any, ...]
    ) -> tuple[type[CommError], str]:
        """Return which error a failure becomes, and what it says: our words, nobody else's."""
        if isinstance(error, CommTimeout):  # which says who is late
            return CommTimeout, f": {type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and not isinstance(error, CommError):
            others = [at for at in range(self.size) if at != self.rank]
            peers = list(args[:1]) if verb in PAIRED else others if self.size == 2 else []
            if failures.is_late(error):
                said = failures.late(peers, self.ranks, self.timeout, self._verdict or "")
                return CommTimeout, f" {said}"
            if failures.is_gone(error):
                dead = peers or ([] if self._mailbox is None else self._mailbox.dead())
                return EngineError, f": {failures.gone(dead, self.ranks)}"
        return EngineError, f": {failures.other(error, self.engine)}"

    @property
    def has_failed(self) -> bool:
        """True if a call has failed and the ring was not closed since."""
        return self.fault is not None and not self.ended and not self._suspended

    @property
    def _anew(self) -> str:
        """End an error text: what gives the program this ring once more."""
        if self.ring_id == 0:
            return "type commlib.shutdown(), then commlib.init(), on every rank"
        return (
            f"type commlib.CommContextManager.instance().close({self.ring_id}), then "
            f"commlib.new_ring({self.ring_id}, {list(self.ranks)}), on every member"
        )

    def interrupted(self, verb: str) -> None:
        """Mark the ring as failed: a signal ended a call whose outcome nobody will know."""
        self._errors.append(f"{self.where(verb)}: a signal interrupted the call")
        self._repairable = False
        self.fault = self.fault or (
            f"a signal interrupted {verb}, which this rank has never finished; {self._anew}"
        )

    def unusable(self, verb: str) -> RingError:
        """The error of a call on a ring that has failed or is closed."""
        return RingError(f"{self.where(verb)}: the ring can't be used: {self.fault}")

    def connect(self) -> None:
        """Make now what a first call would otherwise make; every member calls it.

        Does nothing where a ring is connected when it is created (gloo).
        """
        if self.fault is not None:
            raise self.unusable("connect")

    def check(self) -> None:
        """Raise what kernels of this ring have reported so far; never blocks.

        Every collective does it too; behind the replay of a graph only this does. Raises
        ``PeerTimeout`` naming the rank that did not come, ``StreamError``, ``RingError`` of a ring
        that has failed.
        """
        with self.lock:
            if self.fault is not None:
                raise self.unusable("check")
            try:
                for channel in self._channels():
                    channel.check()
            except CommError as error:
                raise self.failed("check", error) from error

    def reset(self) -> None:
        """Make the ring usable again after ``PeerTimeout`` or ``StreamError``.

        Every member calls it, also one that has seen no error. Blocks the host until all have come
        and their device is idle, at most ``timeout`` seconds a step; a member that comes later than
        that finds a ring that must be closed and created again. Graphs stay valid, unless calls
        that another library carries wait on a device for a member that never made them: then that
        library's communicator is given up for a new one, and graphs with calls of this ring go.
        Raises ``CommTimeout`` naming the positions that do not come, ``RingError`` for other
        failures.
        """
        with self.lock:
            if self.fault is not None and not self._repairable:
                raise self.unusable("reset")
            self.fault = self._verdict = None
            if self._reports is not None:
                self._reports.resume()
            if not self._all_at_rest():
                self._reset_step(self._reconnect)
                self.exchange([])  # nobody's kernels run any more
            for channel in self._channels():
                self._reset_step(channel.reset)
            self.exchange([])
            self._repairable = False

    def _all_at_rest(self) -> bool:
        """Whether every member's device becomes idle; all of them learn it.

        Own kernels give up within two deadlines, and at once when one of them has: what runs on
        behind a fault waits for a peer in a library that knows of none.
        """
        for _ in range(_PATIENCE):
            rows = self.exchange([int(self._at_rest()), int(self._reported())])
            if all(idle for idle, _ in rows):
                return True
            if any(reported for _, reported in rows):
                break
        return False

    def _at_rest(self) -> bool:
        """Whether the device becomes idle while the peers still wait to hear of it."""
        most = min(self.timeout / 2, REST_S) if self._reported() else self.timeout / 2
        try:
            if self.fences is not None:
                self._bounded(self._drain, Deadline(most), "reset")
        except CommTimeout:
            return False
        return True

    def _reported(self) -> bool:
        """Whether a kernel has reported a fault."""
        try:
            for channel in self._channels():
                channel.check()
        except CommError:
            return True
        return False

    def _reconnect(self) -> None:
        """Give up what the device waits in, and connect again; every member does it."""
        raise CommTimeout("a device is not idle")

    def _reset_step(self, step: Callable[[], None]) -> None:
        """Take a step of reset(); the ring can't be repaired any more where it goes wrong."""
        try:
            step()
        except Exception as error:
            raise self.failed("reset", error) from error

    def suspend(self) -> None:
        """Give back GPU memory until ``resume``; every member calls it.

        Frees what no captured graph holds: NCCL communicators and the workspace for rows. The
        workspace of the push kernels stays, so captured graphs stay valid and may be replayed. Any
        call before ``resume`` raises ``RingError``. Blocks the host until the device is idle and
        all members have come, at most ``timeout`` seconds per step.

        Raises:
            CommTimeout: Naming the positions of the members that are late.
            RingError: The ring has failed, is closed or is suspended.
        """
        if self.fault is not None:
            raise self.unusable("suspend")
        try:
            if self.fences is not None:
                self._bounded(self._drain, Deadline(self.timeout), "suspend")
            self.exchange([])  # no member has calls under way any more
            self._suspend()
        except Exception as error:
            raise self.failed("suspend", error) from error
        self._suspended, self.fault = True, _SUSPENDED

    def resume(self) -> None:
        """Make a suspended ring usable again; every member calls it.

        What was connected before is connected again. Blocks the host as ``suspend``.

        Raises:
            CommTimeout: Naming the positions of the members that are late.
            RingError: The ring is not suspended.
        """
        if not self._suspended:
            raise RingError(f"{self.where('resume')}: the ring is not suspended: {self.state}")
        self._suspended, self.fault = False, None
        try:
            self.exchange([])
            self._resume()
        except Exception as error:
            raise self.failed("resume", error) from error

    def _suspend(self) -> None:
        """Free what this engine can make again; the device is idle on every member."""
        return

    def _resume(self) -> None:
        """Make again what was there before ``_suspend``."""
        return

    def abort(self) -> None:
        """Give the communicator up at once, with whatever is under way; the ring is closed then.

        From any thread, also while another one is stuck in a call: no lock is taken.
        """
        if self.forgotten:
            return
        self.fault, self.ended = f"aborted; {self._anew}", True
        if self._reports is not None:
            self._reports.abandon()
        deadline = Deadline(ABORT_S)
        self._release_graphs()
        self._rounds = None  # it may hold the process group that is given up next
        self._abort()
        self._unfenced = deque()  # only now: until then the collectives may still use the tensors
        self._release("_hosts", deadline)
        self._close_mailbox(deadline)

    def close(self, deadline: Deadline) -> None:
        """Finish what is under way and free the communicator, at most until ``deadline``."""
        if self.forgotten:
            return
        if self.fault is not None and not self._suspended:
            self.abort()
            return
        self.fault, self.ended = f"closed; {self._anew}", True
        self._release_graphs()
        if self.fences is not None and not self._in_time(self._drain, deadline, "draining"):
            self.abort()
            return
        self._unfenced = deque()
        if self._reports is not None:
            self._reports.close()
        self._rounds = None  # it may hold the process group that is given up next
        self._close(deadline)
        self._release("_hosts", deadline)
        self._close_mailbox(deadline)

    def forget(self, why: str) -> None:
        """Drop the engine in a forked child, without any call to it and without freeing it.

        Attributes of the engine fall back to the values of their class: no communicator.
        """
        keep_forever(dict(vars(self)), list(self.graphs))
        for name in [name for name in vars(self) if hasattr(type(self), name)]:
            delattr(self, name)
        self.fault, self.ended, self.forgotten = f"it {why}", True, True
        self._repairable = self._suspended = False
        self.lock, self._exchanging = threading.RLock(), threading.Lock()

    def _close_mailbox(self, deadline: Deadline) -> None:
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None and self._exchanging.acquire(timeout=deadline.left()):
            mailbox.close()
            self._exchanging.release()

    def _release_graphs(self) -> None:
        """Let graphs go that hold calls of this ring: NCCL ends no communicator before them."""
        for graph in list(self.graphs):
            graph.reset()

    def _drain(self) -> None:
        """Wait for every stream of the device: any of them may hold calls of this ring."""
        torch.cuda.synchronize(self.device)

    def _bounded(self, step: Callable[[], Any], deadline: Deadline, what: str) -> Any:
        """Run a step that may block, at most until ``deadline``, on this ring's device.

        It runs in another thread, whose current device would be GPU 0: the library below would make
        a context there.
        """

        def on_device() -> Any:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return step()

        return bounded(on_device, deadline, self.where(what))

    def _in_time(self, step: Callable[[], Any], deadline: Deadline, what: str) -> bool:
        """Take one step of the ring's end; what goes wrong with it is noted, not raised."""
        try:
            self._bounded(step, deadline, what)
        except Exception as error:
            self._errors.append(str(error))
            return False
        return True

    def _release(self, name: str, deadline: Deadline) -> None:
        """Give up the process group that the attribute ``name`` holds, if any."""
        group = [getattr(self, name)]
        setattr(self, name, None)
        if group[0] is not None:
            self._in_time(partial(host_exchange.release, group), deadline, f"releasing {name}")

    # -- numbers between hosts -------------------------------------------------------------------

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Return every rank's whole numbers (int64), in rank order; lengths may differ.

        For what the ranks must agree on before anything is launched: shapes, counts, options. It
        goes through shared memory on one host and over TCP (gloo) between several, touches no GPU
        and is allowed during a capture. Every member must call it; the first call sets it up. It
        blocks the host at most ``timeout`` seconds. Raises ``RingError``, ``CommTimeout`` naming
        the positions that do not come, ``EngineError``. Values that are not whole numbers of 64
        bits are an ``ArgumentError`` before anything is sent: the ring stays usable, and the other
        members wait, at most ``timeout`` seconds, until this one repeats the call.
        """
        try:
            numbers = host_exchange.whole_numbers(values)
        except ArgumentError as error:
            raise ArgumentError(f"{self.where('exchange')}: {error}") from None
        if not self.compares:
            return self.gathered("exchange", numbers)
        rows = self.gathered("exchange", [0, *numbers])  # 0: an exchange, not a collective
        if any(row[0] for row in rows):
            raise self.mismatch("exchange", "exchange")
        return [row[1:] for row in rows]

    def gathered(self, verb: str, numbers: list[int]) -> list[list[int]]:
        """Do what ``exchange`` does for ``verb``, and compare nothing."""
        with self._exchanging:
            if self.fault is not None:
                raise self.unusable(verb)
            if self.size == 1:
                return [numbers]
            try:
                self._rounds = self._rounds or self._open_rounds()
                return host_exchange.all_gather(self._rounds, numbers)
            except Exception as error:
                raise self.failed(verb, error) from error
            except BaseException:
                self.interrupted(verb)
                raise

    def mismatch(self, verb: str, given: str) -> MismatchError:
        """Return the error of calls that differ; every member has seen it and calls this."""
        rows = self.exchange_bytes(json.dumps([given, call_line()]).encode())
        calls: dict[str, list[int]] = {}
        for rank, row in zip(self.ranks, rows, strict=True):
            calls.setdefault(" at ".join(json.loads(row)), []).append(rank)
        shown = "; ".join(
            f"rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {call}"
            for call, who in calls.items()
        )
        return MismatchError(
            f"{self.where(verb)}: detected mismatch between the calls of the ranks: {shown}. "
            f"Nothing was launched and the ring stays usable; make the same call on every rank"
        )

    def exchange_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, in rank order; lengths may differ. As ``exchange``."""
        words = (data[at : at + _WORD] for at in range(0, len(data), _WORD))
        rows = self.exchange([len(data), *(int.from_bytes(word, "little") for word in words)])
        return [
            b"".join(word.to_bytes(_WORD, "little") for word in row[1:])[: row[0]] for row in rows
        ]

    def pair(self, peer: int, sends: bool) -> tuple[Any, int]:
        """Return the gloo group of the hosts, and the number of the next message to or from."""
        if self.fault is not None:
            raise self.unusable("send" if sends else "recv")
        number = self._pairs[peer, sends]
        self._pairs[peer, sends] += 1
        return self._host_group(), number

    def _open_rounds(self) -> Rounds:
        """Shared memory on one host, gloo between several."""
        by_gloo = partial(host_exchange.gloo_round, self._host_group(), self.rank, self.size)
        place = self.rank, self.size, host_exchange.host_number(), self.timeout
        self._mailbox = open_mailbox(by_gloo, *place)
        if self._hosts is not None:
            host_exchange.delete_address(self.store("hosts"), self.rank)
        return self._mailbox or by_gloo

    def _host_group(self) -> Any:
        """The gloo group that ``exchange`` uses."""
        if self._hosts is None:
            deadline, wait = Deadline(self.timeout), timedelta(seconds=self.timeout)
            store = EngineStore(self.store("hosts"), deadline)
            place = store, self.rank, self.size, wait, self._one_network
            join = partial(host_exchange.connect, *place)
            try:
                self._hosts = bounded(join, deadline, self.where("connecting the hosts"))
            except CommTimeout:
                store.give_up()
                raise
        return self._hosts

    @property
    def _one_network(self) -> bool:
        """Whether all members share one loopback interface."""
        return self._meeting is not None and self._meeting.one_network

    def store(self, name: str) -> BoundedStore:
        """The part ``name`` of the store of this ring's members."""
        assert self._meeting is not None  # only a ring of one rank has none
        return self._meeting.store.under(name)

    # -- raw legacy form -------------------------------------------------------------------------

    def keep_unfenced(self, event: torch.cuda.Event, calls: "list[Call]") -> None:
        """Hold the tensors of an unfenced call until it has finished or the program has synced."""
        kept = self._unfenced
        while kept and kept[0][0].query():
            kept.popleft()
        kept.append((event, calls))

    def release_unfenced(self) -> None:
        """Let go of the tensors of unfenced calls; for a program that has just synced them."""
        with self.lock:
            self._unfenced.clear()

    # -- what an engine implements -----------------------------------------------------------------

    @abstractmethod
    def _connect(self, meeting: Meeting, deadline: Deadline) -> None: ...

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Bracket several launches so that the engine starts them as one."""
        yield

    @contextmanager
    def bounded(self, blocks: int) -> Iterator[None]:
        """Let the engine's own kernels inside have at most so many blocks; 0 is no bound."""
        yield

    def prepare(self, calls: "Sequence[Call]") -> None:
        """Raise ``Unconnected`` if one of the calls, of a group, lacks a connection."""
        return

    def _channels(self) -> Sequence["Channel"]:
        """What the engine's own kernels work in."""
        return ()

    def abandon(self, capture: int) -> None:
        """Forget what a capture has begun that came to nothing; by its number at the driver."""
        return

    @abstractmethod
    def _close(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...
