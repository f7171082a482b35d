"""The host's side of the push kernels, without a GPU: stream order, halves, launches, faults."""

import ctypes
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from commlib.core.context import CommContext
from commlib.core.manager import CommContextManager
from commlib.engines.c10d.gloo import GlooEngine
from commlib.errors import ArgumentError, BootstrapError, EngineError, PeerTimeout, RingError
from commlib.p2p import (
    nvrtc,
    peer_memory,
    push_channel,
    push_collectives,
    split_all_reduce,
    stream_order,
)
from commlib.p2p.experts import rows as row_channels
from commlib.p2p.experts.channel import ExpertChannel
from commlib.p2p.experts.layout import Layout
from commlib.p2p.kernel_table import Row
from commlib.p2p.residency import Claim
from commlib.rendezvous.identity import RingIdentity, program_remedy

A, B, C, S = 1, 2, 3, 4  # handles of streams


# -- order between streams -----------------------------------------------------------------------


class Order(stream_order.StreamOrder):
    """One that notes its fences, and knows which streams are captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(torch.device("cpu"))
        self.captures: dict[int, int] = {}
        self.fences: list[int] = []
        self.strangers: set[int] = set()  # streams of another library
        self.stream = 0
        monkeypatch.setattr(stream_order, "capture_of", lambda stream: self.captures.get(stream, 0))

    def _permanent(self) -> bool:
        return self.stream not in self.strangers

    def _fence(self, stream: int, after: int) -> None:
        self.fences.append(after)

    def _wait(self, stream: int, event: Any) -> None:
        self.fences.append(-event)  # recorded after the last call, on that stream

    def call(self, stream: int) -> list[int]:
        """Return what a call on a stream waits for."""
        self.fences.clear()
        self.stream = stream
        if stream != self.last:
            self.switch_stream(stream)
        if self.foreign:
            self._ended[stream] = stream  # type: ignore[assignment]  # represents the event
        return list(self.fences)


@pytest.fixture
def ordered(monkeypatch: pytest.MonkeyPatch) -> Order:
    return Order(monkeypatch)


def test_a_call_follows_the_last_one(ordered: Order) -> None:
    assert [ordered.call(s) for s in (A, A, B, A)] == [[], [], [A], [B]]
    assert ordered.tag == 1


def test_a_capture_is_ordered_by_itself(ordered: Order) -> None:
    ordered.call(A)
    ordered.captures = {C: 7, S: 7}
    assert [ordered.call(s) for s in (C, S, S, C)] == [[], [C], [], [S]]


@pytest.mark.parametrize("then", [B, C])
def test_a_capture_does_not_hide_the_call_before_it(ordered: Order, then: int) -> None:
    ordered.call(A)
    ordered.captures = {C: 7}
    ordered.call(C)
    ordered.captures = {}
    assert ordered.call(then) == [A]


def test_a_stream_that_goes_on_in_a_capture(ordered: Order) -> None:
    ordered.call(A)
    ordered.captures = {A: 7, S: 7}
    assert ordered.call(A) == []  # the short way
    assert ordered.call(S) == [A]


def test_a_call_during_a_capture(ordered: Order) -> None:
    """Another thread's: nothing of a capture may be waited for outside it."""
    ordered.call(A)
    ordered.captures = {A: 7}
    assert [ordered.call(s) for s in (A, B)] == [[], []]
    ordered.captures = {C: 8, S: 8}
    assert [ordered.call(s) for s in (C, B, S)] == [[], [], [C]]


def test_a_foreign_stream_is_not_touched_after_its_call(ordered: Order) -> None:
    """It may be destroyed by then: the next call waits for an event that was recorded in time."""
    ordered.strangers = {S}
    assert [ordered.call(s) for s in (A, S, A, S, S)] == [[], [A], [-S], [A], [-S]]


def test_channels_of_a_ring_follow_each_other(
    ordered: Order, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels of two of them may each take all of a GPU, and would keep each other away."""
    monkeypatch.setattr(
        nvrtc, "HostWord", lambda *given: SimpleNamespace(word=ctypes.c_uint64(), address=0)
    )
    monkeypatch.setattr(stream_order, "current_raw", lambda index: ordered.stream)
    ring: Any = Ring()
    memory: Any = SimpleNamespace(nbytes=1 << 20, bases=[0, 0], put=lambda *given: None)
    claim = Claim(True, ordered)
    push = push_channel.PushChannel(ring, memory, [], claim)
    rows = row_channels.RowChannel(ring, memory, {}, claim)
    experts = ExpertChannel(ring, memory, Layout(2, 1 << 20), {}, claim)
    for channel, stream, after in ((push, A, []), (rows, B, [A]), (experts, A, [B]), (rows, A, [])):
        ordered.fences.clear()
        ordered.stream = stream
        assert channel._order.turn() == stream
        assert ordered.fences == after


# -- launches from any thread ----------------------------------------------------------------------


class Driver:
    """A driver whose current context may be the wrong one."""

    class CUlaunchAttributeID:
        CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6

    CUlaunchAttribute = CUlaunchConfig = staticmethod(
        lambda: SimpleNamespace(value=SimpleNamespace())
    )

    def __init__(self, failure: int) -> None:
        self.failure, self.contexts, self.launches = failure, [0], 0

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[int, int]:
        return 0, device + 100

    def cuCtxPushCurrent(self, context: int) -> tuple[int]:
        self.contexts.append(context)
        return (0,)

    def cuCtxPopCurrent(self) -> tuple[int, int]:
        return 0, self.contexts.pop()

    def cuLaunchKernelEx(self, *given: Any) -> tuple[int]:
        self.launches += 1
        return (0 if self.contexts[-1] == 101 else self.failure,)


@pytest.mark.parametrize(("failure", "launches"), [(0, 1), (201, 2), (400, 2), (700, 1)])
def test_a_launch_finds_its_device(
    monkeypatch: pytest.MonkeyPatch, failure: int, launches: int
) -> None:
    fake = Driver(failure)
    monkeypatch.setattr(nvrtc, "_driver", lambda: fake)
    nvrtc._context.cache_clear()
    launch = nvrtc.Launch("kernel", 1, nvrtc.Grid(1, 32), push_channel.Call())
    if failure == 700:
        with pytest.raises(EngineError, match="700"):
            launch(5)
    else:
        launch(5)
    nvrtc._context.cache_clear()
    assert (fake.launches, fake.contexts) == (launches, [0])


# -- the halves of a call --------------------------------------------------------------------------


class Stream:
    """One that notes what it waits for."""

    def __init__(self, cuda_stream: int) -> None:
        self.cuda_stream, self.stream_id, self.waits = cuda_stream, -cuda_stream, 0

    def wait_event(self, event: Any) -> None:
        self.waits += 1


class Ring:
    """As much of a ring as the halves need."""

    ring_id, rank, ranks, size, timeout = 3, 0, (0, 1), 2, 1.0
    device = torch.device("cuda", 0)

    def __init__(self) -> None:
        self.identity = self
        self.fault: str | None = None

    def unusable(self, collective: str) -> RingError:
        return RingError(f"{collective}: {self.fault}")

    def failed(self, collective: str, error: Exception) -> Exception:
        if not isinstance(error, ArgumentError):
            self.fault = f"failed in {collective}"
        return error


class Halves:
    """A ring, its channel, and how often each half has been launched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ring, self.streams = Ring(), [Stream(A), Stream(B)]
        self.launched: list[str] = []
        self.current = self.streams[0]
        event = SimpleNamespace(record=lambda stream: None, query=lambda: True)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.current)
        monkeypatch.setattr(torch.cuda, "Event", lambda: event)
        self.capture = 0  # that all streams are part of
        monkeypatch.setattr(push_channel, "current_raw", lambda index: self.current.cuda_stream)
        for module in (push_channel, split_all_reduce):
            monkeypatch.setattr(module, "capture_of", lambda stream: self.capture)
        monkeypatch.setattr(
            nvrtc, "HostWord", lambda: SimpleNamespace(word=ctypes.c_uint64(), address=0)
        )
        ring: Any = self.ring
        shared: Any = SimpleNamespace(nbytes=4096, put=lambda *given: None, zero=lambda: None)
        claim = Claim(True, stream_order.StreamOrder(self.ring.device))
        self.channel = push_channel.PushChannel(ring, shared, [], claim)
        monkeypatch.setattr(self.channel, "launch", lambda steps, *given: self._launch(*steps))

    def _launch(self, step: Any) -> None:
        self.channel.check()
        self.launched.append(step)

    def begin(self) -> split_all_reduce.SplitAllReduce:
        """Launch a first half."""
        ring: Any = self.ring
        x, steps = torch.zeros(1), {"begin": ("begin",), "end": ("end",)}
        halves = push_collectives.SplitSteps(**steps)
        return split_all_reduce.SplitAllReduce(ring, ring, self.channel, halves, x, x)


@pytest.fixture
def halves(monkeypatch: pytest.MonkeyPatch) -> Halves:
    return Halves(monkeypatch)


def test_waiting_twice_launches_once(halves: Halves) -> None:
    work = halves.begin()
    assert not work.done()
    work.join()
    work.join()
    assert halves.launched == ["begin", "end"]
    assert work.done()


def test_streams_of_waiters(halves: Halves) -> None:
    """The stream that the tensors come from, and later waiters, follow the end."""
    work = halves.begin()
    halves.current = halves.streams[1]
    work.join()
    assert [stream.waits for stream in halves.streams] == [1, 0]
    halves.current = halves.streams[0]
    work.join()
    assert [stream.waits for stream in halves.streams] == [2, 0]


def test_waiting_on_a_ring_that_is_closed(halves: Halves) -> None:
    """Its memory is no longer mapped: the kernel must not run."""
    work = halves.begin()
    halves.ring.fault = "closed"
    for _ in range(2):
        with pytest.raises(RingError, match="closed"):
            work.join()
    assert halves.launched == ["begin"]
    assert not work.done()


def test_a_fault_is_raised_at_every_wait(halves: Halves) -> None:
    work = halves.begin()
    halves.channel._word.value = 1 << 61  # late: rank 0
    with pytest.raises(PeerTimeout, match="rank 0"):
        work.join()
    assert halves.ring.fault == "failed in all_reduce"
    with pytest.raises(RingError, match="failed"):
        work.join()


def test_halves_that_a_reset_separates(halves: Halves) -> None:
    """The old second half must not take what the new first half has pushed."""
    old = halves.begin()
    halves.channel.reset()
    new = halves.begin()
    with pytest.raises(ArgumentError, match="reset"):
        old.join()
    new.join()
    assert halves.launched == ["begin", "begin", "end"]


@pytest.mark.parametrize(("begun", "ended"), [(0, 7), (7, 0), (7, 8)])
def test_halves_in_different_captures(halves: Halves, begun: int, ended: int) -> None:
    """One half would run without the other; until it is put right no other call comes between."""
    halves.capture = begun
    work = halves.begin()
    halves.capture = ended
    with pytest.raises(ArgumentError, match=r"wait\(\) where it began"):
        work.join()
    with pytest.raises(ArgumentError, match="is open"):
        halves.channel.ready()
    halves.capture = begun
    work.join()
    assert halves.launched == ["begin", "end"]
    halves.channel.ready()


def test_a_half_of_a_capture_that_failed(halves: Halves) -> None:
    halves.capture = 7
    halves.begin()
    halves.channel.abandon(6)
    with pytest.raises(ArgumentError, match="is open"):
        halves.channel.ready()
    halves.channel.abandon(7)
    halves.channel.ready()


class Noted:
    """A launch that notes its streams."""

    def __init__(self) -> None:
        self.stream: int | None = None
        self.streams: list[int | None] = []

    def move(self, stream: int) -> None:
        """Let ``run`` launch on a stream."""
        self.stream = stream

    def run(self) -> tuple[int]:
        """Note the stream."""
        self.streams.append(self.stream)
        return (0,)


@pytest.mark.parametrize("foreign", [False, True])
def test_a_call_is_one_tag_on_one_stream(halves: Halves, foreign: bool) -> None:
    """The end of a call on a foreign stream is recorded while that stream certainly exists."""
    ended: list[int] = []
    order: Any = SimpleNamespace(last=A, foreign=foreign, tag=3, ended=ended.append)
    halves.channel._order = order
    launch: Any = Noted()
    steps = [push_channel.Step(push_channel.Call(), launch, offset) for offset in (0, 16)]
    x, out = torch.zeros(8), torch.zeros(8)
    for number in (1, 2):
        push_channel.PushChannel.launch(halves.channel, steps, out, x)
        assert {call.tag for call, _, _ in steps} == {3 << 17 | number}
    assert [call.x - x.data_ptr() for call, _, _ in steps] == [0, 16]
    assert [call.out - out.data_ptr() for call, _, _ in steps] == [0, 16]
    assert launch.streams == 4 * [A]
    assert ended == (2 * [A] if foreign else [])


class Planned(push_collectives.PushCollective):
    """One that notes the kernels of its steps."""

    made: ClassVar[list[str]] = []

    def _row(self, nbytes: int) -> Row | None:
        return Row(100, "one_shot", 32, 1) if nbytes <= 100 else None

    def _step(self, row: Row, offset: int, nbytes: int) -> Any:
        self.made.append(row.kernel)

    def _gate(self, nbytes: int, *, signals: bool) -> Any:
        return ()


def test_halves_are_planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "made", [])
    channel: Any = SimpleNamespace(window=lambda kernel: 50, share=0)
    moved = Planned(channel, "all_reduce", "_float32_sum", 4, 16, 0)
    assert moved.split(48) is moved.split(48) is not None
    assert Planned.made == ["one_shot_begin", "one_shot_end"]
    channel.share = 16
    assert moved.split(48) is not None
    assert Planned.made == 2 * ["one_shot_begin", "one_shot_end"]  # another grid
    assert moved.split(52) is None  # more than one launch does
    assert moved.split(104) is None
    assert Planned(channel, "all_reduce", "_float32_max", 4, 16, 0).split(48) is None


# -- what goes wrong on one rank -------------------------------------------------------------------


class Lonely(Ring):
    """A ring whose other rank says what this one says."""

    def exchange(self, values: list[int]) -> list[list[int]]:
        """Note what the other ranks receive."""
        self.said = values
        return [values] * 2


@pytest.mark.parametrize("error", [EngineError("no compiler"), RuntimeError("of another kind")])
@pytest.mark.parametrize("opened", [push_collectives.open_push, row_channels.open_channel])
def test_the_others_hear_of_any_failure(
    monkeypatch: pytest.MonkeyPatch, opened: Any, error: Exception
) -> None:
    def fail(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(nvrtc, "module", fail)
    closed: list[bool] = []
    memory = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(push_collectives, "share", lambda *given: memory)
    ring = Lonely()
    claim = Claim(True, stream_order.StreamOrder(ring.device))
    assert "compile" in opened(ring, claim)
    assert ring.said == [0]
    assert closed == [True] * (opened is push_collectives.open_push)


class Unresettable:
    """A channel on a device that is lost."""

    def check(self) -> None:
        """Report nothing."""

    def reset(self) -> None:
        """Fail."""
        raise RuntimeError("no device")


def test_a_reset_that_fails_leaves_no_ring_that_looks_whole() -> None:
    identity = RingIdentity(7, 0, (0,), torch.device("cpu"), 1.0, "gloo", program_remedy(7, (0,)))
    manager = CommContextManager.instance()
    ring = CommContext(manager, identity, GlooEngine, None)
    channels: Any = [Unresettable()]
    ring._engine.channels = lambda: channels  # type: ignore[method-assign]
    ring._health.failed("all_reduce", PeerTimeout("rank 1 did not come"))
    with pytest.raises(EngineError, match="its text is this error's cause") as caught:
        ring.reset()
    assert str(caught.value.__cause__) == "no device"
    with pytest.raises(RingError, match="failed"):
        ring.reset()


def test_a_store_that_is_gone_keeps_nobody_from_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*given: Any) -> bool:
        raise BootstrapError("connection closed")

    freed: list[int] = []
    monkeypatch.setattr(peer_memory, "_runtime", lambda: SimpleNamespace(free=freed.append))
    places = [SimpleNamespace(_alone=alone, _ring=Ring(), bases=[at]) for at, alone in
              ((1, gone), (2, lambda *given: True), (3, lambda *given: False))]  # fmt: skip
    monkeypatch.setattr(peer_memory, "_closed", list(places))
    peer_memory._free_closed()
    assert freed == [2]
    assert peer_memory._closed == [places[0], places[2]]


def test_memory_without_a_handle_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int) -> bytes:
        raise RuntimeError("no handle")

    freed: list[int] = []
    runtime = SimpleNamespace(
        malloc=lambda nbytes: 9,
        memset=lambda *given: None,
        deviceSynchronize=lambda: None,
        ipcGetMemHandle=refuse,
        free=freed.append,
    )
    monkeypatch.setattr(peer_memory, "_runtime", lambda: runtime)
    with pytest.raises(RuntimeError, match="no handle"):
        peer_memory._allocate(64)
    assert freed == [9]
