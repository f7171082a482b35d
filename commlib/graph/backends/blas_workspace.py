"""The memory in which cuBLAS works during replays, which nothing else ever gets."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from commlib.torch_allocator import is_native


class BlasWorkspace:
    """Memory for the matrix products of captured graphs.

    Torch gives cuBLAS and cuBLASLt a workspace for each thread and stream at their first product
    there, and a graph keeps its address. If that product is captured, the workspace is memory of
    one graph, which others use too. Torch frees all workspaces when Inductor records one of its
    graphs. Newer torch also frees those of a stream when any graph that was captured there is
    destroyed. Other tensors would then get memory that replays still write to. So the workspaces
    of the capture stream are taken before each capture, from pools that no other allocation uses.
    Freed memory stays in them, and the next capture takes the same again.

    Replays follow each other, so all graphs of a device share it.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """``stream``: the capture stream, on which nothing runs eagerly."""
        self._device, self._stream = device, stream
        # One a library, so that none gets memory that graphs use as the other's workspace.
        self._pools = [torch.cuda.MemPool() if is_native() else None for _ in range(2)]
        with torch.inference_mode(False):
            self._leaf = torch.zeros((), device=device, requires_grad=True)
            self._slope = torch.ones((), device=device)
            self._square = torch.zeros(16, 16, device=device)

    def take(self) -> None:
        """Take the workspaces of this thread and of autograd's; no capture may be under way.

        A capture could not create the handles of cuBLAS either.
        """
        self.of_this_thread()
        with torch.inference_mode(False), torch.enable_grad():
            out = _Backward.apply(self._leaf, self)  # type: ignore[no-untyped-call]
            torch.autograd.grad(out, self._leaf, self._slope)

    def of_this_thread(self) -> None:
        """Take the workspaces of the calling thread."""
        with torch.cuda.stream(self._stream):
            self._stream.query()  # makes the context this thread's; cuBLAS warns without one
            with self._from(self._pools[0]):
                torch.cuda.current_blas_handle()
            with self._from(self._pools[1]), torch.no_grad(), torch.autocast("cuda", enabled=False):
                torch.addmm(self._square[0], self._square, self._square)  # cuBLASLt adds the bias

    def _from(self, pool: torch.cuda.MemPool | None) -> AbstractContextManager[None]:
        """Take memory from ``pool``; cudaMallocAsync has no pools."""
        return nullcontext() if pool is None else torch.cuda.use_mem_pool(pool, self._device)


class _Backward(torch.autograd.Function):
    """Takes the workspaces of autograd's thread for the device."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, workspace: BlasWorkspace) -> torch.Tensor:
        ctx.workspace = workspace
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.workspace.of_this_thread()
        return grad, None
