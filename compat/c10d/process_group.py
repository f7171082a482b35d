"""A process group of ``torch.distributed`` whose collectives are those of our rings."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import get_ident
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from commlib.compat.c10d import group_rings, pairs
from commlib.compat.c10d.collectives import Collectives, Given
from commlib.compat.c10d.launching import Batch, Step, launch, launch_async
from commlib.compat.c10d.options import options, single
from commlib.compat.c10d.work import DONE, GroupWork, HostBarrier
from commlib.core.context import CommContext
from commlib.core.tensors import is_symbolic
from commlib.errors import DeviceError
from commlib.rendezvous.world import World

NAME = "commlib"
_UNSET = timedelta(0)
_DEFAULTS = c10d.AllreduceOptions()  # of sends and receives, which take none


@dataclass
class Options:
    """What a group was made with, as ``group._get_backend(device).options``."""

    _timeout: timedelta
    global_ranks_in_group: list[int]
    group_name: str = ""


class ProcessGroup(Collectives, dist.ProcessGroup):
    """A process group over the rings of its ranks: one per kind of device.

    ``dist.*`` takes it as any other group. Its ring is the ring of ``commlib.ring_from_group``.

    Args:
        rings: By type of device; the first one is that of a call without tensors.
        store: The group's own store.
        world: This process's place among all ranks.
        timeout: Seconds of every wait on a CPU, as a timedelta.
    """

    supports_splitting = True
    supports_coalescing = True
    supports_time_estimate = False

    def __init__(
        self,
        rings: dict[str, CommContext],
        store: dist.Store | None,
        world: World,
        timeout: timedelta,
    ) -> None:
        main = next(iter(rings.values()))
        dist.ProcessGroup.__init__(self, main.rank, main.size)  # type: ignore[call-arg]
        self.rings, self._store, self._world, self._timeout = rings, store, world, timeout
        self._main, self._sequence = main, 0
        self._batches: dict[int, Batch] = {}  # open coalescing, by thread
        self._name = self._desc = ""
        if main.device.type == "cuda":
            self.bound_device_id = main.device

    def __repr__(self) -> str:
        return f"<commlib group {self._name!r} of {[*self.rings.values()]}>"

    # -- identity ----------------------------------------------------------------------------------

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    _get_backend_name = name = getBackendName

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the group's name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the group's description."""
        return self._desc

    def setGroupDesc(self, description: str) -> None:
        """Set the group's description."""
        self._desc = description

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc  # type: ignore[assignment]
    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in self.rings]

    @property
    def options(self) -> Options:
        """What the group was made with."""
        return Options(self._timeout, list(self._main.ranks), self._name)

    def _get_backend(  # type: ignore[override]  # torch expects a C++ object
        self, device: torch.device
    ) -> "ProcessGroup":
        """Return the group: it is the backend of each of its devices."""
        if torch.device(device).type not in self.rings:
            raise DeviceError(f"{self!r}: no backend for {device}; it has {[*self.rings]}")
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False: a ring registers no memory of the program."""
        return False

    # -- collectives -------------------------------------------------------------------------------

    def _ring_for(self, tensors: Given) -> CommContext:
        """Return the ring of the tensors' device."""
        device = tensors[0].device
        ring = self.rings.get(device.type)
        if ring is None:
            raise DeviceError(
                f"group {self._name!r}: a tensor is on {device}; expected one of {[*self.rings]}"
            )
        return ring

    def _issue(
        self, ring: CommContext, step: Step, opts: Any, kind: type[GroupWork] = GroupWork
    ) -> Any:
        """Launch a step as its options say, or keep it for the end of coalescing."""
        self._sequence += 1
        pairs.flush()
        if step.tensors and is_symbolic(step.tensors[0]):
            return DONE  # a trace wants to know that the call is valid, and its shapes are there
        batch = self._batches.get(get_ident()) if self._batches else None
        if batch is not None:
            batch.steps.append(step)
            return DONE
        limit = self._limit(ring, opts)
        if opts.asyncOp or (limit is not None and ring.stream is None):
            work = launch_async(ring, step, limit, kind)
            return work if opts.asyncOp else _waited(work)
        launch(ring, step)
        return DONE

    def _limit(self, ring: CommContext, opts: Any) -> float | None:
        """Return the seconds of a call's waits on the host; None for the ring's own timeout."""
        if opts.timeout > _UNSET:
            return float(opts.timeout.total_seconds())
        seconds = self._timeout.total_seconds()
        return None if ring.stream is not None or seconds >= ring.timeout else seconds

    def send(self, tensors: Given, peer: int, tag: int = 0) -> Any:
        """Send a tensor to position ``peer``; NCCL ignores the tag."""
        x = single(tensors)
        ring = self._ring_for([x])
        tags = {"tag": tag} if tag and ring.stream is None else {}
        return self._pair(ring, Step([partial(ring.send, x, peer=peer, **tags)], [x]), -1)

    def recv(self, tensors: Given, peer: int, tag: int = 0) -> Any:
        """Fill a tensor with what position ``peer`` sends; NCCL ignores the tag."""
        out = single(tensors)
        ring = self._ring_for([out])
        tags = {"tag": tag} if tag and ring.stream is None else {}
        return self._pair(ring, Step([partial(ring.recv, out, peer=peer, **tags)], [out]), peer)

    def _pair(self, ring: CommContext, step: Step, source: int) -> Any:
        if ring.stream is not None and get_ident() not in self._batches:
            return pairs.queue(ring, step, source)
        work = self._issue(ring, step, _DEFAULTS)
        if isinstance(work, GroupWork):
            work._source = source
        return work

    def recv_anysource(self, tensors: Given, tag: int = 0) -> Any:
        """Refuse a receive from any rank."""
        raise NotImplementedError("recv without src: rings receive from one rank; pass src=")

    def barrier(  # type: ignore[override]  # either form takes both
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Block the host, in ``wait()`` of the work, until every rank has called it."""
        opts = options(c10d.BarrierOptions, opts, timeout)
        ring = self._main if opts.device is None else self.rings.get(opts.device.type, self._main)
        asynchronous, opts.asyncOp = opts.asyncOp, True
        work = self._issue(ring, Step([ring.barrier], []), opts, HostBarrier)
        return work if asynchronous else _waited(work)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Block the host until every rank has called it; the error names the ranks that have not.

        Args:
            timeout: Default: the group's.
            wait_all_ranks: The error always names all ranks that are late.

        Raises:
            CommTimeout: Ranks are missing.
        """
        self._main.monitored_barrier(timeout=timeout or self._timeout)

    # -- coalescing --------------------------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Keep the calls of this thread until ``_end_coalescing``."""
        ring = self.rings[torch.device(device).type]
        self._batches[get_ident()] = Batch(ring)

    def _end_coalescing(self, device: torch.device) -> Any:
        """Launch the calls as one operation, and return the work of all of them."""
        batch = self._batches.pop(get_ident())
        if not batch.steps:
            return DONE
        return launch_async(batch.ring, batch.step())

    # -- life --------------------------------------------------------------------------------------

    def split_group(  # type: ignore[override]  # 2.11 names fewer arguments
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        **others: Any,
    ) -> "ProcessGroup | None":
        """Return a group of some positions of this one; None on ranks that are not in it."""
        members = tuple(self._main.ranks[position] for position in ranks)
        if self._world.rank not in members:
            return None
        name = group_name or f"{self._name}:{','.join(map(str, ranks))}"
        store = dist.PrefixStore(f"{name}/", self.get_group_store())
        group = new_group(name, members, self._world, store, timeout or self._timeout)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or "undefined")
        return group

    def get_group_store(self) -> dist.Store:
        """Return the group's own store.

        Raises:
            NotImplementedError: The group was made from a ring, which has none for programs.
        """
        if self._store is None:
            raise NotImplementedError("a group of a ring has no store; call dist.new_group(ranks)")
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the seconds of later waits on a CPU, at most the ring's timeout."""
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the rings that were made for groups and that no group uses any more."""
        pairs.flush()
        group_rings.release(self.rings)

    def abort(self) -> None:
        """Abort the rings at once, with all calls in flight."""
        group_rings.abort(self.rings)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Make the communicator now; every member calls it."""
        self.rings[torch.device(device).type].connect()

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: only the members of a new group make it."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the number counts from the group's first call."""


def new_group(
    name: str, ranks: tuple[int, ...], world: World, store: dist.Store, timeout: timedelta
) -> ProcessGroup:
    """Return a group of some global ranks; its members alone call it."""
    rings = group_rings.make_rings(name, ranks, world, store, timeout)
    return ProcessGroup(rings, store, world, timeout)


def _waited(work: Any) -> Any:
    work.wait()
    return DONE
