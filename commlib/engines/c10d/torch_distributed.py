"""The engines of programs without the flag: one torch.distributed process group per ring."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from commlib.deadlines import Deadline
from commlib.engines.base import ABORT_S, EngineMemory, Launch
from commlib.engines.c10d.engine import C10dEngine
from commlib.errors import ArgumentError, CommError
from commlib.rendezvous import host_exchange
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import Health, RingIdentity
from commlib.rendezvous.store import EngineStore
from commlib.streams import capturing, issue_lock


class TorchGlooEngine(C10dEngine):
    """CPU ranks over gloo in ``torch.distributed``.

    It connects at once: a lone send and receive must not wait for members that take no part.
    """

    name: ClassVar[str] = "c10d"

    def _make(self, store: EngineStore, wait: timedelta) -> Any:
        one_network = self.hosts.one_network
        backend = host_exchange.connect(store, self.rank, self.size, wait, one_network)
        return _with_backend(self, backend, dist.ProcessGroup.BackendType.GLOO)


class TorchNCCLEngine(C10dEngine):
    """GPU ranks over NCCL in ``torch.distributed``.

    torch makes the NCCL communicator (about 0.5 GB) at the ring's first call.

    For sends and receives in a group torch takes the group's communicator, for others one of their
    pair, and the two never meet. So all take the group's from the first call of all members on.
    """

    name: ClassVar[str] = "c10d"

    def __init__(self, identity: RingIdentity, hosts: HostExchange, health: Health) -> None:
        super().__init__(identity, hosts, health)
        self._group: Any = None
        self._free_before: int | None = None  # bytes, until torch has made the communicator
        self._communicator_bytes = 0
        self._batched = False  # True inside a group of calls, which share one communicator.
        self._peers: set[int] = set()  # Torch has made the communicators of these pairs.
        self._met = False  # Whether NCCL has connected all pairs in both directions.

    @property  # every launch reads it
    def pg(self) -> Any:
        """The process group. Raises ``ArgumentError`` where its communicator would be captured."""
        if self._free_before is not None and capturing():
            self._refuse_capture("Call ring.connect() on every member before the capture")
        return self._group

    @pg.setter
    def pg(self, group: Any) -> None:
        self._group = group

    def connect(self) -> None:
        """Have torch make the group's communicator now, and NCCL connect all pairs.

        Every member calls it. Without it a lone send or receive has a communicator of its pair,
        which its first call makes.
        """
        if self.connected and self._met:
            return
        self.hosts.exchange([])  # names the members that are late
        try:
            with issue_lock(self.device):
                self.barrier(None, None)
                self._connect_peers()
            synchronize = torch.cuda.current_stream(self.device).synchronize
            self.identity.bounded(synchronize, Deadline(self.identity.timeout), "connect")
        except Exception as error:
            raise self.health.failed("connect", error) from error

    def _refuse_capture(self, remedy: str) -> None:
        raise ArgumentError(
            f"{self.identity.describe('a call')} in a capture: torch would make an NCCL "
            f"communicator for it, which no capture allows. {remedy}"
        )

    def send(self, out: None, x: torch.Tensor, peer: int, tag: int = 0) -> Any:
        """Launch a send of the process group."""
        with self._to(peer):
            return super().send(out, x, peer, tag)

    def recv(self, out: torch.Tensor, x: None, peer: int, tag: int = 0) -> Any:
        """Launch a receive of the process group."""
        with self._to(peer):
            return super().recv(out, x, peer, tag)

    def _to(self, peer: int) -> AbstractContextManager[None]:
        """Choose the communicator of a send or receive: the group's, or one of this pair."""
        if self._batched:
            return nullcontext()
        if self.size == 2:
            self._connect_peers()
        if self.connected:
            return self.coalesced()
        if peer not in self._peers:
            if capturing():
                self._refuse_capture("Make this send or recv once before the capture")
            self._peers.add(peer)
        return nullcontext()

    def prepare(self, calls: Sequence[Launch]) -> None:
        """Connect two members in both directions before their first messages in a group."""
        if self.size == 2 and _has_messages(calls):
            try:
                self._connect_peers()
            except CommError:
                raise
            except Exception as error:
                raise self.health.failed("group", error) from error

    def grouped(self, calls: Sequence[Launch]) -> AbstractContextManager[None]:
        """Start sends and receives together, and collectives alone one after the other.

        In one of torch's groups, reductions to several roots were mixed up over sockets.
        """
        return self.coalesced() if _has_messages(calls) else nullcontext()

    def _connect_peers(self) -> None:
        """Exchange one byte with every peer in one group of calls, once.

        NCCL connects two ranks as the first groups of both need it. It fails where one of them
        sends and receives while the other only sends. All members make this call.
        """
        if self._met:
            return
        if capturing():
            self._refuse_capture("Call ring.connect() on every member before the capture")
        self._met = True
        token = torch.zeros(2, dtype=torch.uint8, device=self.device)
        with self.coalesced():
            for peer in range(self.size):
                if peer != self.rank:
                    super().send(None, token[:1], peer)
                    super().recv(token[1:], None, peer)

    def _between_two(self, work: Any, data: torch.Tensor, way: tuple[str, int]) -> Any:
        if self._batched:
            return super()._between_two(work, data, way)
        return super()._issued(work)  # of a pair: the group's communicator is still to be made

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Start the launches inside as one; they share the group's communicator."""
        with super().coalesced():
            self._batched = True
            try:
                yield
            finally:
                self._batched = False

    @property
    def connected(self) -> bool:
        """Return True if torch has made the group's communicator; the first call does."""
        return self._free_before is None

    @property
    def memory(self) -> EngineMemory:
        """Return the GPU memory of the group's communicator."""
        return EngineMemory(self._communicator_bytes)

    def _make(self, store: EngineStore, wait: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        # The first call makes the communicator, and waits in the store for as long as this.
        backend = dist.ProcessGroupNCCL(store.for_good(wait), self.rank, self.size, options)
        self._free_before = torch.cuda.mem_get_info(self.device)[0]
        return _with_backend(self, backend, dist.ProcessGroup.BackendType.NCCL)

    def _issued(self, work: Any) -> Any:
        if self._free_before is not None:  # the first call has just made the communicator
            free = torch.cuda.mem_get_info(self.device)[0]
            self._communicator_bytes, self._free_before = max(0, self._free_before - free), None
        return super()._issued(work)

    def close(self, deadline: Deadline) -> None:
        """Wait until the peers have what this rank sent them, and release the process group.

        A kernel of NCCL may end while its data is still on the way to another host. ``abort`` of
        torch cuts that off; ``shutdown`` lets NCCL finish it first, and frees everything.
        """
        group, self._group = [self._group], None
        finish = partial(_shut_down, group, self.device)
        if group[0] is None or self.health.attempt(finish, deadline, "finishing the calls of NCCL"):
            return
        if group:
            self.health.attempt(partial(host_exchange.release, group), Deadline(ABORT_S), "abort")


def _with_backend(engine: C10dEngine, backend: Any, kind: Any) -> Any:
    """Return a process group of torch with one backend, for the device of the engine."""
    group = dist.ProcessGroup(dist.HashStore(), engine.rank, engine.size)  # it asks its backend
    group._set_default_backend(kind)
    group._register_backend(engine.device, kind, backend)
    return group


def _has_messages(calls: Sequence[Launch]) -> bool:
    return any(call.launch.__name__ in ("send", "recv") for call in calls)


def _shut_down(group: list[Any], device: torch.device) -> None:
    """Finish the calls of the group in a one-element list, its only reference, and free it."""
    group[0]._get_backend(device).shutdown()
    group.clear()
