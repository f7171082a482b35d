"""The NCCL communicators of one ring: made when a call needs one, measured, and released."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from commlib.deadlines import Deadline
from commlib.engines.base import ABORT_S, Unconnected
from commlib.engines.graph_holds import GraphHolds
from commlib.engines.libnccl import library
from commlib.engines.nccl.released import destroy_released, release
from commlib.errors import ArgumentError, CommTimeout
from commlib.log import log
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import Health
from commlib.streams import current_raw, issue_lock, stream_captures

_INT32, _MAX, _BYTES = 2, 2, 0  # ncclDataType_t and ncclRedOp_t
_GRAPH_S = 0.5  # how long close() waits for graphs that were just destroyed


class Connection:
    """The NCCL communicator of one ring, and its state.

    All members make the ring's communicator together, at the first call that needs it. NCCL
    connects peers for sends and receives separately, which takes further memory: the first call
    of that kind does it, with a deadline, before it is launched. In a ring of more than two ranks
    the other members do not know of a lone send and receive. So the pair gets a communicator.
    """

    def __init__(self, hosts: HostExchange, health: Health, token: torch.Tensor) -> None:
        """``token``: memory on the ring's device for the first call of each communicator."""
        library()  # raises where CuPy is missing
        self._ring, self._hosts, self._health, self._token = hosts.identity, hosts, health, token
        self.nbytes = 0  # GPU memory that the communicators take
        self._comm: Any = None
        self._exchanges = False  # whether peers are connected for sends and receives
        self._pairs: dict[int, Any] = {}
        self._before = False, False  # what was connected when the ring was suspended
        self._making = threading.RLock()
        self._unpublished: Any = None  # the communicator while it connects peers
        self._holds = GraphHolds()
        destroy_released()

    @property
    def connected(self) -> bool:
        """Return True if the ring's communicator exists."""
        return self._comm is not None

    @property
    def exchanges(self) -> bool:
        """Return True if all peers are connected to each other."""
        return self._exchanges

    # -- what a call is given ----------------------------------------------------------------------

    def collective(self) -> Any:
        """Return the communicator for a collective; raises ``Unconnected`` before it exists."""
        if self._comm is None:
            raise Unconnected(self.connect)
        return self._noted(self._comm)

    def exchange(self) -> Any:
        """Return the communicator for sends and receives of all members among each other."""
        if not self._exchanges:
            raise Unconnected(partial(self.connect, exchanges=True))
        return self._noted(self._comm)

    def to(self, peer: int) -> tuple[Any, int]:
        """Return the communicator for one peer, and the peer's rank in it."""
        ring = self._ring
        if self._exchanges or ring.size == 2:
            return self.exchange(), peer
        if peer not in self._pairs:
            raise Unconnected(partial(self._connect_pair, peer))
        return self._noted(self._pairs[peer]), int(peer > ring.rank)

    def _noted(self, comm: Any) -> Any:
        """Return ``comm``, and note a capture that will hold calls of it."""
        if stream_captures():
            self._holds.add(current_raw(self._ring.device.index))
        return comm

    # -- connecting --------------------------------------------------------------------------------

    def connect(self, *, exchanges: bool = False) -> None:
        """Make the ring's communicator, and with ``exchanges`` connect all peers to each other.

        Every member calls it. Blocks the host at most the ring's timeout per step.

        Raises:
            ArgumentError: In a capture.
            CommTimeout: Naming the positions of the members that are late.
            EngineError: NCCL reports a failure.
        """
        with self._making:
            self._refuse_capture()
            ring = self._ring
            if self._comm is None:
                local_id = bytes(library().get_unique_id()) if ring.rank == 0 else b""
                unique_id = self._hosts.exchange_bytes(local_id)[0]
                with self._measured():
                    self._comm = self._initialise(unique_id, ring.size, ring.rank)
                self._refuse_ended()
            if exchanges and not self._exchanges:
                self._hosts.exchange([])  # all members are here: NCCL waits for none of them
                with self._measured(), self._withdrawn() as comm:
                    self._run(partial(self._touch_peers, comm, current_raw(ring.device.index)))
                self._refuse_ended()

    def _connect_pair(self, peer: int) -> None:
        with self._making:
            self._refuse_capture()
            ring = self._ring
            low, high = sorted((ring.rank, peer))
            store, key = self._hosts.store("nccl_pairs"), f"{low}/{high}"
            deadline = Deadline(ring.timeout)
            if ring.rank == low:
                store.set(key, bytes(library().get_unique_id()), deadline)
            elif not deadline.poll(lambda: store.check([key], deadline), longest_sleep=0.05):
                raise CommTimeout(
                    f"{ring.describe('connecting')}: rank {ring.ranks[peer]} (position {peer}) did "
                    f"not call its send or recv within {ring.timeout:g} s"
                )
            with self._measured():
                unique_id, position = store.get(key, deadline), int(ring.rank == high)
                self._pairs[peer] = self._initialise(unique_id, 2, position)
            self._refuse_ended()
            if ring.rank == high:
                store.delete([key])

    def _refuse_capture(self) -> None:
        if stream_captures():
            ring = self._ring
            raise ArgumentError(
                f"{ring.describe('connecting')}: this call needs NCCL, and the ring has no NCCL "
                f"communicator for it yet; none can be made in a capture. Call "
                f"commlib.comm({ring.ring_id}).connect() on every member before the capture, or "
                f"make the call once eagerly"
            )

    def _refuse_ended(self) -> None:
        """Free what was connected while ``abort`` ended the ring."""
        if self._health.ended:
            self.abort()
            raise self._health.unusable("connect")

    @contextmanager
    def _withdrawn(self) -> Iterator[Any]:
        """Give the communicator to this thread alone; calls of others wait until it is back."""
        with issue_lock(self._ring.device):  # no launch is under way
            comm = self._unpublished = self._comm
            self._comm = None
        done = False
        try:
            yield comm
            done = True
        finally:
            if self._unpublished is comm:  # else an abort has freed it
                self._comm, self._unpublished, self._exchanges = comm, None, done

    def _initialise(self, unique_id: bytes, size: int, rank: int) -> Any:
        """Make a communicator and pass one token around it."""
        ring = self._ring
        make = partial(library().NcclCommunicator, size, unique_id, rank)
        comm = ring.bounded(make, Deadline(ring.timeout), "initialising NCCL")
        try:
            token, stream = self._token.data_ptr(), current_raw(ring.device.index)
            self._run(partial(comm.allReduce, token, token, 1, _INT32, _MAX, stream))
        except Exception:
            self._health.attempt(comm.abort, Deadline(ABORT_S), "aborting NCCL")
            raise
        return comm

    def _run(self, launch: Callable[[], Any]) -> None:
        """Launch what NCCL connects for, and wait until the device has done it.

        NCCL holds the host until the other members make the same call. So the issue lock is free:
        they may first need it for another ring. No other thread can use the communicator yet.
        """
        ring, deadline = self._ring, Deadline(self._ring.timeout)
        ring.bounded(launch, deadline, "connecting NCCL")
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(ring.device))
        if not deadline.poll(event.query):
            raise CommTimeout(
                f"{ring.describe('connecting NCCL')}: the first collective took over "
                f"{deadline.seconds:g} s"
            )

    def _touch_peers(self, comm: Any, stream: int) -> None:
        """Send a byte to every peer, in one group: NCCL then connects all pairs."""
        nccl, pointer = library(), self._token.data_ptr()
        nccl.groupStart()
        try:
            for peer in range(self._ring.size):
                comm.send(pointer, 1, _BYTES, peer, stream)
                comm.recv(pointer + 1, 1, _BYTES, peer, stream)
        finally:
            nccl.groupEnd()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Add the GPU memory that the steps inside take to the ring's figure."""
        device = self._ring.device
        free = torch.cuda.mem_get_info(device)[0]
        yield
        self.nbytes += max(0, free - torch.cuda.mem_get_info(device)[0])

    # -- the end -----------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise what NCCL reports asynchronously."""
        for comm in self._all():
            comm.check_async_error()

    def renew(self) -> None:
        """Abort every communicator; the next call that needs one connects again.

        All of them in a quarter of the timeout: the other members wait meanwhile.
        """
        deadline = Deadline(max(ABORT_S, self._ring.timeout / 4))
        for comm in self._forget():
            self._ring.bounded(comm.abort, deadline, "aborting NCCL")

    def abort(self) -> None:
        """Abort every communicator at once; the ring notes errors."""
        for comm in self._forget():
            self._health.attempt(comm.abort, Deadline(ABORT_S), "aborting NCCL")

    def close(self, deadline: Deadline) -> None:
        """Destroy every communicator, or release it until the graphs that hold it are destroyed.

        NCCL destroys no communicator before the CUDA graphs that hold its calls.
        """
        comms, ring = self._all(), self._ring
        if not comms:
            return
        patience = Deadline(min(_GRAPH_S, max(deadline.left(), 1e-3)))
        if patience.poll(lambda: self._holds.count == 0):
            for comm in self._forget():
                self._health.attempt(comm.destroy, deadline, "destroying NCCL")
            return
        text = (
            f"{ring.describe('close')}: {self._holds.count} CUDA graphs that the program captured "
            f"still hold NCCL calls of this ring; its communicator is destroyed after them"
        )
        self._health.note(text)
        log.warning(text)
        release(self._forget(), self._holds)
        self._holds = GraphHolds()

    def suspend(self) -> None:
        """Free every communicator; no call and no graph uses them. ``resume`` connects again."""
        self._before = self.connected, self._exchanges
        for comm in self._forget():
            self._ring.bounded(comm.abort, Deadline(self._ring.timeout), "aborting NCCL")

    def resume(self) -> None:
        """Connect again as before ``suspend``. The next calls of pairs connect these."""
        (connected, exchanges), self._before = self._before, (False, False)
        if connected:
            self.connect(exchanges=exchanges)

    @property
    def held(self) -> bool:
        """Return True if a CUDA graph holds calls of a communicator."""
        return self._holds.count > 0

    def _all(self) -> list[Any]:
        comms = (self._comm, self._unpublished, *self._pairs.values())
        return [comm for comm in comms if comm is not None]

    def _forget(self) -> list[Any]:
        comms, self._comm, self._unpublished, self._exchanges = self._all(), None, None, False
        self._pairs, self.nbytes = {}, 0
        return comms
