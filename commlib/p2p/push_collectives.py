"""The push kernels of one ring: the channel that they share, and one call after another."""

import ctypes
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from commlib import flags
from commlib.errors import ArgumentError, PeerTimeout, StreamError
from commlib.log import log
from commlib.p2p import kernel_table, nvrtc, residency
from commlib.p2p.kernel_table import FLOATS, OPS, VECTOR, Row
from commlib.p2p.peer_memory import PeerMemory, share
from commlib.p2p.stream_order import StreamOrder
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import RingIdentity
from commlib.streams import capture_of, current_raw

RANKS = 8  # as in channel.cuh
WINDOW = 16 << 20  # bytes of an all_reduce that one launch does; larger ones take several
KERNELS = Path(__file__).with_name("csrc")
FILES = ("all_reduce.cu", "split.cu", "packets.cu", "norm.cu", "gate.cu")
GATED = 64 << 10  # bytes of a call from which on it waits in a gate where it shares the GPU
WARP = 32
VERBS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "all_reduce_residual_norm")

_CONTROL, _LIMIT = 4096, 32  # bytes of control words; offset of limit_ns
_LAUNCH_BITS, _STREAMS = (
    17,
    1 << 10,
)  # of a tag: bits of the launch's number; streams, as in channel.cuh
_LAUNCH_MASK = (1 << _LAUNCH_BITS) - 1
_LATE, _TWO_AT_ONCE = 1, 2  # as in channel.cuh
_SPARE = 4096  # bytes of a half in addition to two windows: slots begin at whole vectors
_PLANS = 4096  # sizes that are remembered


class Call(ctypes.Structure):
    """What a kernel is given; as in channel.cuh."""

    _fields_ = [
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("items", ctypes.c_int64),
        ("base", ctypes.c_void_p * RANKS),
        ("error", ctypes.c_void_p),
        ("half", ctypes.c_int64),
        ("rank", ctypes.c_int),
        ("tag", ctypes.c_uint32),
        ("verb", ctypes.c_uint32),
        ("option", ctypes.c_int),
        ("signals", ctypes.c_int),
    ]


class Step(NamedTuple):
    """One launch of a call, ``offset`` bytes into its tensors."""

    call: Call
    launch: nvrtc.Launch
    offset: int


class Halves(NamedTuple):
    """The launches of a call in two halves."""

    begin: tuple[Step, ...]
    end: tuple[Step, ...]


class PushChannel:
    """Memory that the ranks of a ring share, and the kernels that work in it, in stream order."""

    def __init__(
        self, hosts: HostExchange, memory: PeerMemory, modules: Sequence[Any], *, fills: bool
    ) -> None:
        """``fills``: the kernels may fill the GPU, see ``residency``."""
        self._ring, self._memory, self._modules = hosts.identity, memory, modules
        self._fills = fills
        self._device, self._error = self._ring.device.index, nvrtc.HostWord()
        self._word = self._error.word
        self._order = StreamOrder(self._ring.device)
        self._launched = 0  # calls, for their tags
        self.share = 0  # most blocks of the calls that are made now, 0 for no such limit
        self._open = self._opened = 0  # number of the split call that is open, or 0; and the last
        self._open_in = 0  # the capture that its first half is part of, 0 for none
        self._half = (memory.nbytes - _CONTROL) // 2
        self._set_limit()

    @property
    def nbytes(self) -> int:
        """The GPU memory of the channel on this rank."""
        return self._memory.nbytes

    # -- making calls ------------------------------------------------------------------------------

    def reduction(self, verb: str, dtype: torch.dtype, op: str) -> "PushCollective | None":
        """Return what reduces ``dtype`` by ``op``, or None without such a kernel."""
        if kernel_table.refusal(dtype, op):
            return None
        suffix, mean = f"_{FLOATS[dtype]}_{OPS[op]}", op == "avg"
        return PushCollective(self, verb, suffix, dtype.itemsize, VECTOR, int(mean))

    def movement(self, verb: str) -> "PushCollective":
        """Return what moves the bytes of equal parts; those of all_to_all differ by receiver."""
        return PushCollective(self, verb, "", 1, VECTOR // 2, int(verb == "all_to_all"))

    def steps(self, moved: "PushCollective", nbytes: int) -> tuple[Step, ...]:
        """Return the launches of a call of ``nbytes``, none where NCCL is to do it."""
        row = self.row(moved, nbytes)
        return () if row is None else self.steps_of(moved, row, nbytes)

    def steps_of(self, moved: "PushCollective", row: Row, nbytes: int) -> tuple[Step, ...]:
        """Return the launches of a call of ``nbytes`` as ``row`` describes them."""
        window = self.window(row.kernel)
        if moved.verb != "all_reduce" and nbytes > window:
            return ()  # parts can't be cut
        steps = tuple(
            self.step(moved, row, offset, min(window, nbytes - offset))
            for offset in range(0, nbytes, window)
        )
        return (*self.gate(moved, nbytes, signals=True), *steps)

    def gate(self, moved: "PushCollective", nbytes: int, *, signals: bool) -> tuple[Step, ...]:
        """Return the launch that waits for the peers before a large call that shares the GPU.

        ``signals``: the gate also signals to the peers that this rank has started the call.
        """
        if not self.share or nbytes < GATED:
            return ()
        call = self.call(moved.verb, 0, int(signals))
        return (Step(call, self.prepare("gate", nvrtc.Grid(1, WARP), call), 0),)

    def window(self, kernel: str) -> int:
        """Return the bytes that one launch of ``kernel`` can do."""
        return min(kernel_table.room(kernel, self._half, self._ring.size), WINDOW)

    def row(self, moved: "PushCollective", nbytes: int) -> Row | None:
        """Return the row of the table for a call of ``nbytes``."""
        return kernel_table.select_kernel(moved.verb, nbytes, self._ring.size)

    def step(self, moved: "PushCollective", row: Row, offset: int, nbytes: int) -> Step:
        """Return the launch that ``row`` describes for ``nbytes`` of a call, from ``offset`` on."""
        vectors = -(-nbytes // moved.vector)
        if row.kernel.startswith("two_shot"):
            vectors = -(-vectors // self._ring.size)
        call = self.call(moved.verb, nbytes // moved.itemsize, moved.option)
        call.signals = int(nbytes >= GATED)  # the same on all ranks: any of them may have a gate
        grid = nvrtc.Grid(kernel_table.blocks(row, vectors), row.threads)
        return Step(call, self.prepare(row.kernel + moved.suffix, grid, call), offset)

    def call(self, verb: str, items: int, option: int) -> Call:
        """Return the argument of a kernel, but for what changes with every call."""
        ring = self._ring
        call = Call(items=items, rank=ring.rank, verb=VERBS.index(verb), option=option)
        call.base[: ring.size] = self._memory.bases
        call.error, call.half = self._error.address, self._half
        return call

    def prepare(self, name: str, grid: nvrtc.Grid, argument: ctypes.Structure) -> nvrtc.Launch:
        """Return a launch of kernel ``name``, with as many blocks as this ring may have now."""
        found = nvrtc.function(self._modules, name, self._device)
        most = residency.most_blocks(found, self._device, grid.threads, self._fills)
        grid = grid.within(min(most, self.share or most))
        return nvrtc.Launch(found, self._device, grid, argument)

    # -- launching ---------------------------------------------------------------------------------

    def turn(self) -> tuple[int, int]:
        """Return the current stream, ordered after the last call, and the tag of the next call.

        Raises ``PeerTimeout`` or ``StreamError`` when an earlier call has reported a fault, and
        ``ArgumentError`` between the halves of a split one.
        """
        order = self._order
        if self._word.value or self._open:
            self._refuse()
        stream = current_raw(self._device)  # not order.turn(): every call passes here
        if stream != order.last:
            order.change_to(stream)
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
        """Launch ``steps`` on the current stream, after the last call; never blocks."""
        stream, tag = self.turn()
        source, target = x.data_ptr(), out.data_ptr()
        for call, launch, offset in steps:
            call.x, call.out, call.tag = source + offset, target + offset, tag
            launch(stream)
        self.launched(stream)

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
        reason, verb = record >> 61, VERBS[record >> 53 & 0xFF]
        peer, what = record >> 45 & 0xFF, record & 0xFFFFFFFF
        ring, repair = self._ring, "call ring.reset() on every member"
        if reason == _TWO_AT_ONCE:
            pair = [self._order.stream_of(tag) for tag in (what >> 16, what & 0xFFFF)]
            raise StreamError(
                f"rank {ring.ranks[peer]} ran two calls of ring {ring.ring_id} at the same time, "
                f"one in {verb}: on its streams {pair[0]} and {pair[1]} (a graph counts as the "
                f"stream it was captured on; handles as rank {ring.ranks[ring.rank]} numbers "
                f"them). Order the streams with an event or give each its own ring; then {repair}"
            )
        raise PeerTimeout(
            f"timed out after {ring.timeout:g} s waiting for rank {ring.ranks[peer]} in {verb} "
            f"(call {what} of ring {ring.ring_id}). Results of this and later calls are NaN (of "
            f"integers -1); {repair}"
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


class PushCollective:
    """One verb over one kind of data: a launch for each size that the kernels take."""

    __slots__ = ("_channel", "_halves", "_steps", "itemsize", "option", "suffix", "vector", "verb")

    def __init__(
        self, channel: PushChannel, verb: str, suffix: str, itemsize: int, vector: int, option: int
    ) -> None:
        self.verb, self.suffix, self.itemsize, self.option = verb, suffix, itemsize, option
        self.vector = vector  # bytes of a tensor that a thread takes at a time
        self._channel = channel
        self._steps: dict[int | tuple[int, int], tuple[Step, ...]] = {}
        self._halves: dict[tuple[int, int], Halves | None] = {}

    def __call__(self, out: torch.Tensor, x: torch.Tensor, nbytes: int) -> bool:
        """Launch on the current stream; False, and nothing done, where NCCL is to do it."""
        channel = self._channel
        steps = self._steps.get((nbytes, channel.share) if channel.share else nbytes)
        if steps is None:
            steps = self._plan(nbytes)
        if not steps:
            return False
        channel.launch(steps, out, x)
        return True

    def takes(self, nbytes: int) -> bool:
        """Return True if push kernels carry calls of ``nbytes``; the same on all ranks."""
        steps = self._steps.get(nbytes)
        return bool(self._plan(nbytes) if steps is None else steps)

    def _plan(self, nbytes: int) -> tuple[Step, ...]:
        if len(self._steps) >= _PLANS:
            self._steps.clear()
        share = self._channel.share
        steps = self._channel.steps(self, nbytes)
        self._steps[(nbytes, share) if share else nbytes] = steps
        return steps

    def split(self, nbytes: int) -> "Halves | None":
        """Return the two halves of a call of ``nbytes``, None where it is not cut in two."""
        key = nbytes, self._channel.share
        if key not in self._halves:
            if len(self._halves) >= _PLANS:
                self._halves.clear()
            self._halves[key] = self._split(nbytes)
        return self._halves[key]

    def _split(self, nbytes: int) -> "Halves | None":
        channel = self._channel
        whole = channel.row(self, nbytes)
        if whole is None or not self.suffix.endswith("_sum"):
            return None
        if nbytes > channel.window(whole.kernel):
            return None  # several launches
        begin, end = (
            channel.step(self, whole._replace(kernel=f"{whole.kernel}_{half}"), 0, nbytes)
            for half in ("begin", "end")
        )
        # The first half never waits. It signals to the peers that its data is in flight.
        return Halves((begin,), (*channel.gate(self, nbytes, signals=False), end))


def open_push(hosts: HostExchange, *, fills: bool) -> PushChannel | str:
    """Set the channel of a ring up; every member calls it. Returns why there is none.

    Blocks the host at most the ring's timeout per step; compiles the kernels once per machine.
    """
    ring = hosts.identity
    if ring.size not in kernel_table.SIZES:
        least, most = kernel_table.SIZES[0], kernel_table.SIZES[-1]
        return f"{ring.size} ranks: the kernels serve {least} to {most}"
    on = flags.get(flags.CUSTOM_ALLREDUCE)
    versions = {row[0] for row in hosts.exchange([version() if on else 0])}
    if 0 in versions:
        return f"{flags.CUSTOM_ALLREDUCE}=0" + (" on another rank" if on else "")
    if len(versions) > 1:
        return "ranks have different tables or kernels; install the same commlib everywhere"
    memory = share(hosts, _CONTROL + 2 * (2 * WINDOW + _SPARE), "push")
    if isinstance(memory, str):
        return memory
    modules = []
    try:
        modules = [_module(ring, file) for file in FILES]
    except Exception as error:  # of any kind: the other members learn of it in the exchange
        log.once("this rank has no push kernels: %s", error)
    if any(row == [0] for row in hosts.exchange([len(modules)])):
        memory.close()
        return "a rank can't compile the kernels"
    return PushChannel(hosts, memory, modules, fills=fills)


def _module(ring: RingIdentity, file: str) -> Any:
    return nvrtc.module(KERNELS / file, ring.device.index, f"-DRANKS={ring.size}")


def version() -> int:
    """Return a number that is the same where the table, the kernels and what plans them are.

    Never 0. The files are those of this package: how calls are cut is a part of the protocol.
    """
    texts = [kernel_table.text().encode()]
    for kind in ("*.py", "csrc/*.cu", "csrc/*.cuh"):
        texts += [path.read_bytes() for path in sorted(KERNELS.parent.glob(kind))]
    digest = hashlib.sha256(b"\0".join(texts)).digest()
    return int.from_bytes(digest[:7], "little") + 1
