"""Any callable as a graph that is replayed: collectives inside, nothing silently wrong.

``capture(fn)`` returns a ``CapturedFunction``. Each call gets a key: its arguments but for their
content, and what the function uses without receiving it. The life of one key::

    first call:        the call itself runs and counts               CountedCall.make
      rehearse:        fn runs again, observed, and is undone        rehearse -> Findings
      record:          fn runs once more, and is captured            record_call -> RecordedCall
        segments:      graphs, and the eager parts between them      CaptureRun -> Segments
        agree:         all members of its rings succeed, or none     record, raise_together
      keep:            what later calls need                         CapturedCall, or Slots
    later calls:       a graph is launched                           CapturedCall.replay
      verify:          now and then fn runs first, and both must     Verification.run
                       give the same bits
    end:               a tensor was replaced, reset(), or close of   Entries.drop
                       a ring: graphs go before communicators.
                       Graphs of replaced parameters of modules
                       stay: these may come back

Where gradients flow, a ``Slot`` has a captured call as its forward, and its backwards. One autograd
node joins them. There is one slot per forward whose backward has not run yet. A ``Pipeline``
has a captured module for each stretch of its layers, and a ``PipelineSchedule`` calls such stages.

Invariants:

1. The first call is right by construction: it is an eager call. Whatever runs for its capture is
   undone: memory and gradients (``UndoLog``), generators (``RngWatch``), Python objects
   (``PythonState``). A failed capture undoes the call too, or says that its effects were kept.
2. A graph reads and writes three kinds of memory (``TouchedMemory``): its own, that of the
   arguments (``Inputs``), and that of the program outside. Replays copy arguments that have moved.
   Memory from outside is kept alive. Where the program replaces it, the call is captured again.
3. What can't be in a graph is rejected before it runs, with the line of the program. What a replay
   would leave out is rejected too: a number that the host reads, a Python counter, a name.
4. All members of a ring capture the same collectives in the same order, or all of them raise.
5. Outputs are memory of the graph, borrowed until its next replay: reading one after that raises.
6. A replay runs no Python of the program but eager parts, and never blocks the host without them.
7. All graphs of a device share one capture stream, and replay one after the other. They share one
   pool, too, but for what lasts from one replay to the next: between a forward and its backward.

A run asks for nothing by a global: only a function marked ``eager`` asks for the run of its thread,
because it is called by the program's code (``runs.py``).
"""

from commlib.errors import GraphError
from commlib.graph.capture import capture
from commlib.graph.captured_function import CapturedFunction
from commlib.graph.compiled.backend import backend
from commlib.graph.pipelines.actions import PipelineMove
from commlib.graph.pipelines.pipeline import Pipeline, pipeline
from commlib.graph.pipelines.schedule import PipelineSchedule
from commlib.graph.recording.eager_parts import eager
from commlib.graph.report import report

__all__ = [
    "CapturedFunction",
    "GraphError",
    "Pipeline",
    "PipelineMove",
    "PipelineSchedule",
    "backend",
    "capture",
    "eager",
    "pipeline",
    "report",
]


def __dir__() -> list[str]:
    """List the public names, not the modules."""
    return [*__all__]
