"""A ring as the modules below ``CommContext`` see it: its public identity and its parts."""

from collections.abc import Iterable, Mapping
from threading import RLock
from typing import Any, Protocol

import torch

from commlib.core.calls.log import CallLog
from commlib.core.device_reports import DeviceReports
from commlib.core.health import RingHealth
from commlib.core.lifecycle import RingLifecycle
from commlib.deferred import UnfencedCalls
from commlib.engines.base import Engine
from commlib.engines.reduction_names import RingReduction
from commlib.rendezvous.call_board import CallBoard
from commlib.rendezvous.environment import World
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import Remedy
from commlib.streams import Fences


class Elsewhere(Protocol):
    """The rings that this rank is not a member of."""

    elsewhere: dict[int, tuple[int, ...]]


class RingSource(Protocol):
    """The manager as its rings see it, which make further rings."""

    @property
    def _creating(self) -> Mapping[int, Any]: ...

    @property
    def _table(self) -> Elsewhere: ...

    def _world(self) -> World: ...

    def create(
        self,
        ring_id: int,
        ranks: Iterable[int],
        *,
        device: torch.device | None,
        timeout: float | None,
        name: str,
        remedy: Remedy,
    ) -> Any:
        """Return a new ring."""

    def has(self, ring_id: int) -> bool:
        """Return True if a ring exists on this rank."""


class Ring(Protocol):
    """The identity and the parts of one ring; ``CommContext`` puts them together."""

    ring_id: int
    rank: int
    size: int
    ranks: tuple[int, ...]
    device: torch.device
    timeout: float
    engine: str
    name: str

    _source: RingSource
    _engine: Engine
    _health: RingHealth
    _hosts: HostExchange
    _lifecycle: RingLifecycle
    _device_reports: DeviceReports
    _fences: Fences | None  # This is None on a CPU.
    _lock: RLock  # The issue lock of the device.
    _groups: dict[int, Any]  # The open group of each thread, by the thread's number.
    _orders: dict[int, Any]  # The order that a thread's calls belong to, if it is not the ring's.
    _unfenced: UnfencedCalls
    _compares: bool  # every call, before its launch
    _board: CallBoard | None  # where calls are posted before their launch, on a CPU
    _boards: list[CallBoard]  # that one, and those of other orders of calls
    _call_log: CallLog | None
    _calls: int
    _last: str | None
    _device_number: int

    @property
    def _open_group(self) -> Any:
        """The group that collects the calls of the calling code; None if they are launched."""
        raise NotImplementedError

    def _describe(self, collective: str) -> str:
        """Return the start of an error text: the collective, the ring and the rank."""
        raise NotImplementedError

    # The collectives that others are made of.

    def broadcast(self, out: torch.Tensor, x: torch.Tensor | None, *, root: int) -> Any:
        """Fill ``out`` on every rank with ``x`` of ``root``."""
        raise NotImplementedError

    def reduce(
        self,
        out: torch.Tensor | None,
        x: torch.Tensor,
        *,
        root: int,
        op: RingReduction,
        factor: float | None,
    ) -> Any:
        """Fill ``out`` of ``root`` with the reduction of ``x``."""
        raise NotImplementedError
