"""vLLM's custom all-reduce, in ``libvllm.so``."""

import ctypes
from functools import partial

import torch

from commlib.tools.bench.peers.memory import PeerMemory
from commlib.tools.bench.peers.native import ADDRESSES, INT, POINTER, addresses, function, table
from commlib.tools.bench.peers.way import DTYPE, Way

MOST_RANKS = 8
BLOCKS = 36  # vLLM's own limit
ONE_STAGE_BELOW = {4: 2**19, 8: 2**18}  # most ranks -> bytes, vLLM's own rule; 2 ranks: always


class VLLM:
    """The signals and the registered input of one rank."""

    def __init__(self, library: ctypes.CDLL, memory: PeerMemory, most: int) -> None:
        """Set up together with the other ranks, for at most ``most`` bytes."""
        arguments = (INT, POINTER, ADDRESSES, POINTER, INT, ctypes.c_longlong, INT, POINTER)
        self._launch = function(library, "vllm_allreduce", *arguments)
        self._memory = memory
        self._signals = addresses(memory.shared(library["vllm_meta_size"]() + most)[1])
        self._input, inputs = memory.shared(most)
        self._inputs = table(inputs + [0] * (MOST_RANKS - memory.size), memory.device)
        memory.barrier()

    def sums(self, shape: tuple[int, ...]) -> dict[str, Way]:
        """Return the way to add up tensors of ``shape``."""
        memory, count = self._memory, torch.Size(shape).numel()
        x = self._input[: count * DTYPE.itemsize].view(DTYPE).view(shape)
        out = torch.empty_like(x)
        tensors = self._inputs.data_ptr(), self._signals, out.data_ptr()
        stages = _stages(x.nbytes, memory.size)
        call = partial(self._launch, stages, *tensors, memory.rank, count, BLOCKS)
        return {"vLLM": Way(x, lambda: (call(memory.stream()), out)[1])}


def _stages(nbytes: int, ranks: int) -> int:
    limits = (limit for most, limit in ONE_STAGE_BELOW.items() if ranks <= most)
    return 1 if ranks == 2 or nbytes < next(limits) else 2
