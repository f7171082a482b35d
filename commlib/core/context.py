"""A ring of ranks as its caller sees it: identity, streams, and the collectives."""

from contextlib import AbstractContextManager
from threading import get_ident
from typing import Any

import torch

from commlib import flags
from commlib.core import group, posting
from commlib.core.bridge import Bridge
from commlib.core.calls.log import CallLog, level
from commlib.core.calls.reports import CallReports
from commlib.core.collectives.every import Collectives
from commlib.core.compiler import leave_to_eager, untraced
from commlib.core.device_reports import DeviceReports
from commlib.core.health import RingHealth
from commlib.core.lifecycle import RingLifecycle
from commlib.core.ring import RingSource
from commlib.core.rings import report as ring_report
from commlib.core.split import Split
from commlib.core.within import Seconds
from commlib.core.work import Work
from commlib.deadlines import Deadline
from commlib.deferred import UnfencedCalls
from commlib.engines.base import ABORT_S, Engine
from commlib.engines.c10d.engine import C10dEngine
from commlib.engines.reduction_names import RingReduction
from commlib.engines.single_rank import SingleRankEngine
from commlib.rendezvous.call_board import CallBoard
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import RingIdentity
from commlib.rendezvous.roll_call import Meeting
from commlib.streams import Fences, issue_lock


class CommContext(Collectives, Split, Bridge):
    """One ring: rank, size, ranks, device and streams, and the collectives over it.

    Collectives take the output first, then the input, and positions in the ring as peers and roots.
    With ``use_calc_stream=True`` a collective runs on the caller's current stream. With False it
    runs on the ring's comm stream, which first waits for the current stream; with ``sync_op=True``
    the current stream then waits for it, with ``sync_op=False`` a ``Work`` is returned. The host
    never blocks on a GPU; on a CPU a collective blocks, at most the ring's ``timeout`` in seconds,
    unless ``sync_op=False``. ``timeout=`` is the deadline of one call, shorter or longer, for which
    the host blocks on a GPU too. ``fenced=False`` leaves both waits to the program (the legacy
    form). Strided tensors are staged, so that nothing outside a view is read or written.
    """

    def __init__(
        self,
        source: RingSource,
        identity: RingIdentity,
        engine: type[Engine],
        meeting: Meeting | None,
    ) -> None:
        """Put the parts of a ring together; ``open`` connects them.

        ``meeting`` is None for a ring of one rank, which needs no communicator.
        """
        self._source = source
        self._identity = identity
        self.ring_id, self.rank, self.ranks = identity.ring_id, identity.rank, identity.ranks
        self.size, self.device, self.timeout = identity.size, identity.device, identity.timeout
        self.engine, self.name = identity.engine, identity.name
        self._device_number = identity.device_number
        self._fences = Fences(self.device) if self.device.type == "cuda" else None
        self._lock = issue_lock(self.device)
        self._groups: dict[int, group.Group] = {}  # the open one of each thread
        self._orders: dict[int, Any] = {}
        self._order_count = 0  # of those that were opened
        self._board: CallBoard | None = None
        self._boards: list[CallBoard] = []
        self._calls = 0
        self._last: str | None = None  # collective
        self._unfenced = UnfencedCalls()
        self._compose(engine, meeting)

    def _compose(self, engine: type[Engine], meeting: Meeting | None) -> None:
        """Make the parts, each with those that it uses."""
        identity = self._identity
        check = 0 if meeting is None else level()
        self._compares = check == 2  # every call, before its launch
        self._call_log = log = CallLog() if check else None
        args = self.ring_id, self.rank, self.ranks, self.timeout
        reports = None if log is None else CallReports(*args, log)
        self._health = RingHealth(identity, reports)
        self._hosts = HostExchange(identity, meeting, self._health)
        self._health.find_dead = self._hosts.dead
        self._engine = (
            SingleRankEngine(identity, self._hosts, self._health, engine.reducer)
            if meeting is None
            else engine(identity, self._hosts, self._health)
        )
        self._device_reports = DeviceReports(identity)
        self._lifecycle = RingLifecycle(
            identity,
            self._health,
            self._hosts,
            self._engine,
            reports,
            self._unfenced,
            self._device_reports,
        )
        self._reports = reports

    def _open(self, meeting: Meeting, deadline: Deadline) -> None:
        """Connect to the other members, at most until ``deadline``. After a failure, abort it."""
        self._engine.open(meeting, deadline)
        if self._reports is not None:
            self._reports.open(lambda: self._hosts.store("calls"))
        if self._compares:
            self._hosts.exchange([])  # sends and receives of two members can't set it up
        elif self._call_log is not None and isinstance(self._engine, C10dEngine):
            posting.open_board(self, self._engine)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return (
            f"<CommContext ring {self.ring_id}{name}: rank {self.rank} of {self.size} "
            f"{list(self.ranks)} on {self.device}, engine {self.engine}, "
            f"{self._health.fault or 'ready'}>"
        )

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The ring's own high-priority comm stream; None on a CPU."""
        return None if self._fences is None else self._fences.comm

    def stream_for(self, use_calc_stream: bool) -> torch.cuda.Stream | None:
        """Return the stream that a collective runs on; None on a CPU.

        Args:
            use_calc_stream: True for the caller's current stream, False for the ring's.
        """
        if self._fences is None:
            return None
        return torch.cuda.current_stream(self.device) if use_calc_stream else self._fences.comm

    @property
    def nccl_comm(self) -> int:
        """The address of the ring's ``ncclComm_t``; ``ArgumentError`` if there is none.

        For libraries that take one, such as TensorRT (never tried there): see docs/export.md.
        """
        return ring_report.nccl_comm(self)

    def report(self) -> ring_report.RingReport:
        """Return what the ring is, has done and has taken.

        Returns:
            ``ring_id``, ``engine``, ``ranks``, ``rank``, ``size``, ``device``; ``state``, which is
            "ready" or why the ring can't be used; ``calls`` and the ``last`` collective;
            ``communicator``, True if the engine has one; ``bytes`` and ``workspace_bytes`` of GPU
            memory; ``errors``, oldest first.
        """
        return ring_report.report(self)

    def _errors(self) -> list[str]:
        return ring_report.errors(self)

    @property
    def _open_group(self) -> "group.Group | None":
        """The group that collects the calls of the calling code; None if they are launched."""
        opened = self._groups.get(get_ident()) if self._groups else None
        return opened if opened is not None and opened.collects() else None

    def _describe(self, collective: str) -> str:
        """Return the start of an error text: the collective, the ring and the rank."""
        return self._identity.describe(collective)

    def connect(self) -> None:
        """Make now what a first call would otherwise make. Every member calls it.

        Without it the first call that needs NCCL makes the communicator, which no capture allows.
        Does nothing if a ring is connected when it is created (gloo). Blocks the host at most
        ``timeout`` seconds per step.

        Raises:
            CommTimeout: Naming the positions of the members that are late.
            EngineError: The library reports a failure.
            RingError: The ring has failed or is closed.
        """
        self._lifecycle.connect()

    def check(self) -> None:
        """Raise what kernels of this ring have reported so far; never blocks.

        Every collective does it too. After the replay of a graph only this does.

        Raises:
            CapacityError: An expert got more rows than its capacity; the ring stays usable.
            PeerTimeout: A rank made no call in time; the text names it.
            StreamError: Two calls of this ring ran at the same time.
            RingError: The ring has failed or is closed.
        """
        self._lifecycle.check()

    def reset(self) -> None:
        """Make the ring usable again after ``PeerTimeout`` or ``StreamError``.

        Every member calls it, also one that has seen no error. Blocks the host until all have
        called it and their device is idle, at most ``timeout`` seconds per step. A member that
        calls later than that finds a ring that must be closed and created again. Graphs stay
        valid, unless NCCL work waits on a device for a member that never made its call: then the
        communicator is re-created and graphs with calls of this ring are released.

        Raises:
            CommTimeout: Naming the positions of the members that are late.
            RingError: The ring has failed otherwise.
        """
        self._lifecycle.reset()

    def suspend(self) -> None:
        """Free GPU memory until ``resume``; every member calls it.

        Frees what no captured graph holds: NCCL communicators and the workspace for rows. The
        workspace of the push kernels stays, so captured graphs stay valid and may be replayed. Any
        call before ``resume`` raises ``RingError``. Blocks the host until the device is idle and
        all members have called it, at most ``timeout`` seconds per step.

        Raises:
            CommTimeout: Naming the positions of the members that are late.
            RingError: The ring has failed, is closed or is suspended.
        """
        self._lifecycle.suspend()

    def resume(self) -> None:
        """Make a suspended ring usable again; every member calls it.

        What was connected before is connected again. Blocks the host as ``suspend``.

        Raises:
            CommTimeout: Naming the positions of the members that are late.
            RingError: The ring is not suspended.
        """
        self._lifecycle.resume()

    def close(self, timeout: float | None = None) -> None:
        """Finish the calls in flight and free the communicator.

        Args:
            timeout: Seconds. Default: FLAGS_comm_close_timeout_s. Then the ring is aborted.
        """
        self._close(Deadline(flags.get(flags.CLOSE_TIMEOUT) if timeout is None else timeout))

    def _close(self, deadline: Deadline) -> None:
        if not self._lifecycle.close(deadline):
            self.abort()

    def abort(self) -> None:
        """Abort the communicator at once, with all calls in flight; the ring is closed then.

        From any thread, also while another one is stuck in a call: no lock is taken.
        """
        self._lifecycle.abort(Deadline(ABORT_S))

    def _forget(self, why: str) -> None:
        """Drop the ring in a forked child, without any call to its engine."""
        self._lifecycle.forget(why)
        self._lock = issue_lock(self.device)

    def group(
        self, *, use_calc_stream: bool = True, sync_op: bool = True, timeout: Seconds | None = None
    ) -> AbstractContextManager[Work]:
        """Collect the calls of a ``with`` block and launch them as one operation at its end.

        Sends and receives in one group can't wait for each other in a circle. An exception inside
        the block launches nothing. torch.compile leaves a function with a group to eager code.

        Only the calls that the block itself makes on this ring are collected. Those of other
        threads, and of a backward inside the block, are launched at once, before the group.

        Args:
            use_calc_stream, timeout: See the class, also for ``sync_op``; for the whole group.
            sync_op: False: the results are valid after ``wait()`` of the yielded ``Work``.

        Returns:
            A context manager that yields a ``Work``. Results are valid after the block.

        Raises:
            ArgumentError: In the block: an operator computes with a result, or x requires grad.
        """
        if torch.compiler.is_compiling():
            leave_to_eager(group.UNTRACED)
        return untraced(group.group(self, use_calc_stream, sync_op, timeout))

    def explain(self, nbytes: int, dtype: torch.dtype, op: RingReduction = "sum") -> str:
        """Return what carries an ``all_reduce`` here, and why, as text.

        Args:
            nbytes: Bytes of ``x``.
            dtype: Its dtype.
            op: As in ``all_reduce``.

        Raises:
            DtypeError: The engine does not reduce the dtype.
            ArgumentError: ``nbytes`` is not a multiple of an element's bytes.
        """
        return ring_report.explain(self, nbytes, dtype, op)
