"""DeepSpeed's graph helpers over ``commlib.graph``: the same calls, kept apart and in one pool.

``graph_process`` runs a function and replays it from then on. A function is identified by its code,
by what its closure and ``self`` are, and by its arguments, not by its name; other tensors, norms or
list lengths are captured again or copied, never ignored. ``graph_clear`` releases all.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, ParamSpec, TypeVar

import torch

from commlib.errors import GraphError
from commlib.graph import CapturedFunction, capture
from commlib.graph.calls.key_values import value
from commlib.graph.first_call import backend_of
from commlib.graph.options import First
from commlib.graph.recording.capture_run import CaptureRun, Settings
from commlib.graph.recording.segments import Segments
from commlib.graph.watching.runs import inside

__all__ = [
    "Graph",
    "capture_to_graph",
    "create_graph",
    "graph_clear",
    "graph_process",
    "replay_graph",
]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


P = ParamSpec("P")
T = TypeVar("T")

_VALUES = (bool, int, float, str, type(None))

_captured: dict[Any, CapturedFunction] = {}
_contents: dict[Any, list[Any]] = {}  # of closures: alive, so that nothing else has their ids


def graph_process(
    replay_first_step: bool, func: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> T:
    """Call ``func``; the first call of a kind captures it, later ones replay.

    Args:
        replay_first_step: False keeps the run before the capture as the first call. True undoes
            that run and replays the graph as the first call. The sums are the same either way.
        func: A function or a bound method, whose object is not kept alive.
        *args: Its positional arguments.
        **kwargs: Its keyword arguments.

    Returns:
        What ``func`` returns. Tensors are valid until the next call of ``func``.

    Raises:
        GraphError: The call can't be captured.
    """
    result: T = _graphed(func, "once" if replay_first_step else "warmup")(*args, **kwargs)
    return result


def graph_clear() -> None:
    """Release every graph that ``graph_process`` has captured."""
    for graphed in _captured.values():
        graphed.reset()
    _captured.clear()
    _contents.clear()


def _graphed(func: Callable[..., Any], first: First) -> CapturedFunction:
    owner = getattr(func, "__self__", None)
    plain = getattr(func, "__func__", func)
    named = tuple((plain.__kwdefaults__ or {}).items())
    contents = [cell.cell_contents for cell in plain.__closure__ or ()]
    contents += [*(plain.__defaults__ or ()), *(default for _, default in named)]
    parts = tuple(value(x) if isinstance(x, _VALUES) else id(x) for x in contents)
    key = plain.__code__, id(owner), parts, first
    if key not in _captured:
        held = func if owner is None else _Weakly(func)
        _captured[key], _contents[key] = capture(held, first=first), contents
        if owner is not None:  # which may be gone before its name is used again
            weakref.finalize(owner, _forget, key)
    return _captured[key]


def _forget(key: Any) -> None:
    _contents.pop(key, None)
    graphed = _captured.pop(key, None)
    if graphed is not None:
        graphed.reset()


class _Weakly:
    """A bound method that does not keep its object alive."""

    def __init__(self, method: Any) -> None:
        self._method = weakref.WeakMethod(method)
        self.__qualname__ = method.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        method = self._method()
        assert isinstance(method, MethodType)  # its object makes the call
        return method(*args, **kwargs)


class Graph:
    """A graph that is empty until ``capture_to_graph`` fills it.

    Attributes:
        segments: The captured work; None while the graph is empty.
    """

    segments: Segments | None = None

    def reset(self) -> None:
        """Release the captured work. A ring that closes resets the graphs that use it."""
        if self.segments is not None:
            self.segments.release()
            self.segments = None


def create_graph() -> Graph:
    """Return an empty graph, for ``capture_to_graph``."""
    return Graph()


@contextmanager
def capture_to_graph(graph: Graph, pool: object = None, stream: object = None) -> Iterator[None]:
    """Capture the work of a ``with`` block into ``graph``; none of it is done before a replay.

    Args:
        graph: The graph to fill. Its earlier work is released.
        pool: Ignored: every graph has its own memory.
        stream: Ignored: all graphs of a device are captured on one stream.

    Returns:
        A context manager for the block.

    Raises:
        GraphError: The block can't be captured, or is inside a captured function.
    """
    if inside():
        raise GraphError("capture_to_graph inside a function that is captured itself")
    backend = backend_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    graph.reset()
    with CaptureRun(backend, Settings(pool=backend.own_pool())).under_way() as segments:
        yield
    graph.segments = segments
    for call in segments.collectives:
        call.ring._lifecycle.graphs.add(graph)


def replay_graph(graph: Graph) -> None:
    """Do the captured work on the current stream.

    Args:
        graph: A graph that ``capture_to_graph`` has filled.

    Raises:
        GraphError: The graph is empty.
    """
    if graph.segments is None:
        raise GraphError("replay_graph of an empty graph; fill it with capture_to_graph first")
    with graph.segments.lock:
        graph.segments.turn()
        graph.segments.replay()
