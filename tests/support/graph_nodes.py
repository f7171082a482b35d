"""The parts of a captured function's graphs: nodes of CUDA graphs, or operators on a CPU."""

from typing import Any

from commlib import graph
from commlib.graph.backends.cuda_graph import CudaRecording

_COPIES = {"MEMCPY": "memcpy", "MEMSET": "memset"}


def parts(captured: "graph.CapturedFunction[..., Any]") -> list[list[str]]:
    """Return the work of each graph of the one kind of call, in order of the graphs.

    On a GPU: the name of each kernel, and "memcpy" or "memset"; on a CPU: the operators.
    """
    (entry,) = captured.entries.captured
    names = []
    for segments in entry.graphs:
        recordings = [part for part in segments.parts if isinstance(part, CudaRecording)]
        if recordings:
            names.append([name for part in recordings for name in _nodes(part)])
        else:
            names.append(segments.names)
    return names


def _nodes(recording: CudaRecording) -> list[str]:
    from cuda.bindings import driver

    cuda_graph = recording._graph.raw_cuda_graph()
    _, _, count = _checked(driver.cuGraphGetNodes(cuda_graph, 0))
    _, nodes, _ = _checked(driver.cuGraphGetNodes(cuda_graph, count))
    return [name for node in nodes[:count] if (name := _name(driver, node))]


def _name(driver: Any, node: Any) -> str:
    """Return what a node does; nothing for one that only orders others."""
    kind = _checked(driver.cuGraphNodeGetType(node))[1].name.removeprefix("CU_GRAPH_NODE_TYPE_")
    if kind != "KERNEL":
        return _COPIES.get(kind, "")
    params = _checked(driver.cuGraphKernelNodeGetParams(node))[1]
    if int(params.func):
        name = _checked(driver.cuFuncGetName(params.func))[1]
    else:
        name = _checked(driver.cuKernelGetName(params.kern))[1]
    return str(name.decode())


def _checked(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    assert int(answer[0]) == 0, answer[0]
    return answer
