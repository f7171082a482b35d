"""The life of a ring: how its members connect, check, repair, suspend and end it together."""

from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch

from commlib.core.calls.reports import CallReports
from commlib.core.device_reports import DeviceReports
from commlib.core.health import RingHealth
from commlib.deadlines import Deadline
from commlib.deferred import UnfencedCalls
from commlib.engines.base import Engine
from commlib.errors import CommError, CommTimeout, RingError
from commlib.keepalive import keep_forever
from commlib.log import log
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import RingIdentity
from commlib.streams import issue_lock

# How long reset() lets other work of a device run on after a fault.
REST_S = 10.0
_LOOKS = 5  # half deadlines without a fault

_SUSPENDED = "suspended; call ring.resume() on every member"


class RingLifecycle:
    """Operates on the parts of one ring; it launches no collective."""

    def __init__(
        self,
        identity: RingIdentity,
        health: RingHealth,
        hosts: HostExchange,
        engine: Engine,
        reports: CallReports | None,
        unfenced: UnfencedCalls,
        device_reports: DeviceReports,
    ) -> None:
        self._identity, self._health, self._hosts = identity, health, hosts
        self._engine, self._reports, self._unfenced = engine, reports, unfenced
        self._device_reports = device_reports
        self.graphs: WeakSet[Any] = WeakSet()  # captured functions that hold calls of this ring
        self._lock = issue_lock(identity.device)

    # -- connect, check ----------------------------------------------------------------------------

    def connect(self) -> None:
        """Make now what a first call would otherwise make; every member calls it."""
        self._check_usable("connect")
        self._engine.connect()

    def check(self) -> None:
        """Raise what kernels of this ring have reported so far; never blocks."""
        with self._lock:
            self._check_usable("check")
            try:
                for channel in self._engine.channels():
                    channel.check()
            except CommError as error:
                raise self._health.failed("check", error) from error
            self._device_reports.check()

    def _check_usable(self, step: str) -> None:
        if self._health.fault is not None:
            raise self._health.unusable(step)

    # -- repair ------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Repair the ring after ``PeerTimeout`` or ``StreamError``; every member calls it."""
        with self._lock:
            if self._health.fault is not None and not self._health.repairable:
                raise self._health.unusable("reset")
            self._health.recover()
            if not self._all_idle():
                self._reset_step(self._reconnect)
                self._hosts.exchange([])  # no member's kernels run any more
            for channel in self._engine.channels():
                self._reset_step(channel.reset)
            self._hosts.exchange([])
            self._health.repairable = False

    def _all_idle(self) -> bool:
        """Return True if every member's device becomes idle; all members get the same answer.

        Push kernels give up within two deadlines, and at once when one of them has. What still
        runs after a fault waits for a peer in a library that has no deadline.
        """
        for _ in range(_LOOKS):
            rows = self._hosts.exchange([int(self._idle()), int(self._reported())])
            if all(idle for idle, _ in rows):
                return True
            if any(reported for _, reported in rows):
                break
        return False

    def _idle(self) -> bool:
        """Return True if this device becomes idle before the peers stop waiting for the answer."""
        timeout = self._identity.timeout
        most = min(timeout / 2, REST_S) if self._reported() else timeout / 2
        try:
            self._drain_in(Deadline(most), "reset")
        except CommTimeout:
            return False
        return True

    def _reported(self) -> bool:
        """Return True if a kernel has reported a fault."""
        try:
            for channel in self._engine.channels():
                channel.check()
        except CommError:
            return True
        return False

    def _reconnect(self) -> None:
        """Replace communicators whose kernels wait for ever; their graphs are released first."""
        if not self._engine.replaceable:
            raise CommTimeout("a device is not idle")
        self._release_graphs()
        self._engine.disconnect()
        self._drain_in(Deadline(self._identity.timeout / 2), "reset")
        self._engine.reconnect()

    def _reset_step(self, step: Callable[[], None]) -> None:
        """Take a step of reset(); the ring can't be repaired any more if it fails."""
        try:
            step()
        except Exception as error:
            raise self._health.failed("reset", error) from error

    # -- memory between phases ---------------------------------------------------------------------

    def suspend(self) -> None:
        """Free GPU memory until ``resume``; every member calls it."""
        self._check_usable("suspend")
        try:
            self._drain_in(Deadline(self._identity.timeout), "suspend")
            self._hosts.exchange([])  # no member has calls in flight any more
            self._engine.suspend()
        except Exception as error:
            raise self._health.failed("suspend", error) from error
        self._health.suspended, self._health.fault = True, _SUSPENDED

    def resume(self) -> None:
        """Make a suspended ring usable again; every member calls it."""
        health = self._health
        if not health.suspended:
            prefix, state = self._identity.describe("resume"), health.fault or "ready"
            raise RingError(f"{prefix}: the ring is not suspended: {state}")
        health.suspended, health.fault = False, None
        try:
            self._hosts.exchange([])
            self._engine.resume()
        except Exception as error:
            raise health.failed("resume", error) from error

    # -- the end -----------------------------------------------------------------------------------

    def abort(self, deadline: Deadline) -> None:
        """Abort the communicators at once, from any thread: no lock is taken."""
        if self._health.forgotten:
            return
        self._health.end("aborted")
        log.info(self._identity.describe("abort"))
        if self._reports is not None:
            self._reports.abandon()
        self._release_graphs()
        self._hosts.detach()
        self._engine.abort()
        self._unfenced.release()  # only now: until then collectives may use the tensors
        self._hosts.close(deadline)

    def close(self, deadline: Deadline) -> bool:
        """Finish the calls in flight and free everything; False if only an abort can.

        Raises:
            CapacityError: A call reported it, and no check since. The ring is closed.
        """
        health = self._health
        if health.forgotten:
            return True
        if health.fault is not None and not health.suspended:
            return False
        health.end("closed")
        log.info(self._identity.describe("close"))
        self._release_graphs()
        if not health.attempt(self._drain, deadline, "draining"):
            return False
        reported = self._device_reports.error()  # before the engine frees what holds it
        self._unfenced.release()
        if self._reports is not None:
            self._reports.close()
        self._hosts.detach()
        self._engine.close(deadline)
        self._hosts.close(deadline)
        if reported is not None:
            raise reported
        return True

    def forget(self, why: str) -> None:
        """Drop everything in a forked child, without a call to an engine and without freeing it."""
        keep_forever(self._engine, self._hosts, list(self.graphs), self._reports)
        self._health.forget(why)
        self._hosts.forget()
        self._lock = issue_lock(self._identity.device)

    def _release_graphs(self) -> None:
        """Release graphs that hold calls of this ring: NCCL frees no communicator before them."""
        for graph in list(self.graphs):
            graph.reset()

    def _drain(self) -> None:
        """Wait for every stream of the device: any of them may hold calls of this ring."""
        if self._identity.device.type == "cuda":
            torch.cuda.synchronize(self._identity.device)

    def _drain_in(self, deadline: Deadline, step: str) -> None:
        if self._identity.device.type == "cuda":
            self._identity.bounded(self._drain, deadline, step)
