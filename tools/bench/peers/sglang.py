"""SGLang's custom all-reduce, in ``libsgl.so``: one-shot and two-shot, by push and by pull."""

import ctypes
from functools import partial

import torch

from commlib.tools.bench.peers.memory import PeerMemory
from commlib.tools.bench.peers.native import (
    ADDRESSES,
    INT,
    POINTER,
    SIZE,
    UINT,
    addresses,
    function,
    table,
)
from commlib.tools.bench.peers.way import DTYPE, Way

PLANE = 2**24  # bytes of SGLang's default workspace slot
PULL_BLOCKS, SEMAPHORE_BYTES = 64, 128
SHOTS = {"one-shot": 0, "two-shot": 1}

Tensor = torch.Tensor


class SGLang:
    """The workspaces of one rank."""

    def __init__(self, library: ctypes.CDLL, memory: PeerMemory, most: int) -> None:
        """Set up together with the other ranks, for at most ``most`` bytes."""
        push = (INT, POINTER, POINTER, SIZE, UINT, ADDRESSES, POINTER, UINT, UINT, POINTER)
        pull = (INT, POINTER, POINTER, SIZE, UINT, ADDRESSES, ADDRESSES, POINTER, UINT, POINTER)
        self._push = function(library, "sgl_push", *push)
        self._pull = function(library, "sgl_pull", *pull)
        self._memory, self._planes = memory, {}
        for slot in sorted({min(PLANE, most), most}):  # the larger only for what does not fit
            _, mapped = memory.shared(2 * memory.size * slot)
            counter = torch.zeros(memory.processors, dtype=torch.int32, device=memory.device)
            self._planes[slot] = addresses(mapped), counter
        self._semaphores = addresses(memory.shared(PULL_BLOCKS * SEMAPHORE_BYTES)[1])
        self._input, inputs = memory.shared(most)
        self._inputs = table(inputs, memory.device)
        self._staging = addresses(memory.shared(most)[1])  # an argument; not used with a table
        memory.barrier()

    def sums(self, shape: tuple[int, ...]) -> dict[str, Way]:
        """Return the ways to add up tensors of ``shape``."""
        pushes = {f"SGLang {shot} push": self._by_push(two, shape) for shot, two in SHOTS.items()}
        pulls = {f"SGLang {shot} pull": self._by_pull(two, shape) for shot, two in SHOTS.items()}
        return pushes | pulls

    def _by_push(self, two: int, shape: tuple[int, ...]) -> Way:
        memory = self._memory
        x, out = (torch.empty(shape, dtype=DTYPE, device=memory.device) for _ in range(2))
        parts = -(-x.nbytes // (16 * memory.size))
        need = 32 * parts if two else x.nbytes
        slot = min(size for size in self._planes if size >= need)
        workspaces, counter = self._planes[slot]
        tensors = x.data_ptr(), out.data_ptr(), x.nbytes, memory.rank
        rest = workspaces, counter.data_ptr(), slot, memory.processors
        call = partial(self._push, two, *tensors, *rest)
        return Way(x, lambda: (call(memory.stream()), out)[1])

    def _by_pull(self, two: int, shape: tuple[int, ...]) -> Way:
        """Read the peers' registered inputs, as SGLang does in graphs; two-shot is in place."""
        memory, count = self._memory, torch.Size(shape).numel()
        x = self._input[: count * DTYPE.itemsize].view(DTYPE).view(shape)
        out = x if two else torch.empty_like(x)
        tensors = x.data_ptr(), out.data_ptr(), x.nbytes, memory.rank
        rest = self._staging, self._semaphores, self._inputs.data_ptr(), PULL_BLOCKS
        call = partial(self._pull, two, *tensors, *rest)
        return Way(x, lambda: (call(memory.stream()), out)[1])
