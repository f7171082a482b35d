"""The push kernels of one ring: how each collective is launched, and how a channel is set up."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

import torch

from commlib import flags
from commlib.log import log
from commlib.p2p import kernel_table, nvrtc
from commlib.p2p.kernel_table import FLOATS, OPS, VECTOR, Row
from commlib.p2p.peer_memory import share
from commlib.p2p.push_channel import WARP, WORKSPACE, PushChannel, Step
from commlib.p2p.residency import Claim
from commlib.rendezvous.hosts import HostExchange
from commlib.rendezvous.identity import RingIdentity

KERNELS = Path(__file__).with_name("csrc")
FILES = ("all_reduce.cu", "split.cu", "packets.cu", "norm.cu", "gate.cu")
GATED = 64 << 10  # bytes of a call from which on it waits in a gate where it shares the GPU
_PLANS = 4096  # sizes that are remembered


class SplitSteps(NamedTuple):
    """The launches of a call in two halves."""

    begin: tuple[Step, ...]
    end: tuple[Step, ...]


class PushCollective:
    """One collective over one kind of data: a launch for each size that the kernels take."""

    __slots__ = (
        "_channel",
        "_split_steps",
        "_steps",
        "collective",
        "itemsize",
        "option",
        "suffix",
        "vector",
    )

    def __init__(
        self,
        channel: PushChannel,
        collective: str,
        suffix: str,
        itemsize: int,
        vector: int,
        option: int,
    ) -> None:
        self.collective, self.suffix, self.itemsize, self.option = (
            collective,
            suffix,
            itemsize,
            option,
        )
        self.vector = vector  # bytes of a tensor that a thread takes at a time
        self._channel = channel
        self._steps: dict[int | tuple[int, int], tuple[Step, ...]] = {}
        self._split_steps: dict[tuple[int, int], SplitSteps | None] = {}

    @classmethod
    def reducing(
        cls, channel: PushChannel, collective: str, dtype: torch.dtype, op: str
    ) -> "PushCollective | None":
        """Return what reduces ``dtype`` by ``op``, or None without such a kernel."""
        if kernel_table.refusal(dtype, op):
            return None
        suffix, mean = f"_{FLOATS[dtype]}_{OPS[op]}", op == "avg"
        return cls(channel, collective, suffix, dtype.itemsize, VECTOR, int(mean))

    @classmethod
    def moving(cls, channel: PushChannel, collective: str) -> "PushCollective":
        """Return what moves the bytes of equal parts; those of all_to_all differ by receiver."""
        return cls(channel, collective, "", 1, VECTOR // 2, int(collective == "all_to_all"))

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

    def split(self, nbytes: int) -> "SplitSteps | None":
        """Return the two halves of a call of ``nbytes``, None where it is not cut in two."""
        key = nbytes, self._channel.share
        if key not in self._split_steps:
            if len(self._split_steps) >= _PLANS:
                self._split_steps.clear()
            self._split_steps[key] = self._split(nbytes)
        return self._split_steps[key]

    # -- plans -------------------------------------------------------------------------------------

    def _plan(self, nbytes: int) -> tuple[Step, ...]:
        """Return the launches of a call of ``nbytes``, none where NCCL is to do it."""
        if len(self._steps) >= _PLANS:
            self._steps.clear()
        share, row = self._channel.share, self._row(nbytes)
        steps = () if row is None else self.steps_of(row, nbytes)
        self._steps[(nbytes, share) if share else nbytes] = steps
        return steps

    def steps_of(self, row: Row, nbytes: int) -> tuple[Step, ...]:
        """Return the launches of a call of ``nbytes`` as ``row`` describes them."""
        window = self._channel.window(row.kernel)
        if self.collective != "all_reduce" and nbytes > window:
            return ()  # parts can't be cut
        steps = tuple(
            self._step(row, offset, min(window, nbytes - offset))
            for offset in range(0, nbytes, window)
        )
        return (*self._gate(nbytes, signals=True), *steps)

    def _split(self, nbytes: int) -> "SplitSteps | None":
        row = self._row(nbytes)
        if row is None or not self.suffix.endswith("_sum"):
            return None
        if nbytes > self._channel.window(row.kernel):
            return None  # several launches
        begin, end = (
            self._step(row._replace(kernel=f"{row.kernel}_{half}"), 0, nbytes)
            for half in ("begin", "end")
        )
        # The first half never waits. It signals to the peers that its data is in flight.
        return SplitSteps((begin,), (*self._gate(nbytes, signals=False), end))

    def _gate(self, nbytes: int, *, signals: bool) -> tuple[Step, ...]:
        """Return the launch that waits for the peers before a large call that shares the GPU.

        ``signals``: the gate also signals to the peers that this rank has started the call.
        """
        channel = self._channel
        if not channel.share or nbytes < GATED:
            return ()
        call = channel.call(self.collective, 0, int(signals))
        return (Step(call, channel.prepare("gate", nvrtc.Grid(1, WARP), call, call), 0),)

    def _row(self, nbytes: int) -> Row | None:
        """Return the row of the table for a call of ``nbytes``."""
        return kernel_table.select_kernel(self.collective, nbytes, self._channel.size)

    def _step(self, row: Row, offset: int, nbytes: int) -> Step:
        """Return the launch that ``row`` describes for ``nbytes`` of a call, from ``offset`` on."""
        vectors = -(-nbytes // self.vector)
        call = self._channel.call(self.collective, nbytes // self.itemsize, self.option)
        call.signals = int(nbytes >= GATED)  # the same on all ranks: any of them may have a gate
        grid = nvrtc.Grid(*kernel_table.shape(row, vectors, self._channel.size))
        return Step(call, self._channel.prepare(row.kernel + self.suffix, grid, call, call), offset)


def open_push(hosts: HostExchange, claim: Claim) -> PushChannel | str:
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
    memory = share(hosts, WORKSPACE, "push")
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
    return PushChannel(hosts, memory, modules, claim)


def _module(ring: RingIdentity, file: str) -> Any:
    return nvrtc.module(KERNELS / file, ring.device.index, f"-DRANKS={ring.size}")


def version() -> int:
    """Return a number that is the same where the table, the kernels and what plans them are.

    Never 0. The files are those of this package: how calls are cut is a part of the protocol.
    """
    texts = [kernel_table.text().encode()]
    for kind in ("**/*.py", "csrc/*.cu", "csrc/*.cuh"):
        texts += [path.read_bytes() for path in sorted(KERNELS.parent.glob(kind))]
    digest = hashlib.sha256(b"\0".join(texts)).digest()
    return int.from_bytes(digest[:7], "little") + 1
