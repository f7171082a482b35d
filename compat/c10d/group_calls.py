"""A group of commlib as torch sees it, a process group or a backend: its rings and its calls."""

from collections.abc import Sequence
from dataclasses import replace
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
from commlib.compat.c10d.options import duration, options, single
from commlib.compat.c10d.unsupported import UnsupportedCalls
from commlib.compat.c10d.work import DONE, GroupWork, HostBarrier
from commlib.core.calls.order import CallOrder
from commlib.core.compiler import untraced_methods
from commlib.core.context import CommContext
from commlib.core.dispatch import is_plain
from commlib.core.tensors import is_symbolic
from commlib.errors import ArgumentError, DeviceError

NAME = "commlib"
_UNSET = timedelta(0)
_DEFAULTS = c10d.AllreduceOptions()  # of sends and receives, which take none


@untraced_methods
class GroupCalls(UnsupportedCalls, Collectives):
    """The calls of a group over the rings of its ranks: one ring per kind of device."""

    supports_splitting = True
    supports_coalescing = True

    def _set_up(
        self,
        rings: dict[str, CommContext],
        timeout: timedelta,
        orders: dict[str, CallOrder] | None,
        key: str,
    ) -> None:
        """Take the rings by type of device; the first one is that of a call without tensors.

        ``key`` is the group's name, or where torch names it differently on its members, the name
        that all of them have.
        """
        self._key, self._splits = key, 0
        self.rings, self._main, self._sequence = rings, next(iter(rings.values())), 0
        self._orders = orders or {}
        self._main_order = self._orders.get(self._main.device.type)
        self._held = rings, self._orders  # until the group ends
        for ring in rings.values():
            group_rings.add_to_remedy(ring)
        self.set_timeout(timeout)
        self._batches: dict[int, Batch] = {}  # open coalescing, by thread

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    # -- collectives -------------------------------------------------------------------------------

    def _ring_for(self, tensors: Given) -> CommContext:
        """Return the ring of the tensors' device."""
        main = self._main
        if not tensors:
            raise ArgumentError(
                f"{main._describe('a group')}: a list without tensors; expected one or more; leave "
                f"the call out on every rank"
            )
        first = tensors[0]
        if first.get_device() == main._device_number:
            return main
        ring = self.rings.get(first.device.type)
        if ring is None:
            raise DeviceError(
                f"{main._describe('a group')}: a tensor is on {first.device}; expected one of "
                f"{[*self.rings]}"
            )
        return ring

    def _plain_ring(self, out: torch.Tensor, x: torch.Tensor, opts: Any) -> CommContext | None:
        """Return the ring of a synchronous call that can go to it as it is, else None.

        The first ring takes both tensors without a check; nothing is queued, and the only deadline
        is that of the ring.
        """
        if self._batches or self._limited or pairs.queued() or opts.timeout > _UNSET:
            return None
        if not is_plain(self._main, x, out, part=True):
            return None
        self._sequence += 1
        return self._main

    def _issue(
        self, ring: CommContext, step: Step, opts: Any, kind: type[GroupWork] = GroupWork
    ) -> dist.Work:
        """Launch a step as its options say, or keep it for the end of coalescing."""
        self._sequence += 1
        pairs.flush()
        step = self._in_order(ring, step)
        if step.tensors and is_symbolic(step.tensors[0]):
            return DONE  # a trace wants to know that the call is valid, and its shapes are there
        batch = self._batches.get(get_ident()) if self._batches else None
        if batch is not None:
            try:
                batch.add(ring, step)
            except ArgumentError:
                self.drop_coalescing()  # later calls of the thread must not join what never ends
                raise
            return DONE
        limit = self._limit(ring, opts)
        if opts.asyncOp:
            return launch_async(ring, step, limit, kind)
        launch(ring, step, limit if ring.stream is None else None)
        return DONE

    def _in_order(self, ring: CommContext, step: Step) -> Step:
        """Return a step whose calls belong to this group's own order of calls, if it has one."""
        order = self._orders.get(ring.device.type) if self._orders else None
        if order is None:
            return step
        return replace(step, calls=[partial(order.run, call) for call in step.calls])

    def _limit(self, ring: CommContext, opts: Any) -> float | None:
        """Return the seconds of a call; None for the ring's own timeout."""
        if opts.timeout > _UNSET:
            return float(opts.timeout.total_seconds())
        return None if ring.stream is not None else self._limited

    def _is_coalescing(self) -> bool:
        return get_ident() in self._batches

    def send(self, tensors: Given, peer: int, tag: int = 0) -> dist.Work:
        """Send a tensor to position ``peer``; NCCL ignores the tag."""
        x = single(tensors)
        ring = self._ring_for([x])
        tags = {"tag": tag} if tag and ring.stream is None else {}
        return self._pair(ring, Step([partial(ring.send, x, peer=peer, **tags)], [x]), -1, peer)

    def recv(self, tensors: Given, peer: int, tag: int = 0) -> dist.Work:
        """Fill a tensor with what position ``peer`` sends; NCCL ignores the tag."""
        out = single(tensors)
        ring = self._ring_for([out])
        tags = {"tag": tag} if tag and ring.stream is None else {}
        step = Step([partial(ring.recv, out, peer=peer, **tags)], [out])
        return self._pair(ring, step, peer, peer)

    def _pair(self, ring: CommContext, step: Step, source: int, peer: int) -> dist.Work:
        if ring.stream is not None and not self._is_coalescing():
            return pairs.queue(ring, self._in_order(ring, step), source, peer)
        work = self._issue(ring, step, _DEFAULTS)
        if isinstance(work, GroupWork):
            work._source = source
        return work

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> dist.Work:
        """Block the host, in ``wait()`` of the work, until every rank has called it."""
        opts = options(c10d.BarrierOptions, opts, timeout)
        ring = self._main if opts.device is None else self.rings.get(opts.device.type, self._main)
        later = options(c10d.BarrierOptions, None, opts.timeout)  # the caller's stay as they are
        later.asyncOp = True
        work = self._issue(ring, Step([ring.barrier], []), later, HostBarrier)
        if not opts.asyncOp:
            work.wait()
        return work if opts.asyncOp else DONE

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Block the host until every rank has called it; the error names the ranks that have not.

        Args:
            timeout: A timedelta or seconds. Default: that of the group, or of its ring if shorter.
            wait_all_ranks: The error always names all ranks that are late.

        Raises:
            CommTimeout: Ranks are missing.
        """
        pairs.flush()
        max_wait = getattr(timeout, "timeout", timeout)  # C++ passes its options
        max_wait = None if max_wait is None else duration(max_wait)
        limit: Any = self._limited  # C++ passes a negative timeout where none is given
        if max_wait is not None and max_wait >= _UNSET:
            limit = max(max_wait, timedelta(milliseconds=1))
        self._main.monitored_barrier(timeout=limit)

    # -- coalescing --------------------------------------------------------------------------------

    def start_coalescing(self) -> None:
        """Keep the calls of this thread until ``end_coalescing``; drop those of a broken block."""
        self._batches[get_ident()] = Batch()

    def end_coalescing(self) -> dist.Work:
        """Launch the calls as one operation, and return the work of all of them.

        Raises:
            ArgumentError: No coalescing is open: none was started, or one of its calls failed.
        """
        batch = self._batches.pop(get_ident(), None)
        if batch is None:
            raise ArgumentError(
                f"{self._main._describe('end_coalescing')}: no coalescing is open on this thread; "
                f"call start_coalescing first. A call that failed in it has dropped all its calls"
            )
        if batch.ring is None:
            return DONE
        return launch_async(batch.ring, batch.step(), self._limit(batch.ring, _DEFAULTS))

    def drop_coalescing(self) -> None:
        """Launch none of the calls of this thread since ``start_coalescing``."""
        self._batches.pop(get_ident(), None)

    # -- life --------------------------------------------------------------------------------------

    def split_name(self, positions: Sequence[int]) -> str:
        """Return the name of a new group of some positions; every member of this one calls it.

        Torch's names of such groups depend on the number of groups that a rank is in.
        """
        self._splits += 1
        return f"{self._key}:split {self._splits}:{','.join(map(str, positions))}"

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest of later waits on a CPU; a ring's own timeout still holds."""
        self._timeout, seconds = timeout, timeout.total_seconds()
        # None: the ring's own deadline comes first
        self._limited = None if seconds >= self._main.timeout else seconds

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Close the rings that were made for groups and that no group uses any more."""
        (rings, orders), self._held = self._held, ({}, {})
        try:
            pairs.flush()
        finally:
            group_rings.release(rings, orders)

    def abort(self) -> None:
        """End the calls in flight; later ones raise.

        On a CPU other groups over the same ranks go on, unless this one has made their ring. Else
        the rings that were made for groups are aborted, and end with all their groups. A ring of
        the program stays. Sends and receives that wait for their launch are dropped.
        """
        for ring in self.rings.values():
            pairs.drop(ring)
        (rings, orders), self._held = self._held, ({}, {})
        group_rings.abort(rings, orders)
        group_rings.release({}, orders)

    def supports_tensor_alloc(self, device: Any) -> bool:
        """Return False: a ring registers no memory of the program."""
        return False

    def eager_connect_single_device(self, device: Any) -> None:
        """Make the communicator now; every member calls it, for a group with ``device_id=``.

        Raises:
            DeviceError: The group's ring is on another device.
        """
        bound = torch.device(device)
        ring = self.rings.get(bound.type)
        if ring is None or ring.device != bound:
            raise DeviceError(
                f"{self._main._describe('init_process_group')}: device_id={bound}; the group has "
                f"rings on {[str(ring.device) for ring in self.rings.values()]}; call "
                f"torch.cuda.set_device(device_id) before it"
            )
        ring.connect()

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: only the members of a new group make it."""

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: the number counts from the group's first call."""
