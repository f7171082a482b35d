"""Tokens to the experts of every rank and back, through peer memory: one kernel per call."""

import ctypes
from pathlib import Path
from typing import Any

import torch

from commlib import flags
from commlib.errors import PeerTimeout
from commlib.log import log
from commlib.p2p import nvrtc, residency
from commlib.p2p.experts.layout import (
    CHOICES,
    COMBINE,
    DISPATCH,
    EXPERTS,
    INVERSE,
    KINDS,
    LIMIT,
    RANKS,
    SLOTS,
    ExpertCall,
    Layout,
    OverflowRecord,
    slot_bytes,
)
from commlib.p2p.experts.tables import (
    GROUP,
    Choices,
    ExpertCounts,
    ExpertSpec,
    ExpertTables,
    Overflow,
    local_experts,
)
from commlib.p2p.fused_norm import aligned
from commlib.p2p.kernel_table import FLOATS, VECTOR
from commlib.p2p.peer_memory import CAPTURING, PeerMemory, share
from commlib.p2p.residency import Claim
from commlib.rendezvous.hosts import HostExchange
from commlib.streams import stream_captures

Tensor = torch.Tensor

THREADS = 256  # as in experts.cuh
_PER_MULTIPROCESSOR = 4  # blocks that fit, as __launch_bounds__ says
_ROWS = 1 << 30  # a link has so many bits for a row
_COMPLETE = 2  # state of an OverflowRecord
KERNELS = Path(__file__).parent.parent / "csrc"
_FLOAT8_NAMES = tuple(f"quantize_{one}" for one in FLOATS.values())
_NAMES = {
    "experts_dispatch.cu": ("dispatch", "scatter", *(f"scatter_{one}" for one in FLOATS.values())),
    "experts_combine.cu": tuple(f"combine_{one}" for one in FLOATS.values()),
}
FLOAT8_CAPABILITY = (8, 9)


class ExpertChannel:
    """The workspace of one ring: one call at a time, in stream order."""

    def __init__(
        self,
        hosts: HostExchange,
        memory: PeerMemory,
        layout: Layout,
        functions: dict[str, Any],
        claim: Claim,
    ) -> None:
        """``claim``: what the kernels may take of the GPU."""
        self._ring, self._memory, self._layout = hosts.identity, memory, layout
        self._fills, self._order = claim
        self._error = nvrtc.HostWord()
        self._record = nvrtc.HostWord(ctypes.sizeof(OverflowRecord))
        self.captured = False  # whether a graph may hold calls
        self._call = self._constants()
        self._launches = {name: self._launch(kernel) for name, kernel in functions.items()}
        self._set_limit()

    @property
    def nbytes(self) -> int:
        """The GPU memory of the channel on this rank."""
        return self._memory.nbytes

    def _constants(self) -> ExpertCall:
        """Return the argument of all kernels, with what no call changes."""
        ring, layout = self._ring, self._layout
        call = ExpertCall(rank=ring.rank, size=ring.size, share=layout.share)
        call.error = self._error.address
        call.base[: ring.size] = self._memory.bases
        call.first_count, call.first_flag = layout.count, layout.flag
        call.first_freed, call.first_used = layout.freed, layout.used
        call.first_slot = layout.slot
        return call

    def _launch(self, function: Any) -> tuple[nvrtc.Launch, int]:
        """Return a launch and its number of blocks: two push and one per sender takes, or more."""
        device = self._ring.device.index
        blocks = residency.grid(function, device, THREADS, _PER_MULTIPROCESSOR, self._fills)
        blocks = max(self._ring.size + 2, blocks)
        return nvrtc.Launch(function, device, nvrtc.Grid(blocks, THREADS), self._call), blocks

    # -- calls -------------------------------------------------------------------------------------

    def carries(self, spec: ExpertSpec) -> bool:
        """Return True if there are kernels for such calls; the same on all ranks."""
        local = local_experts(spec.num_experts, self._ring.size)
        if spec.dtype not in FLOATS or spec.width * spec.dtype.itemsize % VECTOR or not spec.width:
            return False
        if spec.quantize and (_FLOAT8_NAMES[0] not in self._launches or spec.width % GROUP):
            return False
        largest = max(slot_bytes(kind, spec) for kind in (DISPATCH, COMBINE))
        return (
            spec.num_experts <= EXPERTS
            and 1 <= spec.top_k <= CHOICES
            and local * spec.capacity < _ROWS
            and largest <= self._layout.share
        )

    def dispatch(
        self,
        rows: Tensor,
        x: Tensor,
        scales: Tensor | None,
        choices: Choices,
        tables: ExpertTables,
        counts: ExpertCounts,
        spec: ExpertSpec,
    ) -> None:
        """Fill ``rows``, ``scales``, ``tables`` and ``counts`` from every rank's tokens ``x``."""
        call = self._begin(DISPATCH, rows, x, tables, choices.active, spec)
        call.ids, call.wide = choices.ids.data_ptr(), int(choices.ids.dtype == torch.int64)
        call.weights, call.scales = _address(choices.weights), _address(scales)
        call.counts, call.demand = counts.counts.data_ptr(), counts.demand.data_ptr()
        call.overflow = self._record.address if spec.reports else None
        self._run(f"quantize_{FLOATS[spec.dtype]}" if spec.quantize else "dispatch")

    def scatter(
        self, rows: Tensor, x: Tensor, tables: ExpertTables, active: Tensor | None, spec: ExpertSpec
    ) -> None:
        """Fill ``rows`` from every rank's ``x``, where ``tables`` say; unused rows become 0."""
        self._begin(DISPATCH, rows, x, tables, active, spec)
        self._run(f"scatter_{FLOATS[spec.dtype]}" if spec.weighted else "scatter")

    def combine(
        self, out: Tensor, y: Tensor, tables: ExpertTables, active: Tensor | None, spec: ExpertSpec
    ) -> None:
        """Fill ``out`` with the sums of each token's rows in every rank's ``y``."""
        self._begin(COMBINE, out, y, tables, active, spec)
        self._run(f"combine_{FLOATS[spec.dtype]}")

    def _begin(
        self,
        kind: int,
        out: Tensor,
        x: Tensor,
        tables: ExpertTables,
        active: Tensor | None,
        spec: ExpertSpec,
    ) -> ExpertCall:
        """Return the argument of the kernels, with what all calls have."""
        self.check()
        call = self._call
        x, sources = aligned(x), aligned(tables.sources)
        self._held = x, sources  # until the launch: they may be copies
        call.x, call.out, call.sources = x.data_ptr(), out.data_ptr(), sources.data_ptr()
        call.expert_ids = tables.expert_ids.data_ptr()
        call.positions = tables.positions.data_ptr()
        call.row_weights, call.active = tables.row_weights.data_ptr(), _address(active)
        call.scales = call.ids = call.weights = call.counts = call.demand = call.overflow = None
        call.slot = slot_bytes(kind, spec)
        call.slots = min(SLOTS, self._layout.share // call.slot)
        call.tokens, call.choices = tables.positions.shape[0], spec.top_k
        call.experts, call.capacity = spec.num_experts, spec.capacity
        call.local = local_experts(spec.num_experts, self._ring.size)
        call.inverse = -(-(1 << INVERSE) // call.local)
        call.row, call.weighted = spec.width * spec.dtype.itemsize, int(spec.weighted)
        return call

    def _run(self, name: str) -> None:
        """Launch a kernel on the current stream, after the last call; never blocks."""
        launch, blocks = self._launches[name]
        self._call.pushers = self._pushers(name, blocks)
        stream = self._order.turn()
        self.captured = self.captured or stream_captures()
        launch(stream)
        if self._order.foreign:
            self._order.ended(stream)
        del self._held

    def _pushers(self, name: str, blocks: int) -> int:
        """Return how many blocks push: in a dispatch, one counts, and one per token is enough."""
        most = max(2, min(blocks * 3 // 5, blocks - self._ring.size))
        if name.startswith("combine"):
            return most
        tokens: int = self._call.tokens
        return min(most, max(2, blocks // 4, tokens + 1))

    # -- faults ------------------------------------------------------------------------------------

    def overflow(self) -> Overflow | None:
        """Return what was recorded of choices beyond a capacity, once; never blocks."""
        if self._record.word.value != _COMPLETE:
            return None
        record = OverflowRecord.from_address(self._record.address)
        by_rank = tuple(record.by_rank[: self._ring.size])
        overflow = Overflow(record.expert, record.owner, record.capacity, by_rank)
        self._record.word.value = 0
        return overflow

    def ready(self) -> None:
        """Raise what a call would raise."""
        self.check()

    def check(self) -> None:
        """Raise ``PeerTimeout`` naming the peer that an earlier call has given up."""
        record = self._error.word.value
        if record:
            kind, peer, number = record >> 40 & 0xFF, record >> 32 & 0xFF, record & 0xFFFFFFFF
            raise PeerTimeout(
                f"timed out after {self._ring.timeout:g} s waiting for rank "
                f"{self._ring.ranks[peer]} in {KINDS[kind]} (expert call {number} of this ring). "
                f"Results of this and later calls are NaN; call ring.reset() on every member"
            )

    def reset(self) -> None:
        """Start again; between two exchanges, while no kernel of any rank runs."""
        self._memory.zero()
        self._set_limit()
        self._error.word.value = self._record.word.value = 0

    def _set_limit(self) -> None:
        """Write the deadline where a replayed graph reads it too."""
        self._memory.put(LIMIT, int(self._ring.timeout * 1e9).to_bytes(8, "little"))

    def close(self) -> None:
        """Free the workspace once every rank has unmapped it."""
        self._memory.close()


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def open_experts(hosts: HostExchange, claim: Claim) -> ExpertChannel | str | None:
    """Set a channel up; every member calls it. Returns why not, or None to ask again later."""
    ring, nbytes = hosts.identity, flags.get(flags.CHANNEL) << 20
    if ring.size > RANKS:
        return f"more than {RANKS} ranks"
    able = torch.cuda.get_device_capability(ring.device) >= FLOAT8_CAPABILITY
    functions: dict[str, Any] = {}
    try:
        functions = _functions(ring.device.index, float8=able)
    except Exception as error:  # of any kind: the other members learn of it in the exchange
        log.once("this rank has no kernels for experts: %s", error)
    facts = hosts.exchange([nbytes if functions else 0, int(able)])
    if len({row[0] for row in facts}) > 1 or facts[0][0] == 0:
        return f"{flags.CHANNEL} is 0 or differs between ranks, or a rank can't compile kernels"
    if not all(row[1] for row in facts):
        functions = {name: one for name, one in functions.items() if name not in _FLOAT8_NAMES}
    layout = Layout(ring.size, nbytes)
    memory = share(hosts, layout.nbytes, "experts")
    if isinstance(memory, str):
        return None if memory == CAPTURING else memory
    return ExpertChannel(hosts, memory, layout, functions, claim)


def _functions(device: int, *, float8: bool) -> dict[str, Any]:
    """Compile and load the kernels; returns them by name."""
    kernels: dict[str, Any] = {}
    for file, names in _NAMES.items():
        module = nvrtc.module(KERNELS / file, device)
        more = _FLOAT8_NAMES if float8 and file == "experts_dispatch.cu" else ()
        kernels |= {name: nvrtc.function([module], name, device) for name in (*names, *more)}
    return kernels
