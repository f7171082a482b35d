"""The legacy engine: a torch.distributed process group for each ring."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from commlib.deadlines import Deadline
from commlib.engines.c10d import C10dContext
from commlib.errors import ArgumentError
from commlib.rendezvous import host_exchange
from commlib.rendezvous.store import EngineStore
from commlib.streams import capturing


class LegacyCommContext(C10dContext):
    """A ring over ``torch.distributed``: NCCL on GPUs, gloo on CPUs.

    On GPUs torch makes the NCCL communicator (about 0.5 GB) at the ring's first call. gloo
    connects at once: a lone send and receive must not wait for members that take no part.
    """

    engine: ClassVar[str] = "c10d"
    _free_before: int | None = None  # bytes, until torch has made the communicator
    _group: Any = None
    _batched = False  # inside a group of calls, which share one communicator

    def __init__(self, *place: Any) -> None:
        """Take the place in the ring that ``Ring`` describes."""
        self._peers: set[int] = set()  # torch has made the communicators of these pairs
        super().__init__(*place)

    @property  # every launch passes here
    def pg(self) -> Any:
        """The process group. Raises ``ArgumentError`` where its communicator would be captured."""
        if self._free_before is not None and capturing():
            self._refuse_capture("Call ring.connect() on every member before the capture")
        return self._group

    @pg.setter
    def pg(self, group: Any) -> None:
        self._group = group

    def connect(self) -> None:
        """Have torch make the group's communicator now; every member calls it.

        A lone send or receive has a communicator of its pair, which its first call makes.

        Raises:
            CommTimeout: The members did not all call it within ``timeout`` seconds.
            EngineError: The library below reports a failure.
        """
        super().connect()
        if self._free_before is not None:
            self.exchange([])  # names the members that are late
            self.barrier()
            self._bounded(self._drain, Deadline(self.timeout), "connect")

    def _refuse_capture(self, remedy: str) -> None:
        raise ArgumentError(
            f"{self.where('a call')} in a capture: torch would make an NCCL communicator for it, "
            f"which no capture allows. {remedy}"
        )

    def _to(self, peer: int) -> None:
        """Refuse the first call to a peer in a capture."""
        if self.fences is not None and not self._batched and peer not in self._peers:
            if capturing():
                self._refuse_capture("Make this send or recv once before the capture")
            self._peers.add(peer)

    def _send(self, out: None, x: torch.Tensor, peer: int, tag: int = 0) -> Any:
        self._to(peer)
        return super()._send(out, x, peer, tag)

    def _recv(self, out: torch.Tensor, x: None, peer: int, tag: int = 0) -> Any:
        self._to(peer)
        return super()._recv(out, x, peer, tag)

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Bracket several launches as one; they share the group's communicator."""
        with super().coalesced():
            self._batched = True
            try:
                yield
            finally:
                self._batched = False

    @property
    def has_communicator(self) -> bool:
        """Whether torch has made the group's communicator; on GPUs the first call does."""
        return super().has_communicator and self._free_before is None

    def _make(self, store: EngineStore, wait: timedelta) -> Any:
        group = dist.ProcessGroup(dist.HashStore(), self.rank, self.size)  # it asks its backend
        backend: Any
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = wait
            # The first call makes the communicator, and waits in the store for as long as this.
            backend = dist.ProcessGroupNCCL(store.for_good(wait), self.rank, self.size, options)
            kind = dist.ProcessGroup.BackendType.NCCL
            self._free_before = torch.cuda.mem_get_info(self.device)[0]
        else:
            place = self.rank, self.size, wait, self._one_network
            backend = host_exchange.connect(store, *place)
            kind = dist.ProcessGroup.BackendType.GLOO
        group._set_default_backend(kind)
        group._register_backend(self.device, kind, backend)
        return group

    def _issued(self, work: Any) -> Any:
        if self._free_before is not None:  # the first call has just made the communicator
            taken = self._free_before - torch.cuda.mem_get_info(self.device)[0]
            self.communicator_bytes, self._free_before = max(0, taken), None
        return super()._issued(work)
