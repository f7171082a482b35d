"""The engine of one ring: what carries its collectives, and how it connects and ends."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from commlib.deadlines import Deadline
from commlib.engines.local import rows
from commlib.engines.reductions import Reducer, ReductionSpec, resolve_reduction
from commlib.p2p.channel import Channel, ExpertKernels
from commlib.p2p.fused_norm import Norm
from commlib.p2p.routes import Routes
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import Health, RingIdentity
from commlib.rendezvous.roll_call import Meeting
from commlib.waits import PointToPoint

Tensor = torch.Tensor

# How long an abort may take: the library gets the request to stop, and no further wait.
ABORT_S = 4.0


class Unconnected(Exception):
    """A call needs a connection that its ring does not have yet; nothing was launched.

    ``connect`` makes it. It blocks the host, so it is called while no lock is held.
    """

    def __init__(self, connect: Any) -> None:
        super().__init__()
        self.connect = connect


class Launch(Protocol):
    """A collective as ``Engine.prepare`` sees it."""

    @property
    def launch(self) -> Any:
        """The launch of the engine."""

    @property
    def args(self) -> tuple[Any, ...]:
        """The arguments of the launch in addition to the tensors."""

    @property
    def x(self) -> Tensor | None:
        """The input."""


class EngineMemory(NamedTuple):
    """GPU memory in bytes: of communicators, and of the workspace of push kernels."""

    communicator: int = 0
    workspace: int = 0


class Engine(ABC):
    """Carries the collectives of one ring: NCCL, gloo, or ``torch.distributed``.

    Launches take dense tensors and run on the current stream. They return None if the stream
    orders the result, else a handle for ``wait``, with ``is_completed()``.
    """

    name: ClassVar[str]
    reducer: ClassVar[Reducer]
    # True if the engine takes x inside out (all_gather) and out inside x (reduce_scatter).
    parts_in_place: ClassVar[bool] = False

    def __init__(self, identity: RingIdentity, hosts: HostExchange, health: Health) -> None:
        self.identity, self.hosts, self.health = identity, hosts, health
        self.rank, self.size, self.device = identity.rank, identity.size, identity.device
        self.reductions: dict[tuple[torch.dtype, Any], Any] = {}

    def reduction(self, dtype: torch.dtype, op: str, factor: float | None = None) -> Any:
        """Return the reduction in the engine's own terms, resolved once per dtype and op.

        Raises:
            ArgumentError: The engine has no such reduction.
            DtypeError: The engine does not reduce the dtype.
        """
        named = factor is None and isinstance(op, str)
        if named and (dtype, op) in self.reductions:
            return self.reductions[dtype, op]
        resolved = self.resolve(dtype, resolve_reduction(dtype, op, self.reducer, factor))
        if factor is None:  # any number of factors exists, so they are not kept
            self.reductions[dtype, op] = resolved
        return resolved

    def resolve(self, dtype: torch.dtype, reduction: ReductionSpec) -> Any:
        """Return the engine's form of ``reduction`` over ``dtype``: what its launches take."""
        return reduction

    # -- launches ----------------------------------------------------------------------------------

    @abstractmethod
    def all_reduce(self, out: Tensor, x: Tensor, reduction: Any) -> Any:
        """Launch an all_reduce."""

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Any:
        """Launch an all_gather."""

    @abstractmethod
    def reduce_scatter(self, out: Tensor, x: Tensor, reduction: Any) -> Any:
        """Launch a reduce_scatter."""

    @abstractmethod
    def broadcast(self, out: Tensor | None, x: Tensor | None, root: int) -> Any:
        """Launch a broadcast; without ``out`` on a root that only reads ``x``."""

    @abstractmethod
    def reduce(self, out: Tensor | None, x: Tensor, root: int, reduction: Any) -> Any:
        """Launch a reduce."""

    @abstractmethod
    def gather(self, out: Tensor | None, x: Tensor, root: int) -> Any:
        """Launch a gather."""

    @abstractmethod
    def scatter(self, out: Tensor, x: Tensor | None, root: int) -> Any:
        """Launch a scatter."""

    @abstractmethod
    def all_to_all(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> Any:
        """Launch an all_to_all with splits."""

    def equal_parts(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> Any:
        """Launch an all_to_all that no member has given splits to."""
        return self.all_to_all(out, x, takes, sends)

    @abstractmethod
    def send(self, out: None, x: Tensor, peer: int) -> Any:
        """Launch a send."""

    @abstractmethod
    def recv(self, out: Tensor, x: None, peer: int) -> Any:
        """Launch a receive."""

    @abstractmethod
    def barrier(self, out: None, x: None) -> Any:
        """Launch a barrier."""

    def exchange_rows(self, out: Tensor, x: Tensor, routes: Routes) -> Any:
        """Launch one group of sends and receives, a pair per segment."""
        in_flight = []  # on a host, of PointToPoint
        with self.coalesced():
            for s in routes.sends:
                if s["peer"] != self.rank and s["rows"]:
                    in_flight.append(self.send(None, rows(x, s, "start"), int(s["peer"])))
            for t in routes.takes:
                if t["peer"] != self.rank and t["rows"]:
                    in_flight.append(self.recv(rows(out, t, "target"), None, int(t["peer"])))
        self.own_rows(out, x, routes)
        handles = [handle for handle in in_flight if handle is not None]
        return PointToPoint.joined(handles) if handles else None

    def own_rows(self, out: Tensor, x: Tensor, routes: Routes) -> None:
        """Copy the rows that this rank sends to itself."""
        for s in routes.sends[routes.sends["peer"] == self.rank]:
            if s["rows"]:
                rows(out, s, "target").copy_(rows(x, s, "start"))

    def fused_norm(self, x: Tensor, norm: Norm) -> tuple[Any, Any] | None:
        """Return the launch of an all_reduce with a norm, and its plan; None without a kernel."""
        return None

    def splits(self, x: Tensor, reduction: Any) -> bool:
        """Return True if an all_reduce of ``x`` has two halves; the same on all ranks."""
        return False

    def begin_all_reduce(self, out: Tensor, x: Tensor, reduction: Any) -> Any:
        """Launch the first half of an all_reduce that ``splits``."""
        raise NotImplementedError

    def wait(self, handle: Any, deadline: Deadline | None = None) -> None:
        """Block until a launch has finished; a signal is handled after 0.1 s at most.

        Args:
            handle: What the launch returned. It may be waited for again after an interruption.
            deadline: Of this wait. Default: that of the launch.

        Raises:
            Exception: An error of the library, at its deadline at the latest.
            BaseException: An error of a signal handler; the collective continues.
        """
        handle.wait(deadline)

    @contextmanager
    def limited(self, seconds: float) -> Iterator[None]:
        """Give the launches inside, on a host, a deadline in place of the ring's."""
        yield

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Start the launches inside as one."""
        yield

    def grouped(self, calls: Sequence[Launch]) -> AbstractContextManager[None]:
        """Start the launches inside, which are the calls of a group."""
        return self.coalesced()

    @contextmanager
    def bounded(self, blocks: int) -> Iterator[None]:
        """Limit the push kernels inside to so many blocks; 0 means no limit."""
        yield

    def prepare(self, calls: Sequence[Launch]) -> None:
        """Raise ``Unconnected`` if one of the calls, of a group, lacks a connection."""
        return

    def prepare_rows(self) -> None:
        """Set up what ``exchange_rows`` needs; called outside the issue lock."""
        return

    def prepare_experts(self) -> ExpertKernels | None:
        """Return the kernels of expert exchanges, set up at the first call; None without them.

        Every member calls it, outside the issue lock.
        """
        return None

    # -- what a user asks --------------------------------------------------------------------------

    def explain(self, nbytes: int, reduction: ReductionSpec) -> str:
        """Return what carries an all_reduce of so many bytes, and why."""
        return f"{self.name}: its own {reduction.op} of {reduction.dtype}, at any size"

    @property
    def connected(self) -> bool:
        """Return True if the engine has a communicator."""
        return True

    @property
    def nccl_comm(self) -> int | None:
        """Return the address of the ``ncclComm_t``; None without one."""
        return None

    @property
    def memory(self) -> EngineMemory:
        """Return the GPU memory that the engine has taken."""
        return EngineMemory()

    def check(self) -> None:
        """Raise what the library reports asynchronously."""
        return

    # -- life --------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, meeting: Meeting, deadline: Deadline) -> None:
        """Set the engine up with the other members, at most until ``deadline``."""

    def connect(self) -> None:
        """Make the communicator that a first call would otherwise make."""
        return

    @property
    def replaceable(self) -> bool:
        """Return True if ``disconnect`` ends kernels that wait for ever."""
        return False

    def disconnect(self) -> None:
        """Abort communicators whose kernels wait for ever."""
        return

    def reconnect(self) -> None:
        """Connect again after ``disconnect``."""
        return

    def suspend(self) -> None:
        """Free what this engine can make again; the device is idle on every member."""
        return

    def resume(self) -> None:
        """Make again what was there before ``suspend``."""
        return

    def channels(self) -> Sequence[Channel]:
        """Return the channels of the engine's own kernels."""
        return ()

    def abandon(self, capture: int) -> None:
        """Forget what a failed capture has begun; ``capture`` is its number at the driver."""
        return

    @abstractmethod
    def close(self, deadline: Deadline) -> None:
        """Free the communicator when no call is in flight."""

    @abstractmethod
    def abort(self) -> None:
        """Free the communicator at once."""
