"""The run of a function that its graphs are recorded from."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commlib.core import observers
from commlib.graph.backends.base import Backend, Pool
from commlib.graph.recording.eager_parts import EagerSegment
from commlib.graph.recording.replay_times import ReplayTimes
from commlib.graph.recording.segments import Segments, TimedSegments
from commlib.graph.watching.capture_query import reporting
from commlib.graph.watching.runs import (
    DonePart,
    EagerPart,
    call_apart,
    check_foreign,
    do_again,
    under_way,
)
from commlib.graph.watching.undo import UndoLog

R = TypeVar("R")


class Settings(NamedTuple):
    """Settings of a captured run.

    Attributes:
        generators: Those that it draws from in addition to torch's own.
        pool: Its own memory, in place of what all graphs share.
        leaves: Those whose gradients eager parts may read.
        reports_capture: The answer when the function asks whether it is captured.
        empty: Memory that the function fills and empties again.
        constants: Memory of the forward that holds the same at each call, in a backward.
        undo: Notes what eager parts change, where that does not count.
        done: What the eager parts did in a verified call, to be done again in their place.
        times: Where the times of replays are kept.
    """

    generators: Sequence[torch.Generator] = ()
    pool: Pool | None = None
    leaves: Sequence[torch.Tensor] = ()
    reports_capture: bool = True
    empty: Set[int] = frozenset()
    constants: dict[int, StorageWeakRef] = {}  # noqa: RUF012  # never changed
    undo: UndoLog | None = None
    done: Sequence[DonePart] | None = None
    times: ReplayTimes | None = None


class CaptureRun:
    """One run that is captured; ``segments`` are its graphs and eager parts so far."""

    def __init__(self, backend: Backend, settings: Settings) -> None:
        self._backend, self._settings = backend, settings
        self._done = None if settings.done is None else list(settings.done)
        times, reports = settings.times, settings.reports_capture
        self.segments = (
            Segments(backend, reports_capture=reports)
            if times is None
            else TimedSegments(backend, times, reports_capture=reports)
        )

    @contextmanager
    def under_way(self) -> Iterator[Segments]:
        """Capture what runs inside a ``with`` block; an exception leaves nothing captured.

        A run that the capture is inside of does not see it: it would copy, inside the capture, what
        that writes. So it is with a further graph of a backward.
        """
        check_foreign()
        inside = observers.observers and observers.looking_on()
        apart = observers.unwatched() if inside else nullcontext()
        with apart, under_way(self), reporting(self._settings.reports_capture):
            self._begin()
            try:
                with isolated():
                    yield self.segments
                self.segments.parts.append(self._backend.end())
            except BaseException:
                self._backend.fail()
                self.segments.release()
                raise

    def _begin(self) -> None:
        settings = self._settings
        recorder = self._backend.begin(settings.generators, settings.pool)
        recorder.memory.constants, recorder.memory.empty = settings.constants, settings.empty
        self.segments.recorders.append(recorder)

    def eager_part(self, part: EagerPart) -> Any:
        """End a graph, let it run, call ``part`` outside, and begin the next."""
        segments = self.segments
        grads = [(leaf, leaf.grad) for leaf in self._settings.leaves]
        graph = self._backend.end()
        segments.parts.append(graph)
        for leaf, grad in grads:  # which the end of a graph has put back
            leaf.grad = grad
        if not segments.broken:  # an eager part may wait for another thread's replays
            segments.broken, segments.lock = True, threading.RLock()
        segments.replay_one(graph)
        with torch.no_grad():
            if self._done is not None:
                called = do_again(self._done, part)
            else:
                called = call_apart(part, self._settings.undo)
            segment = EagerSegment(part, called, grads)
        segments.parts.append(segment)
        self._begin()
        return segment.result


_hooks: Any = torch._C._autograd
# The hooks that autograd would call for what is saved now; None where there are none.
_top_hooks: Callable[[bool], Any] = getattr(
    _hooks, "_top_saved_tensors_default_hooks", lambda ignore_tracing: None
)


@contextmanager
def isolated() -> Iterator[None]:
    """Run without the caller's autocast cache and saved-tensor hooks.

    Autocast would reuse its casts of weights, and a graph go on reading an old one. Hooks on what
    autograd saves (checkpoints, offloading) count and move it: no backward of theirs will need it.
    """
    torch.clear_autocast_cache()
    try:
        with without_saved_hooks():
            yield
    finally:
        torch.clear_autocast_cache()


def has_saved_hooks() -> bool:
    """Return True if autograd would call hooks for what is saved now."""
    return _top_hooks(True) is not None


def without_saved_hooks() -> AbstractContextManager[None]:
    """Return a context in which autograd saves tensors without the caller's hooks.

    A replay saves nothing that hooks see. A checkpoint compares what its forward and its second run
    save, and either may be a replay: so no run of a captured call shows it anything.
    """
    return nullcontext() if _top_hooks(True) is None else _hooks_removed()


def called_unhooked(fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any]) -> R:
    """Call a function eagerly, in the place of a replay: without the caller's hooks."""
    with without_saved_hooks():
        return fn(*args, **kwargs)


@contextmanager
def _hooks_removed() -> Iterator[None]:
    # Further hooks that change nothing would hide in-place writes from autograd.
    pairs = []
    while (pair := _top_hooks(True)) is not None:
        pairs.append(pair)
        _hooks._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pair in reversed(pairs):
            _hooks._push_saved_tensors_default_hooks(*pair)
