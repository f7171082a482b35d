"""Captured stretches of work. On a CPU, the recorded steps run again in the same memory."""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol, TypeAlias

import torch

from commlib.core import observers
from commlib.core.ring import Ring
from commlib.core.work import Work
from commlib.graph.backends.side_stream import SideStream
from commlib.graph.operators.step import Step, as_recorded
from commlib.graph.operators.waiting import with_waits
from commlib.graph.watching.recorder import Recorder

Pool: TypeAlias = Any  # memory of graphs, as ``own_pool`` gives it


class Recording(Protocol):
    """A stretch of captured work: its steps, and the bytes that its memory has grown by."""

    nodes: int
    nbytes: int
    reads: str | None  # where the host reads a value that it fits alone

    def replay(self) -> None:
        """Do it again, in the memory that it was captured in; on the current stream of a GPU."""

    def release(self) -> None:
        """Release it; it is not replayed any more."""


class Backend(Protocol):
    """Captures on one kind of device.

    Attributes:
        lock: Held while something is replayed.
        device: Where it captures.
        copies_arguments: Whether a graph has copies of all arguments from the start.
        captures_run: Whether a capture does what it captures.
    """

    lock: threading.RLock
    device: torch.device
    copies_arguments: bool
    captures_run: bool

    def warming(self) -> Any:
        """Return the context in which a function runs before its capture."""

    def calling(self) -> Any:
        """Return the context of the call that is followed by such runs."""

    def trimmed(self) -> AbstractContextManager[object]:
        """Return the context of a verified call, which also runs the function itself.

        Memory that torch takes for it goes back to the GPU at its end.
        """

    def trim_after_backward(self, outs: Sequence[torch.Tensor]) -> None:
        """Give back what torch keeps of a real call, after the backward from ``outs``."""

    def begin(
        self, generators: Sequence[torch.Generator] = (), pool: Pool | None = None
    ) -> Recorder:
        """Begin a stretch; returns what watches it, already entered.

        ``pool``: its own memory, as ``own_pool`` gives it, in place of what all graphs share.
        """

    def end(self) -> Recording:
        """End the stretch; nothing of it counts as done until it is replayed."""

    def join(self, rings: Sequence[Ring]) -> None:
        """Order the current stream after the comm streams of rings."""

    def own_pool(self) -> Pool | None:
        """Return memory for graphs that keep something from one replay to the next."""

    def turn(self) -> None:
        """Order the current stream after the last replay: graphs share their memory."""

    def side(self) -> SideStream | None:
        """Return the side stream of this thread and its current stream; None on a CPU."""

    def waiting(self) -> AbstractContextManager[object]:
        """Return the context to make autograd nodes in that outlive a capture."""

    def fail(self) -> None:
        """Abandon the stretch after an exception, and restore the state around it."""


class CpuRecording:
    """The steps of a stretch, with their tensors."""

    reads: str | None = None

    def __init__(self, steps: list[Step]) -> None:
        self._actions, self.nodes = with_waits(steps), len(steps)
        made = (tensor.untyped_storage() for step in steps for _, tensor in step.made)
        self.nbytes = sum({memory._cdata: memory.nbytes() for memory in made}.values())

    def replay(self) -> None:
        """Run every operator again on the recorded tensors; all collectives have finished then."""
        with as_recorded():
            for action in self._actions:
                action.again()

    def release(self) -> None:
        """Drop the tensors."""
        self._actions = []


class CpuBackend:
    """Records on a CPU: the same stale addresses and baked branches as a graph on a GPU."""

    copies_arguments = True
    captures_run = True

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.device = torch.device("cpu")
        self._recorder: Recorder | None = None
        self._works: list[Work] = []
        self._scope = ExitStack()

    def warming(self) -> AbstractContextManager[object]:
        """Run where the caller is."""
        return nullcontext()

    calling = trimmed = warming

    def trim_after_backward(self, outs: Sequence[torch.Tensor]) -> None:
        """Do nothing: torch keeps no memory of a CPU."""

    def begin(
        self, generators: Sequence[torch.Generator] = (), pool: Pool | None = None
    ) -> Recorder:
        """Watch what runs, and keep its steps."""
        self._works = self._scope.enter_context(observers.unwaited())
        self._recorder = Recorder(torch.device("cpu"), keep=True)
        return self._scope.enter_context(self._recorder)

    def end(self) -> CpuRecording:
        """Undo what the recorded run wrote, as a capture on a GPU would have written nothing."""
        recorder = self._left()
        return CpuRecording(recorder.steps)

    def join(self, rings: Sequence[Ring]) -> None:
        """Do nothing: a CPU has no streams."""

    def own_pool(self) -> None:
        """Every step has its own memory."""

    def turn(self) -> None:
        """Do nothing: a CPU has no streams."""

    def side(self) -> None:
        """Do nothing: a CPU has no streams."""

    def waiting(self) -> AbstractContextManager[object]:
        """Do nothing: a CPU has no streams."""
        return nullcontext()

    def fail(self) -> None:
        """Undo what it wrote so far."""
        if self._recorder is not None:
            self._left()

    def _left(self) -> Recorder:
        recorder, self._recorder = self._recorder, None
        works, self._works = self._works, []
        assert recorder is not None
        self._scope.close()
        try:
            for work in works:
                work.wait()
        finally:
            recorder.restore()
        return recorder
