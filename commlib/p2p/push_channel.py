"""The workspace that the push kernels of one ring share, and one call after another in it."""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from commlib.errors import ArgumentError, PeerTimeout, StreamError
from commlib.p2p import kernel_table, nvrtc, residency
from commlib.p2p.peer_memory import PeerMemory
from commlib.p2p.residency import Claim
from commlib.rendezvous.hosts import HostExchange
from commlib.streams import capture_of, current_raw

RANKS = 8  # as in channel.cuh
WINDOW = 16 << 20  # bytes of an all_reduce that one launch does; larger ones take several
WARP = 32
COLLECTIVES = (
    "all_reduce",
    "reduce_scatter",
    "all_gather",
    "all_to_all",
    "all_reduce_residual_norm",
)

_CONTROL, _LIMIT = 4096, 24  # bytes of control words; offset of limit_ns
SPARE = 4096  # bytes of a half in addition to two windows: slots begin at whole vectors
WORKSPACE = _CONTROL + 2 * (2 * WINDOW + SPARE)  # bytes
_LAUNCH_BITS = 17  # of a tag: bits of the launch's number
_STREAMS = 1 << 10  # that tags tell apart, as in channel.cuh
_LAUNCH_MASK = (1 << _LAUNCH_BITS) - 1
_LATE, _TWO_AT_ONCE = 1, 2  # as in channel.cuh


class Call(ctypes.Structure):
    """The arguments of a kernel; as in channel.cuh."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("items", ctypes.c_int64),
        ("memory", ctypes.c_void_p * RANKS),
        ("error", ctypes.c_void_p),
        ("half", ctypes.c_int64),
        ("rank", ctypes.c_int),
        ("tag", ctypes.c_uint32),
        ("collective", ctypes.c_uint32),
        ("option", ctypes.c_int),
        ("signals", ctypes.c_int),
        ("early", ctypes.c_int),
    ]


class Step(NamedTuple):
    """One launch of a call, ``offset`` bytes into its tensors."""

    call: Call
    launch: nvrtc.Launch
    offset: int


class PushChannel:
    """Memory that the ranks of a ring share, and the kernels that work in it, in stream order."""

    def __init__(
        self, hosts: HostExchange, memory: PeerMemory, modules: Sequence[Any], claim: Claim
    ) -> None:
        """``claim``: what the kernels may take of the GPU."""
        self._ring, self._memory, self._modules = hosts.identity, memory, modules
        self._fills, self._order = claim
        self._device, self._error = self._ring.device.index, nvrtc.HostWord()
        self._word = self._error.word
        self._launched = 0  # The number of calls, for their tags.
        self.share = 0  # The most blocks of the calls that are made now, 0 for no such limit.
        self._open = self._opened = 0  # The number of the open split call, or 0; and of the last.
        self._open_in = 0  # The capture that its first half is part of, 0 for none.
        self._half = (memory.nbytes - _CONTROL) // 2
        self._set_limit()

    @property
    def nbytes(self) -> int:
        """The GPU memory of the channel on this rank."""
        return self._memory.nbytes

    @property
    def size(self) -> int:
        """The number of ranks that share the channel."""
        return self._ring.size

    # -- making calls ------------------------------------------------------------------------------

    def call(self, collective: str, items: int, option: int) -> Call:
        """Return the argument of a kernel, but for what changes with every call."""
        ring = self._ring
        call = Call(
            items=items, rank=ring.rank, collective=COLLECTIVES.index(collective), option=option
        )
        bases = self._memory.bases
        call.memory[: ring.size] = bases[ring.rank :] + bases[: ring.rank]
        call.error, call.half = self._error.address, self._half
        return call

    def prepare(
        self, name: str, grid: nvrtc.Grid, argument: ctypes.Structure, call: Call
    ) -> nvrtc.Launch:
        """Return a launch of kernel ``name``, with as many blocks as this ring may have now.

        ``call``: the ``argument``, or the part of it that all kernels have.
        """
        kernel = nvrtc.function(self._modules, name, self._device)
        most = residency.most_blocks(kernel, self._device, grid.threads, self._fills)
        grid = grid.within(min(most, self.share or most))
        call.early = int(self._fills and not self.share)  # see residency
        return nvrtc.Launch(kernel, self._device, grid, argument)

    def window(self, kernel: str) -> int:
        """Return the bytes that one launch of ``kernel`` can do."""
        return min(kernel_table.room(kernel, self._half, self._ring.size), WINDOW)

    # -- launching ---------------------------------------------------------------------------------

    def turn(self) -> tuple[int, int]:
        """Return the current stream, ordered after the last call, and the tag of the next call.

        Raises ``PeerTimeout`` or ``StreamError`` when an earlier call has reported a fault, and
        ``ArgumentError`` between the halves of a split one.
        """
        order = self._order
        if self._word.value or self._open:
            self._refuse()
        stream = current_raw(self._device)
        if stream != order.last:
            order.switch_stream(stream)
        self._launched = launch = self._launched + 1 & _LAUNCH_MASK
        return stream, order.tag % _STREAMS << _LAUNCH_BITS | launch

    def _refuse(self) -> None:
        self.check()
        raise ArgumentError(
            f"a split all_reduce of ring {self._ring.ring_id} is open on rank "
            f"{self._ring.rank}: one call at a time; wait() for its Work first, or call "
            f"ring.reset() on every member where that is lost"
        )

    def launch(self, steps: Sequence[Step], out: torch.Tensor, x: torch.Tensor) -> None:
        """Launch ``steps`` on the current stream, after the last call; never blocks.

        ``turn`` and ``Launch.__call__`` are written out: nearly every call of a ring passes here.
        """
        order = self._order
        if self._word.value or self._open:
            self._refuse()
        stream = current_raw(self._device)
        if stream != order.last:
            order.switch_stream(stream)
        self._launched = number = self._launched + 1 & _LAUNCH_MASK
        tag = order.tag % _STREAMS << _LAUNCH_BITS | number
        source = x.data_ptr()
        target = source if out is x else out.data_ptr()
        for call, launch, offset in steps:
            call.x, call.out, call.tag = source + offset, target + offset, tag
            if stream != launch.stream:
                launch.move(stream)
            (status,) = launch.run()
            if status:
                launch.retry(status)
        if order.foreign:
            order.ended(stream)

    def launched(self, stream: int) -> None:
        """Complete a call: record its end where the stream may be gone at the next call."""
        if self._order.foreign:
            self._order.ended(stream)

    # -- in two halves -----------------------------------------------------------------------------

    def open(self, begin: Sequence[Step], out: torch.Tensor, x: torch.Tensor) -> int:
        """Launch the first half of a call; no other call may precede the second half.

        Returns the number that ``finish`` is given.
        """
        self.launch(begin, out, x)
        self._opened += 1
        self._open, self._open_in = self._opened, capture_of(current_raw(self._device))
        return self._open

    def finish(self, number: int, end: Sequence[Step], out: torch.Tensor, x: torch.Tensor) -> None:
        """Launch the second half, where the first one went.

        Raises ``ArgumentError`` after a reset in between, and in another capture: the first
        half would run without the second, or one half would be replayed without the other.
        """
        if number != self._open:
            raise ArgumentError(
                f"reset() has cancelled the split all_reduce of ring {self._ring.ring_id} of "
                f"this Work; begin it again"
            )
        if capture_of(current_raw(self._device)) != self._open_in:
            began = "a graph that is captured" if self._open_in else "no graph"
            raise ArgumentError(
                f"the split all_reduce of ring {self._ring.ring_id} on rank {self._ring.rank} "
                f"began in {began}, and wait() is not there; wait() where it began, or call "
                f"ring.reset() on every member where that is lost"
            )
        self._open = 0
        self.launch(end, out, x)

    def abandon(self, capture: int) -> None:
        """Forget the first half that a capture has recorded and came to nothing with."""
        if self._open and self._open_in == capture:
            self._open = 0

    # -- faults ------------------------------------------------------------------------------------

    def ready(self) -> None:
        """Raise what ``turn`` would raise."""
        if self._word.value or self._open:
            self._refuse()

    def check(self) -> None:
        """Raise what a kernel has reported: ``PeerTimeout`` or ``StreamError``."""
        record = self._word.value
        if not record:
            return
        reason, collective = record >> 61, COLLECTIVES[record >> 53 & 0xFF]
        peer, code = record >> 45 & 0xFF, record & 0xFFFFFFFF
        ring, repair = self._ring, "call ring.reset() on every member"
        if reason == _TWO_AT_ONCE:
            pair = [self._order.stream_of(tag) for tag in (code >> 16, code & 0xFFFF)]
            raise StreamError(
                f"rank {ring.ranks[peer]} ran two calls of ring {ring.ring_id} at the same time, "
                f"one in {collective}: on its streams {pair[0]} and {pair[1]} (a graph counts as "
                f"the stream it was captured on; handles as rank {ring.ranks[ring.rank]} numbers "
                f"them). Order the streams with an event or give each its own ring; then {repair}"
            )
        raise PeerTimeout(
            f"timed out after {ring.timeout:g} s waiting for rank {ring.ranks[peer]} in "
            f"{collective} (call {code} of ring {ring.ring_id}). Results of this and later calls "
            f"are NaN (of integers -1); {repair}"
        )

    def reset(self) -> None:
        """Start again; between two exchanges, while no kernel of any rank runs."""
        self._memory.zero()
        self._set_limit()
        self._word.value = 0
        self._open = 0

    def _set_limit(self) -> None:
        """Write the deadline where a replayed graph reads it too."""
        self._memory.put(_LIMIT, int(self._ring.timeout * 1e9).to_bytes(8, "little"))

    def close(self) -> None:
        """Free the memory once every rank has unmapped it."""
        self._memory.close()
