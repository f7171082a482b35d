"""Record a part of a function: its graphs, the same on every member of its rings."""

from collections.abc import Callable, Sequence
from typing import Any

from commlib.errors import CommError, GraphError
from commlib.graph.backends.base import Backend, Pool
from commlib.graph.operators.nested import unrolled
from commlib.graph.operators.program_line import line_of
from commlib.graph.operators.unsupported import check_reads
from commlib.graph.recording.capture_run import CaptureRun, Settings
from commlib.graph.recording.findings import Findings
from commlib.graph.recording.rank_agreement import raise_together
from commlib.graph.recording.replay_times import ReplayTimes
from commlib.graph.recording.segments import Segments
from commlib.graph.watching.host import OtherValue
from commlib.graph.watching.runs import DonePart

_HINTS = {  # what the driver or torch says, and what that means here
    "legacy stream depend on a capturing": (
        "; an autograd node that an eager forward has made on the default stream is still held: "
        "delete that forward's outputs first, or run it on another stream"
    ),
    "object has no attribute": (
        "; a graph has other tensors in place of the arguments, without what the program has set "
        "on these: pass the value itself as an argument"
    ),
}


def record(
    backend: Backend,
    findings: Findings,
    fn: Callable[[Segments], Any],
    *,
    part: str,
    again: bool,
    pool: Pool | None = None,
    before: Segments | None = None,
    done: Sequence[DonePart] | None = None,
    times: ReplayTimes | None = None,
) -> tuple[Segments, Any]:
    """Capture ``fn``. Either every member of its rings succeeds, or all raise.

    Args:
        backend: What captures.
        findings: What the runs before have shown; the capture must agree with them.
        fn: What is captured. It gets the segments that its graphs become a part of.
        part: The name of what is captured.
        again: This rank captures ``part`` another time, the same, and no other rank is asked.
        pool: Its own memory, in place of what all graphs share.
        before: The forward of a backward.
        done: What the eager parts have done already in a verified call.
        times: Where the times of replays are kept.

    Returns:
        The graphs, and what ``fn`` returned.

    Raises:
        GraphError: It can't be captured, here or on another member. The capture leaves nothing.
        OtherValue: A later capture takes another branch than the first.
    """
    # What runs outside may replay other graphs; gradients that are bound stay after a replay.
    if pool is None and (findings.broken or findings.binds_grads or findings.binds):
        pool = backend.own_pool()
    constants = {} if before is None else before.constants
    undo = None if again else findings.undo
    settings = Settings(
        findings.generators,
        pool,
        findings.leaves,
        findings.reports_capture,
        findings.empty,
        constants,
        undo,
        done,
        times,
    )
    run = CaptureRun(backend, settings)
    segments, problem, result = run.segments, None, None
    try:
        with unrolled(findings.modules), run.under_way():
            result = fn(segments)
        findings.check(part, segments, again=again)
        reads = segments.reads
        if reads and (segments.broken or part != "forward"):
            inside = "a function with eager parts" if part == "forward" else "a backward"
            check_reads(reads, inside)
        findings.reads = findings.reads or reads is not None
    except Exception as error:
        if again and findings.reads:  # this call goes another way than the one that was captured
            segments.release()
            raise OtherValue(str(error)) from error
        problem = _as_ours(error)
    try:
        rings = [] if again else findings.rings
        raise_together(rings, segments.collectives, problem, counted=again and segments.broken)
    except CommError:
        segments.release()
        raise
    return segments, result


def _as_ours(error: Exception) -> GraphError:
    """Return the error to raise for a capture that failed with ``error``."""
    if isinstance(error, GraphError):
        return error
    text = f"{type(error).__name__}: {error}"
    why = next((hint for words, hint in _HINTS.items() if words in text), "")
    line = line_of(error)
    graph_error = GraphError(f"capturing failed: {text}{why}" + (f"; at {line}" if line else ""))
    graph_error.__cause__ = error
    return graph_error
