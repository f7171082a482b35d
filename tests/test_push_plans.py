"""What the push kernels are planned and reported to do: rows of the table, cuts, faults, ends."""

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from commlib.deadlines import Deadline
from commlib.engines.nccl import engine as nccl_engine
from commlib.engines.nccl import reductions
from commlib.engines.reductions import ReductionSpec
from commlib.errors import PeerTimeout
from commlib.p2p import (
    kernel_table,
    nvrtc,
    peer_memory,
    push_channel,
    push_collectives,
    residency,
)
from commlib.p2p.experts import channel as expert_channels
from commlib.p2p.experts import rows as row_channels
from commlib.p2p.experts.layout import KINDS
from commlib.p2p.kernel_table import Row
from commlib.p2p.optional_channel import OptionalChannel
from commlib.p2p.peer_memory import PeerMemory
from commlib.p2p.residency import Claim
from commlib.p2p.routes import SEGMENT, Routes, routes
from commlib.p2p.split_all_reduce import SplitAllReduce
from commlib.p2p.stream_order import StreamOrder
from commlib.rendezvous.identity import RingIdentity, program_remedy
from commlib.rendezvous.store import BoundedStore

RANKS = (10, 11, 12, 13)  # global ranks of the positions 0 to 3
LATE = 1  # the reason in a record, as in channel.cuh


class Hosts:
    """The host exchange of a ring of four, of which this process is position 0."""

    compares = False

    def __init__(self) -> None:
        cpu, remedy = torch.device("cpu"), program_remedy(7, RANKS)
        self.identity = RingIdentity(7, 0, RANKS, cpu, 30.0, "nccl", remedy)
        self._store = BoundedStore.of(HashStore())

    def store(self, name: str) -> BoundedStore:
        return self._store.under(name)


def memory_of(nbytes: int) -> Any:
    return SimpleNamespace(
        nbytes=nbytes, bases=[0] * len(RANKS), put=lambda *given: None, zero=lambda: None
    )


def claim_of(hosts: Hosts, *, fills: bool = True) -> Claim:
    return Claim(fills, StreamOrder(hosts.identity.device))


@pytest.fixture(autouse=True)
def _host_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kernels report into memory of this process."""
    word = lambda: SimpleNamespace(word=ctypes.c_uint64(), address=0)  # noqa: E731
    monkeypatch.setattr(nvrtc, "HostWord", word)


@pytest.fixture
def channel() -> push_channel.PushChannel:
    hosts: Any = Hosts()
    return push_channel.PushChannel(hosts, memory_of(64 << 20), [], claim_of(hosts))


# -- the table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("collective", push_channel.COLLECTIVES)
@pytest.mark.parametrize("size", kernel_table.SIZES)
def test_a_row_serves_its_largest_call(collective: str, size: int) -> None:
    for row in kernel_table.table()[collective][size]:
        selected = None if row.kernel == "nccl" else row
        assert kernel_table.select_kernel(collective, row.most, size) == selected
        assert kernel_table.select_kernel(collective, row.most + 1, size) != row


@pytest.mark.parametrize(("vectors", "blocks"), [(0, 1), (1, 1), (32, 1), (33, 2), (9999, 8)])
def test_one_vector_per_thread_while_there_are_blocks(vectors: int, blocks: int) -> None:
    assert kernel_table.shape(Row(1 << 20, "one_shot", 32, 8), vectors, 4) == (blocks, 32)


@pytest.mark.parametrize(("vectors", "blocks"), [(0, 1), (128, 1), (129, 2), (9999, 8)])
def test_in_two_hops_a_part_of_each_block_serves_a_peer(vectors: int, blocks: int) -> None:
    assert kernel_table.shape(Row(1 << 20, "two_shot", 32, 8), vectors, 4) == (blocks, 96)


@pytest.mark.parametrize("size", kernel_table.SIZES)
def test_explain_names_the_launch(size: int) -> None:
    """In two hops a row counts the threads for one peer; the text is about a block."""
    reduction = ReductionSpec(torch.bfloat16, "sum")
    for row in kernel_table.table()["all_reduce"][size]:
        text = reductions.explain(None, reduction, row.most, size, connected=True)
        threads = row.threads * (size - 1 if row.kernel == "two_shot" else 1)
        assert f"{row.kernel} push" in text
        assert f"{threads} threads per block and at most {row.blocks} blocks" in text


def test_refusals_name_the_reason() -> None:
    """Another float has no kernel; an integer could have none."""
    assert kernel_table.refusal(torch.float64, "sum") == "no kernel takes torch.float64"
    assert "no bit pattern free" in str(kernel_table.refusal(torch.int64, "sum"))


# -- calls that exceed one launch ------------------------------------------------------------------


def test_parts_of_ranks_are_not_cut(
    channel: push_channel.PushChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large all_reduce takes several launches; every other collective is left to NCCL."""
    monkeypatch.setattr(channel, "prepare", lambda name, grid, call, part: name)
    row, window = Row(1 << 40, "packets", 256, 8), channel.window("packets")

    def offsets(collective: str, nbytes: int) -> list[int]:
        moved = push_collectives.PushCollective(channel, collective, "", 1, 8, 0)
        return [step.offset for step in moved.steps_of(row, nbytes)]

    assert offsets("all_reduce", 2 * window + 16) == [0, window, 2 * window]
    assert offsets("all_gather", window) == [0]
    assert offsets("all_gather", window + 16) == []


# -- places on the GPU -----------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [1, 40, 8191])
@pytest.mark.parametrize(("fills", "share"), [(True, 0), (True, 8), (False, 0), (False, 8)])
def test_a_bounded_call_lets_no_other_start_early(
    monkeypatch: pytest.MonkeyPatch, fills: bool, share: int, blocks: int
) -> None:
    """The next kernel may be of any size and ring: while it waits, it takes places of others."""
    monkeypatch.setattr(nvrtc, "function", lambda modules, name, device: name)
    monkeypatch.setattr(nvrtc, "resident_blocks", lambda function, device, threads: 320)
    monkeypatch.setattr(nvrtc, "Launch", lambda function, device, grid, argument: grid)
    hosts: Any = Hosts()
    channel = push_channel.PushChannel(hosts, memory_of(64 << 20), [], claim_of(hosts, fills=fills))
    channel.share = share
    call = push_channel.Call()
    grid: Any = channel.prepare("one_shot", nvrtc.Grid(blocks, 64), call, call)
    assert call.early == (fills and not share)
    assert grid.blocks == min(blocks, share or blocks, blocks if fills else 320 // 4)


def test_all_channels_of_a_ring_have_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of two channels may each take all of a GPU: they are in one order."""
    ring: Any = SimpleNamespace(
        identity=Hosts().identity,
        ring_id=7,
        bounded=lambda *given: None,
        exchange=lambda values: [values],
    )
    made: list[Claim] = []

    def opened(hosts: Any, claim: Claim) -> str:
        made.append(claim)
        return "none here"

    monkeypatch.setattr(nccl_engine, "open_push", opened)
    engine: Any = nccl_engine.NCCLEngine.__new__(nccl_engine.NCCLEngine)
    engine.identity = engine.hosts = ring
    engine.device = ring.identity.device
    engine._rows, engine._experts = (OptionalChannel(ring, opened, "none") for _ in range(2))
    engine.open(SimpleNamespace(connecting=lambda deadline: None), Deadline(5))
    engine.prepare_rows()
    engine.prepare_experts()
    residency.release(ring)
    assert made == [engine._claim] * 3
    assert made[0].fills


# -- faults ----------------------------------------------------------------------------------------


def test_a_record_names_the_peer_the_collective_and_the_call(
    channel: push_channel.PushChannel,
) -> None:
    collective = push_channel.COLLECTIVES.index("all_to_all")
    channel._word.value = LATE << 61 | collective << 53 | 1 << 45 | 77

    with pytest.raises(PeerTimeout, match=r"waiting for rank 11 in all_to_all \(call 77 of ring 7"):
        channel.check()


def test_a_reset_forgets_the_fault(channel: push_channel.PushChannel) -> None:
    channel._word.value = LATE << 61
    channel.reset()

    channel.check()
    channel.ready()


def test_a_split_call_is_done_when_its_event_has_happened() -> None:
    work = SplitAllReduce.__new__(SplitAllReduce)
    work._capture, happened = 0, False
    event: Any = SimpleNamespace(query=lambda: happened)
    work._event = event

    assert not work.done()
    happened = True
    assert work.done()


# -- rows ------------------------------------------------------------------------------------------


def row_channel(window: int) -> row_channels.RowChannel:
    hosts: Any = Hosts()
    return row_channels.RowChannel(
        hosts, memory_of(row_channels._HALVES + 2 * window), {}, claim_of(hosts)
    )


@pytest.mark.parametrize(("segments", "fits"), [(33, True), (256, True), (257, False)])
def test_the_largest_kernel_decides_how_many_segments_fit(segments: int, fits: bool) -> None:
    sends = np.zeros(segments, SEGMENT)
    assert row_channel(4096).takes(Routes(sends, sends, 1)) == fits


def test_rows_that_exceed_the_window_take_several_launches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    window, width = 4096, 256  # bytes, floats
    channel, firsts = row_channel(window), []
    least = min(row_channels._BLOCKS)
    call: Any = row_channels._BLOCKS[least]()
    launch: Any = lambda stream: firsts.append(call.first)  # noqa: E731
    channel._calls, channel._launches = {least: call}, {least: launch}
    monkeypatch.setattr(StreamOrder, "turn", lambda order: 0)
    monkeypatch.setattr(row_channels, "stream_captures", lambda: False)
    counts = np.full((4, 4, 1), 3)  # 9 rows of 1024 bytes come from others

    x = torch.zeros(12, width)
    channel.exchange(torch.zeros(12, width), x, routes(counts, 0, back=False))

    assert firsts == [0, window, 2 * window]


# -- shared memory ---------------------------------------------------------------------------------


def test_memory_is_freed_only_when_every_peer_has_unmapped_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    freed: list[int] = []
    monkeypatch.setattr(peer_memory, "_runtime", lambda: SimpleNamespace(free=freed.append))
    hosts: Any = Hosts()
    memory = PeerMemory(hosts, [5, 6, 7, 8], 4096, "push")
    monkeypatch.setattr(peer_memory, "_closed", [memory])

    after = []
    for _ in RANKS:
        memory._store.add("unmapped", 1, Deadline(5))
        peer_memory._free_closed()
        after.append(list(freed))

    assert after == [[], [], [], [5]]


# -- rows and experts ------------------------------------------------------------------------------


def test_a_record_of_rows_names_the_peer_and_a_reset_forgets_it() -> None:
    channel = row_channel(4096)
    channel._error.word.value = 1 << 63 | LATE << 32 | 77  # as in rows.cu
    with pytest.raises(PeerTimeout, match=r"waiting for rank 11 in exchange_rows \(call 77"):
        channel.check()
    channel.reset()
    channel.check()


@pytest.mark.parametrize(("segments", "chosen"), [(32, 32), (33, 256), (256, 256)])
def test_the_smallest_kernel_that_fits(
    monkeypatch: pytest.MonkeyPatch, segments: int, chosen: int
) -> None:
    channel: Any = row_channel(4096)
    used: list[int] = []
    channel._calls = {most: make() for most, make in row_channels._BLOCKS.items()}
    channel._launches = {most: lambda _, most=most: used.append(most) for most in channel._calls}
    monkeypatch.setattr(StreamOrder, "turn", lambda order: 0)
    monkeypatch.setattr(row_channels, "stream_captures", lambda: False)
    sends, x = np.zeros(segments, SEGMENT), torch.zeros(1, 4)
    channel.exchange(x, x, Routes(sends, sends, 1))
    assert used == [chosen]


def test_a_record_of_experts_names_the_peer_and_a_reset_forgets_it() -> None:
    channel: Any = expert_channels.ExpertChannel.__new__(expert_channels.ExpertChannel)
    channel._ring, channel._memory = Hosts().identity, memory_of(0)
    channel._error, channel._record = nvrtc.HostWord(), nvrtc.HostWord()
    channel._error.word.value = 1 << 63 | 1 << 40 | LATE << 32 | 77  # as in experts.cuh
    channel._record.word.value = 5
    with pytest.raises(PeerTimeout, match=rf"waiting for rank 11 in {KINDS[1]} \(expert call 77"):
        channel.check()
    channel.reset()
    channel.check()
    assert channel._record.word.value == 0
