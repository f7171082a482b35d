"""Rows from every rank straight to their places on every other, through peer memory."""

import ctypes
from pathlib import Path
from typing import Any

import torch

from commlib import flags
from commlib.errors import PeerTimeout
from commlib.log import log
from commlib.p2p import nvrtc, residency
from commlib.p2p.peer_memory import CAPTURING, PeerMemory, share
from commlib.p2p.residency import Claim
from commlib.p2p.routes import SEGMENT, Routes
from commlib.rendezvous.hosts import HostExchange
from commlib.streams import stream_captures

RANKS, _THREADS = 16, 512  # as in rows.cu
_PER_MULTIPROCESSOR = 2  # blocks that fit, as __launch_bounds__ in rows.cu says
_LEAST = 2  # blocks: one pushes, one empties
KERNEL = Path(__file__).parent.parent / "csrc" / "rows.cu"
_CONTROL, _FLAGS = 4096, 1 << 16  # bytes of control words, then of each half's flags
_HALVES = _CONTROL + 2 * _FLAGS  # where they begin
_SMALL, _LARGE, _BORDER = 1 << 14, 1 << 17, 1 << 22  # bytes of a chunk; from which total on


class _Call(ctypes.Structure):
    """The arguments of the kernel, before the segments."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("base", ctypes.c_void_p * RANKS),
        ("error", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("half", "window", "first", "row")),
        ("limit_ns", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rank", "size", "chunk", "sends", "takes")),
        *((name, ctypes.c_int) for name in ("flags", "flag_bytes")),
    ]


def _block(most: int) -> type[ctypes.Structure]:
    """The whole of what the kernel for up to ``most`` segments is given."""
    segments = ctypes.c_byte * (most * SEGMENT.itemsize)
    return type("_Block", (_Call,), {"_fields_": [("send", segments), ("take", segments)]})


_BLOCKS = {most: _block(most) for most in (32, 256)}  # segments each way; the fewer the faster


class RowChannel:
    """The workspace of one ring: one call at a time, in stream order."""

    def __init__(
        self, hosts: HostExchange, memory: PeerMemory, functions: dict[int, Any], claim: Claim
    ) -> None:
        """``claim``: what the kernels may take of the GPU."""
        self._ring, self._memory = hosts.identity, memory
        self._fills, self._order = claim
        self._error = nvrtc.HostWord()
        self.captured = False  # whether a graph may hold calls
        self._window = (memory.nbytes - _HALVES) // 2
        self._calls = {most: _BLOCKS[most]() for most in functions}
        self._launches = {most: self._launch(most, kernel) for most, kernel in functions.items()}

    @property
    def nbytes(self) -> int:
        """The GPU memory of the channel on this rank."""
        return self._memory.nbytes

    def _launch(self, most: int, function: Any) -> nvrtc.Launch:
        """Return the launch of one kernel. All its blocks run at the same time: they wait."""
        device = self._ring.device.index
        blocks = residency.grid(function, device, _THREADS, _PER_MULTIPROCESSOR, self._fills)
        grid = nvrtc.Grid(max(_LEAST, blocks), _THREADS)
        return nvrtc.Launch(function, device, grid, self._calls[most])

    def takes(self, routes: Routes) -> bool:
        """Return True if the call fits; the result is the same on all ranks."""
        return len(routes.sends) <= max(_BLOCKS)

    def exchange(self, out: torch.Tensor, x: torch.Tensor, routes: Routes) -> None:
        """Launch the exchange on the current stream; rows are those of dim 0 of 2-D tensors."""
        self.check()
        most = next(most for most in _BLOCKS if len(routes.sends) <= most)
        call = self._call(most, out, x, routes)
        stream = self._order.turn()
        self.captured = self.captured or stream_captures()
        for first in range(0, routes.most * call.row, self._window):
            call.first = first
            self._launches[most](stream)
        if self._order.foreign:
            self._order.ended(stream)

    def _call(self, most: int, out: torch.Tensor, x: torch.Tensor, routes: Routes) -> Any:
        ring, call = self._ring, self._calls[most]
        call.x, call.out, call.error = x.data_ptr(), out.data_ptr(), self._error.address
        call.base[: ring.size] = self._memory.bases
        call.half, call.window = _HALVES, self._window
        call.flags, call.flag_bytes = _CONTROL, _FLAGS
        call.row, call.limit_ns = x.shape[1] * x.itemsize, int(ring.timeout * 1e9)
        call.chunk = _LARGE if routes.most * call.row >= _BORDER else _SMALL
        call.rank, call.size = ring.rank, ring.size
        for name, segments in (("send", routes.sends), ("take", routes.takes)):
            setattr(call, f"{name}s", len(segments))
            ctypes.memmove(getattr(call, name), segments.tobytes(), segments.nbytes)
        return call

    def ready(self) -> None:
        """Raise what ``exchange`` would raise."""
        self.check()

    def check(self) -> None:
        """Raise ``PeerTimeout`` naming the peer that an earlier call has given up."""
        record = self._error.word.value
        if record:
            peer, number = record >> 32 & 0x7FFFFFFF, record & 0xFFFFFFFF
            raise PeerTimeout(
                f"timed out after {self._ring.timeout:g} s waiting for rank "
                f"{self._ring.ranks[peer]} in exchange_rows (call {number} of this ring); call "
                f"ring.reset() on every member"
            )

    def reset(self) -> None:
        """Start again; between two exchanges, while no kernel of any rank runs."""
        self._memory.zero()
        self._error.word.value = 0

    def close(self) -> None:
        """Free the workspace once every rank has unmapped it."""
        self._memory.close()


def open_channel(hosts: HostExchange, claim: Claim) -> RowChannel | str | None:
    """Set a channel up; every member calls it. Returns why not, or None to ask again later."""
    ring, nbytes, functions = hosts.identity, flags.get(flags.CHANNEL) << 20, {}
    if ring.size > RANKS:
        return f"more than {RANKS} ranks"
    try:
        for most in _BLOCKS:
            module = nvrtc.module(KERNEL, ring.device.index, f"-DSEGMENTS={most}")
            functions[most] = nvrtc.function([module], "exchange_rows", ring.device.index)
    except Exception as error:  # of any kind: the other members learn of it in the exchange
        log.once("this rank has no channel: %s", error)
    sizes = {row[0] for row in hosts.exchange([nbytes if len(functions) == len(_BLOCKS) else 0])}
    if len(sizes) > 1 or 0 in sizes:
        return f"{flags.CHANNEL} is 0 or differs between ranks, or a rank can't compile kernels"
    memory = share(hosts, _HALVES + nbytes, "rows")
    if isinstance(memory, str):
        return None if memory == CAPTURING else memory
    return RowChannel(hosts, memory, functions, claim)
