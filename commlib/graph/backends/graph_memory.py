"""The memory of graphs: torch's shared pool, or the driver's under cudaMallocAsync.

Under cudaMallocAsync an allocation in a capture is a node of the graph: the memory is there from
the first launch on. Its last tensor frees it, on the capture stream. Before the first launch, or
after a failed capture, that ends the process. While a replay runs, other work would get memory
that the graph still uses. So a recording owns what its capture has allocated.
"""

import ctypes
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commlib import torch_allocator
from commlib.errors import GraphError
from commlib.graph.operators.layout import unowned


@cache
def driver_allocates() -> bool:
    """Return True if graphs allocate their memory by separate nodes (cudaMallocAsync)."""
    return torch_allocator.current() == torch_allocator.MALLOC_ASYNC


class GraphMemory:
    """Memory that one capture has allocated and not freed; it is never freed before a launch."""

    def __init__(
        self, graph: torch.cuda.CUDAGraph, device: torch.device, made: Iterable[StorageWeakRef]
    ) -> None:
        """Hold the graph and the storages of ``made`` that are still there."""
        storages = (torch.UntypedStorage._new_with_weak_ptr(one.cdata) for one in made)
        self._held = [graph, *(x for x in storages if x is not None and x.device.type == "cuda")]
        self.device, self.launched = device, False
        # An extra reference: not even the end of the interpreter frees what was never launched.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._held))

    def launch(self) -> None:
        """Allow that it is freed, after the first launch."""
        if not self.launched:
            self.launched = True
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(self._held))


def memory_of(
    graph: torch.cuda.CUDAGraph, device: torch.device, made: Iterable[StorageWeakRef]
) -> GraphMemory | None:
    """Return what a capture has allocated, if the graph allocates it itself."""
    return GraphMemory(graph, device, made) if driver_allocates() else None


def shared(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over memory that a graph has made, which no longer keeps it from the pool.

    Graphs that are captured later may use it too. A CPU has no pool.
    """
    keeps = tensor.device.type == "cpu" or driver_allocates()
    return tensor if keeps else unowned(tensor)


def join_frees(index: int, pool: Any) -> None:
    """Order the capture stream after all streams on which the graph frees its memory.

    Torch does that when a capture has ended, which is too late: the driver refuses a capture with
    work that was not joined.
    """
    if not driver_allocates():
        return
    torch._C._cuda_endAllocateToPool(index, pool)
    torch._C._cuda_beginAllocateToPool(index, pool)


class Failures:
    """Record of captures that the driver ended with an error under cudaMallocAsync."""

    def __init__(self) -> None:
        self._any = False

    def note(self) -> None:
        """Record one: later captures may get addresses that torch believes to be in use."""
        self._any = driver_allocates()

    def check(self) -> None:
        """Raise ``GraphError`` if nothing can be captured any more."""
        if self._any:
            raise GraphError(
                "the driver has ended an earlier capture with an error, and torch can't repair its "
                "allocator cudaMallocAsync after that; expected the allocator 'native': start the "
                "program with FLAGS_use_cuda_malloc_async_allocator=0, or correct that capture"
            )


def allocated_bytes(graph: torch.cuda.CUDAGraph) -> int:
    """Return the most bytes that the allocations of a graph hold at once, in capture order."""
    from cuda.bindings import driver

    kinds = driver.CUgraphNodeType
    _, _, count = _checked(driver.cuGraphGetNodes(graph.raw_cuda_graph(), 0))[:3]
    _, nodes, _ = _checked(driver.cuGraphGetNodes(graph.raw_cuda_graph(), count))[:3]
    sizes: dict[int, int] = {}
    held = most = 0
    for node in nodes[:count]:
        kind = _checked(driver.cuGraphNodeGetType(node))[1]
        if kind == kinds.CU_GRAPH_NODE_TYPE_MEM_ALLOC:
            params = _checked(driver.cuGraphMemAllocNodeGetParams(node))[1]
            sizes[int(params.dptr)] = int(params.bytesize)
            held += int(params.bytesize)
        elif kind == kinds.CU_GRAPH_NODE_TYPE_MEM_FREE:
            address = int(_checked(driver.cuGraphMemFreeNodeGetParams(node))[1])
            held -= sizes.pop(address, 0)  # another graph may have allocated it
        most = max(most, held)
    return most


def usage(device: torch.device, captured_bytes: int) -> dict[str, Any]:
    """Return what the graphs of a device hold, and what its allocators have taken in total.

    ``captured_bytes``: what captures have allocated, on a CPU.
    """
    if device.type == "cpu":
        held, total, name = captured_bytes, captured_bytes, "cpu"
    elif driver_allocates():
        held, name = _reserved_by_graphs(device), torch_allocator.MALLOC_ASYNC
        total = torch.cuda.memory_reserved(device) + held
    else:
        held, total = _reserved_in_pools(device), torch.cuda.memory_reserved(device)
        name = str(torch_allocator.current())
    return {"device": str(device), "allocator": name, "graph_bytes": held, "total_bytes": total}


def _reserved_in_pools(device: torch.device) -> int:
    """Return the bytes of torch's private pools, which graphs have."""
    return sum(
        segment["total_size"]
        for segment in torch.cuda.memory_snapshot()  # of all pools: that of one frees its number
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) != (0, 0)
    )


def _reserved_by_graphs(device: torch.device) -> int:
    from cuda.bindings import driver

    attribute = driver.CUgraphMem_attribute.CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT
    _, gpu = _checked(driver.cuDeviceGet(device.index))
    return int(_checked(driver.cuDeviceGetGraphMemAttribute(gpu, attribute))[1])


def _checked(answer: Any) -> Any:
    if int(answer[0]) != 0:
        raise GraphError(f"the driver can't say what graphs allocate: {answer[0]}")
    return answer
