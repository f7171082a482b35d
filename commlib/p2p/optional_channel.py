"""A channel of one ring that is set up at the first call that needs it."""

from typing import Generic, Protocol, TypeVar

from commlib.log import log
from commlib.p2p.channel import Channel
from commlib.p2p.residency import Claim
from commlib.rendezvous.hosts import HostExchange


class CapturedChannel(Channel, Protocol):
    """A channel whose memory is freed while a ring is suspended."""

    @property
    def captured(self) -> bool:
        """Return True if a graph may hold calls."""


C = TypeVar("C", bound=CapturedChannel)
C_co = TypeVar("C_co", covariant=True)


class Open(Protocol[C_co]):
    """Set a channel up, with all members; returns why not, or None to ask again later."""

    def __call__(self, hosts: HostExchange, claim: Claim) -> C_co | str | None:
        """``claim``: what the kernels may take of the GPU."""


class OptionalChannel(Generic[C]):
    """A channel, or the reason why there is none."""

    def __init__(self, hosts: HostExchange, open_channel: Open[C], without: str) -> None:
        """``without``: how the log describes a ring that has none."""
        self._hosts, self._open, self._without = hosts, open_channel, without
        self._found: C | str | None = None  # None while it is not decided

    def prepare(self, claim: Claim) -> C | None:
        """Return the channel, set up at the first call; every member calls it."""
        if self._found is None:
            self._found = self._open(self._hosts, claim)
            if isinstance(self._found, str):
                number = self._hosts.identity.ring_id
                log.once("%s of ring %d: %s", self._without, number, self._found)
        return self.channel

    @property
    def channel(self) -> C | None:
        """Return the channel; None without one."""
        return None if isinstance(self._found, str) else self._found

    @property
    def captured(self) -> bool:
        """Return True if a graph may hold calls."""
        return self.channel is not None and self.channel.captured

    def free(self) -> None:
        """Free the memory; the next call that needs the channel sets one up."""
        if self.channel is not None:
            self.channel.close()
            self._found = None

    def end(self, how: str) -> None:
        """Forget the channel for good."""
        self._found = how
