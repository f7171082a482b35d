"""FlashInfer's all-reduce fusion, in ``libfi.so``: a sum, or a sum with residual and RMS norm."""

import ctypes
from collections.abc import Iterator
from functools import partial

import torch

from commlib.tools.bench.peers.memory import PeerMemory
from commlib.tools.bench.peers.native import INT, POINTER, function, table
from commlib.tools.bench.peers.way import DTYPE, Way

WIDTH = 8192  # of the rows that a flat tensor is passed as
FLAGS_BYTES = 256 * 4  # per rank
BUFFERS = 3  # that Lamport kernels rotate through
NOT_WRITTEN = -(2**15)  # -0.0 in bfloat16: what Lamport kernels wait to see replaced
HOW = {"one-shot": (1, 1), "one-shot, early trigger": (1, 0), "two-shot": (0, 1)}
PDL, FLOAT32_SUMS = 1, 1

Tensor = torch.Tensor


class FlashInfer:
    """The workspace of one rank."""

    def __init__(self, library: ctypes.CDLL, memory: PeerMemory, most: int) -> None:
        """Set up together with the other ranks, for at most ``most`` bytes."""
        numbers = (INT, INT, INT, POINTER, INT, INT, INT, INT, POINTER)
        pointers = (POINTER,) * 6
        arguments = (INT, *pointers, ctypes.c_float, *numbers)
        self._launch = function(library, "fi_allreduce", *arguments)
        self._memory, area = memory, memory.size * most
        _, buffers = memory.shared(area)
        _, flags = memory.shared(memory.size * FLAGS_BYTES)
        lamport, lamports = memory.shared(BUFFERS * area)
        lamport.view(torch.int16).fill_(NOT_WRITTEN)
        counters = [0, 0, 0, area, 0]  # flags, then the size of a Lamport buffer
        self._state = torch.tensor(counters, dtype=torch.int32, device=memory.device)
        places = (*buffers, *flags, *lamports, self._state.data_ptr())
        self._workspace = table(places, memory.device)
        memory.barrier()

    def sums(self, shape: tuple[int, ...]) -> dict[str, Way]:
        """Return the ways to add up tensors of ``shape``."""
        count = torch.Size(shape).numel()
        width = min(count, WIDTH)
        return {
            f"FlashInfer {name}": self._sum(shape, count // width, width, *args)
            for name, args in self._ways(count // width)
        }

    def norms(self, residual: Tensor, weight: Tensor, eps: float) -> dict[str, Way]:
        """Return the ways to add up, add ``residual`` and normalise each row."""
        return {
            f"FlashInfer {name}, fused": self._norm(residual, weight, eps, *args)
            for name, args in self._ways(len(residual))
        }

    def _ways(self, tokens: int) -> Iterator[tuple[str, tuple[int, int]]]:
        for name, (one_shot, at_end) in HOW.items():
            if one_shot or tokens > self._memory.size:  # FlashInfer's own rule
                yield name, (one_shot, at_end)

    def _sum(self, shape: tuple[int, ...], tokens: int, width: int, *how: int) -> Way:
        x, out = (torch.empty(shape, dtype=DTYPE, device=self._memory.device) for _ in range(2))
        call = self._call(0, (x, out, None, None, None, None), 0.0, tokens, width, *how)
        return Way(x, lambda: (call(self._memory.stream()), out)[1])

    def _norm(self, residual: Tensor, weight: Tensor, eps: float, *how: int) -> Way:
        x, total, out = (torch.empty_like(residual) for _ in range(3))
        tensors = x, None, residual, total, out, weight
        call = self._call(1, tensors, eps, *residual.shape, *how)
        return Way(x, lambda: (call(self._memory.stream()), (out, total))[1])

    def _call(
        self, norm: int, tensors: tuple[Tensor | None, ...], eps: float, *numbers: int
    ) -> "partial[None]":
        """Return the launch without its stream; ``tensors`` must outlive it."""
        tokens, width, one_shot, at_end = numbers
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        rows = eps, self._memory.rank, tokens, width, self._workspace.data_ptr()
        return partial(self._launch, norm, *pointers, *rows, PDL, one_shot, at_end, FLOAT32_SUMS)
