"""Replays after torch has freed the workspaces of cuBLAS, as Inductor has it do.

Run it with python -m; it prints what is right.
"""

from collections.abc import Callable

import torch

from commlib import graph

WIDE = 1 << 14  # summands of a product: cuBLAS cuts such sums, and adds in its workspace
ROWS, SENTINELS, BYTES = 48, 8, 32 << 20  # as large as a workspace


def product(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Return a captured product of matrices."""
    left = torch.randn(ROWS, WIDE, device="cuda", dtype=dtype)
    right = torch.randn(WIDE, ROWS, device="cuda", dtype=dtype)

    @graph.capture
    def call() -> torch.Tensor:
        return left @ right

    return call


def layer(dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Return a captured layer with a bias, forward and backward."""
    linear = torch.nn.Linear(WIDE, ROWS, device="cuda", dtype=dtype)
    x = torch.randn(ROWS, WIDE, device="cuda", dtype=dtype, requires_grad=True)

    @graph.capture
    def call() -> torch.Tensor:
        out = linear(x)
        grads = torch.autograd.grad(out.square().sum(), [x, *linear.parameters()])
        return torch.cat([out.detach().flatten(), *(each.flatten() for each in grads)])

    return call


def sentinel() -> torch.Tensor:
    """Return bytes that nobody else may change."""
    return torch.full((BYTES,), 7, dtype=torch.uint8, device="cuda")


def main() -> None:
    """Capture, free the workspaces, and replay among tensors that take free memory."""
    torch.manual_seed(0)
    dtypes = (torch.float32, torch.bfloat16)
    calls = {
        f"{make.__name__} {dtype}": make(dtype) for make in (product, layer) for dtype in dtypes
    }
    expected = {name: call().clone() for name, call in calls.items()}
    for name, call in calls.items():
        for _ in range(3):
            assert torch.equal(call(), expected[name]), f"{name}, replayed"
    for cause in ("Inductor", "another graph"):
        if cause == "Inductor":
            torch._C._cuda_clearCublasWorkspaces()
        else:
            another = product(torch.float32)
            another()
            another.reset()  # type: ignore[attr-defined]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        sentinels = [
            torch.full((BYTES,), 7, dtype=torch.uint8, device="cuda") for _ in range(SENTINELS)
        ]
        for name, call in calls.items():
            assert torch.equal(call(), expected[name]), f"{name}, after {cause}"
            damaged = sum(int((each != 7).sum()) for each in sentinels)
            assert not damaged, f"{name} has written {damaged} bytes of others, after {cause}"
        print(f"right after {cause}", flush=True)


if __name__ == "__main__":
    main()
