"""The memory in which cuBLAS works during replays, which nothing else ever gets."""

from typing import Any

import torch

from commlib.torch_allocator import is_native


class BlasWorkspace:
    """Memory for the matrix products of captured graphs.

    Torch gives cuBLAS and cuBLASLt a workspace for each thread and stream at their first product
    there, and a graph keeps its address. If that product is captured, the workspace is memory of
    one graph, which others use too. Torch frees all workspaces when Inductor records one of its
    graphs, and newer torch those of a stream when any graph that was captured there is destroyed.
    Other tensors would then get memory that replays still write to. So the workspaces of the
    capture stream are taken before each capture, from a pool that no other allocation uses. Freed
    memory stays in it, and the next capture takes the same again.

    Replays follow each other, so all graphs of a device share it.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream) -> None:
        """``stream``: the capture stream, on which nothing runs eagerly."""
        self._device, self._stream = device, stream
        self._pool = torch.cuda.MemPool() if is_native() else None
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
            if self._pool is None:  # cudaMallocAsync has no pools
                self._multiply()
                return
            with torch.cuda.use_mem_pool(self._pool, self._device):
                self._multiply()

    def _multiply(self) -> None:
        """Have torch get both workspaces: cuBLASLt's comes with a product that adds a bias."""
        torch.cuda.current_blas_handle()
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            torch.addmm(self._square[0], self._square, self._square)


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
