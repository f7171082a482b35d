"""A captured stretch of a program: graphs, and the eager parts between them."""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import cached_property

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commlib.core.ring import Ring
from commlib.errors import GraphError
from commlib.graph.backends.base import Backend, Recording
from commlib.graph.recording.eager_parts import EagerSegment
from commlib.graph.recording.replay_times import ReplayTimes
from commlib.graph.watching.recorded_collective import Collective
from commlib.graph.watching.recorder import Recorder
from commlib.graph.watching.runs import DonePart


class Segments:
    """Graphs and eager parts in the order of a call; ``CaptureRun`` makes them.

    Attributes:
        lock: Held from the beginning to the end of a replay.
        parts: Graphs and eager parts.
        recorders: What each graph touches.
        own: How many operators are the function's own; copies of its outputs follow.
        broken: Whether it has eager segments, so that the capture has already run.
        reports_capture: The answer when the function asks whether it is captured.
    """

    def __init__(self, backend: Backend, *, reports_capture: bool) -> None:
        self._backend = backend
        self.device, self.lock = backend.device, backend.lock
        self.turn, self.join, self.trimmed = backend.turn, backend.join, backend.trimmed
        self.trim_after_backward = backend.trim_after_backward
        self.parts: list[Recording | EagerSegment] = []
        self.recorders: list[Recorder] = []
        self.own = 0
        self.broken = False
        self.reports_capture = reports_capture

    def has_made(self, tensor: torch.Tensor) -> bool:
        """Return True if the memory of a tensor is the graphs' own."""
        return self.made(tensor.untyped_storage()._cdata)

    def made(self, key: int) -> bool:
        """Return True if the memory that ``key`` names is the graphs' own."""
        if any(key in recorder.memory.made for recorder in self.recorders):
            return True
        eager = [part for part in self.parts if isinstance(part, EagerSegment)]
        return any(part.made(key) for part in eager)

    @property
    def names(self) -> list[str]:
        """Return every operator of the graphs with its plain arguments, in order."""
        return [name for recorder in self.recorders for name in recorder.names]

    @property
    def own_names(self) -> list[str]:
        """Return the operators of the function itself; a backward is nothing else."""
        names = self.names
        return names[: self.own or len(names)]

    @property
    def rings(self) -> list[Ring]:
        """Return the rings of the collectives, by number."""
        rings = {call.ring.ring_id: call.ring for call in self.collectives}
        return [rings[number] for number in sorted(rings)]

    @property
    def collectives(self) -> list[Collective]:
        """Return every collective of the graphs, in order."""
        return [call for recorder in self.recorders for call in recorder.collectives]

    @property
    def reads(self) -> str | None:
        """Return the line where the host reads a value, if the graphs fit that value only."""
        return next((part.reads for part in self.parts if part.reads), None)

    @property
    def constants(self) -> dict[int, StorageWeakRef]:
        """Return memory of the graphs' own on the host that holds the same at each call."""
        storages: dict[int, StorageWeakRef] = {}
        for recorder in self.recorders:
            if recorder.host is not None:
                keys = recorder.host.constants & recorder.memory.made.keys()
                storages |= {key: recorder.memory.made[key] for key in keys}
        return storages

    def replay(self, done: Sequence[DonePart] | None = None) -> None:
        """Run all of it on the current stream; the host waits for eager parts only.

        ``done``: what the eager parts did in a verified call, to be done again in their place.
        """
        if not self.broken:
            for part in self.parts:
                part.replay()
            return
        left = None if done is None else list(done)
        for part in self.parts:
            if isinstance(part, EagerSegment):
                part.replay(left)
            else:
                self.replay_one(part)

    def replay_rest(self) -> None:
        """Run what the capture has not run: with eager parts, the last graph."""
        if self.broken:
            part = self.parts[-1]
            assert not isinstance(part, EagerSegment)
            self.replay_one(part)
        else:
            self.replay()

    def replay_one(self, graph: Recording) -> None:
        """Replay one graph in its turn; another thread's may come before it."""
        with self._backend.lock:
            self.turn()
            graph.replay()

    def release(self) -> None:
        """Release every graph; a replay raises from then on."""
        for part in self.parts:
            part.release()
        self.parts, self.replay = [], _gone  # type: ignore[method-assign]  # no test at a replay


class TimedSegments(Segments):
    """Segments whose replays are timed if they have collectives."""

    def __init__(self, backend: Backend, times: ReplayTimes, *, reports_capture: bool) -> None:
        """``times``: where the beginning and the end of each replay are kept."""
        super().__init__(backend, reports_capture=reports_capture)
        self._times = times

    @cached_property
    def _timed(self) -> bool:
        return bool(self.collectives)  # all of them: replays follow the capture

    def replay(self, done: Sequence[DonePart] | None = None) -> None:
        """Run all of it, between two marks on the current stream."""
        with self._times.timing() if self._timed else nullcontext():
            super().replay(done)


def _gone(done: Sequence[DonePart] | None = None) -> None:
    raise GraphError("this graph was released and can't be replayed")
