"""NCCL launches between pairs of ranks, the collectives made of them, and groups of calls."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from commlib.engines.base import Engine, Launch
from commlib.engines.libnccl import library
from commlib.engines.nccl.connection import Connection
from commlib.engines.nccl.reductions import BYTES, premul
from commlib.engines.reductions import ReductionSpec
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import Health, RingIdentity
from commlib.streams import current_raw

Tensor = torch.Tensor

# Launches by what they need of NCCL where no push kernel carries them.
_BETWEEN_TWO = ("send", "recv")
_EXCHANGES = ("gather", "scatter", "all_to_all", "equal_parts", "exchange_rows")
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "barrier")


class NCCLExchanges(Engine):
    """The part of the NCCL engine that launches sends, receives and groups of calls."""

    def __init__(self, identity: RingIdentity, hosts: HostExchange, health: Health) -> None:
        super().__init__(identity, hosts, health)
        self._index = identity.device.index
        self._token = torch.zeros(1, dtype=torch.int32, device=identity.device)
        self._connection = Connection(hosts, health, self._token)
        self._branches: dict[int, torch.cuda.Stream] | None = None  # of the group that is launched
        self._branch_streams: list[torch.cuda.Stream] = []

    @property
    def nccl_comm(self) -> int | None:
        """Return the address of the communicator of all members; None before it exists."""
        connection = self._connection
        return int(connection.collective().comm) if connection.connected else None

    def _ready(self) -> Connection:
        """Return the connection for a launch, after a check that no kernel has reported a fault."""
        for channel in self.channels():
            channel.check()
        return self._connection

    def _pushes(self, call: Launch) -> bool:
        """Return True if push kernels carry a call."""
        return False

    def prepare(self, calls: Sequence[Launch]) -> None:
        """Raise ``Unconnected`` for the first of the calls that has no communicator yet.

        A group can't be taken back once some of its calls are launched. What all members connect
        precedes the pairs, and these follow one order on all members: no circle of ranks waits.
        """
        connection = self._connection
        names = {call.launch.__name__ for call in calls if not self._pushes(call)}
        if not names.isdisjoint(_EXCHANGES):
            connection.exchange()
        elif not names.isdisjoint(_COLLECTIVES):
            connection.collective()
        peers = {call.args[0] for call in calls if call.launch.__name__ in _BETWEEN_TWO}
        for peer in sorted(peers, key=lambda peer: sorted((self.rank, peer))):
            connection.to(peer)

    def gather(self, out: Tensor | None, x: Tensor, root: int) -> None:
        """Launch sends to the root."""
        comm = self._ready().exchange()
        with self.coalesced():
            if out is not None:
                for peer in range(self.size):
                    self._take(comm, out, peer * x.nbytes, x.nbytes, peer)
            self._give(comm, x, 0, x.nbytes, root)

    def scatter(self, out: Tensor, x: Tensor | None, root: int) -> None:
        """Launch sends from the root."""
        comm = self._ready().exchange()
        with self.coalesced():
            if x is not None:
                for peer in range(self.size):
                    self._give(comm, x, peer * out.nbytes, out.nbytes, peer)
            self._take(comm, out, 0, out.nbytes, root)

    def all_to_all(self, out: Tensor, x: Tensor, takes: list[int], sends: list[int]) -> None:
        """Launch a send and a receive per peer."""
        item, taken, sent = out.itemsize, 0, 0
        comm = self._ready().exchange()
        with self.coalesced():
            for peer in range(self.size):
                self._give(comm, x, sent, sends[peer] * item, peer)
                self._take(comm, out, taken, takes[peer] * item, peer)
                sent += sends[peer] * item
                taken += takes[peer] * item

    def send(self, out: None, x: Tensor, peer: int) -> None:
        """Launch ncclSend."""
        comm, number = self._ready().to(peer)
        with self._branch(peer):
            self._give(comm, x, 0, x.nbytes, number)

    def recv(self, out: Tensor, x: None, peer: int) -> None:
        """Launch ncclRecv."""
        comm, number = self._ready().to(peer)
        with self._branch(peer):
            self._take(comm, out, 0, out.nbytes, number)

    def _with_factor(self, launch: Any, reduction: ReductionSpec, *args: Any) -> None:
        """Make a launch with NCCL's operation of a premul_sum, which is created for it."""
        comm = self._ready().collective().comm
        with premul(self.identity.describe("premul_sum"), comm, reduction) as made:
            launch(*args, made)

    def _branch(self, peer: int) -> AbstractContextManager[Any]:
        """Give the calls of a group with one peer a stream, where pairs have communicators.

        Kernels of several communicators on one stream would run in turn, and a circle of sends and
        receives would wait for ever.
        """
        branches = self._branches
        if branches is None or self.size == 2 or self._ready().exchanges:
            return nullcontext()
        if peer not in branches:
            while len(self._branch_streams) <= len(branches):
                self._branch_streams.append(torch.cuda.Stream(self.device))
            branches[peer] = self._branch_streams[len(branches)]
            branches[peer].wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(branches[peer])

    @contextmanager
    def _branched(self) -> Iterator[None]:
        """Join the branches of a group when all of it is launched."""
        if self._branches is not None:  # a group in a group
            yield
            return
        branches = self._branches = {}
        try:
            yield
        finally:
            self._branches = None
            for stream in branches.values():
                torch.cuda.current_stream(self.device).wait_stream(stream)

    def _give(self, comm: Any, x: Tensor, offset: int, nbytes: int, peer: int) -> None:
        if nbytes:
            comm.send(x.data_ptr() + offset, nbytes, BYTES, peer, current_raw(self._index))

    def _take(self, comm: Any, out: Tensor, offset: int, nbytes: int, peer: int) -> None:
        if nbytes:
            comm.recv(out.data_ptr() + offset, nbytes, BYTES, peer, current_raw(self._index))

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Bracket launches with ncclGroupStart and ncclGroupEnd (which nest).

        What would refuse a call inside does so before the first one: a group can't be taken back.
        """
        nccl = library()
        for channel in self.channels():
            channel.ready()
        with self._branched():
            nccl.groupStart()
            try:
                yield
            finally:
                nccl.groupEnd()
