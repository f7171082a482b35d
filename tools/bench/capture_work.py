"""The work that `capture` measures: four kinds, two ways to capture them, and a comparison."""

import gc
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from commlib import CommContext, graph, ops
from commlib.engines.local import flat

EAGER = "eager"
TENSORS, SIDE = 400, 64  # of the update: tensors of a kind, and their rows and columns
MOST = 1.0  # norm of all gradients
KEEP, KEEP_SQUARES, EPS = 0.9, 0.99, 1e-6  # of Adam
LAYERS, FEATURES, BATCH = 8, 256, 8
LARGE_BYTES, COLUMNS = 2**26, 1024
WARM_UPS, CHECKED = 3, 3  # calls before a capture by hand, and those that are compared

Tensor = torch.Tensor
Call = Callable[[], object]


def captured(call: Call) -> graph.CapturedFunction[[], object]:
    """Capture a call by commlib; it has been called once then."""
    function = graph.capture(call)
    function()
    return function


def by_hand(call: Call) -> torch.cuda.CUDAGraph:
    """Capture a call as torch's manual says: warmed up, on a stream and in its own pool."""
    cuda_graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()  # a graph that dies in mid capture would break it
    # Other threads of this process may go on with what a capture forbids.
    with torch.cuda.graph(cuda_graph, stream=stream, capture_error_mode="thread_local"):
        call()
    return cuda_graph


def check(kind: str, results: Mapping[str, Sequence[Tensor]]) -> None:
    """Raise ``AssertionError`` where a way has another result than the eager one, in any bit."""
    for name, actual in results.items():
        pairs = zip(actual, results[EAGER], strict=True)
        if not all(torch.equal(_bits(one), _bits(expected)) for one, expected in pairs):
            raise AssertionError(f"{kind}, {name}: not the bits of the eager calls")


def _bits(x: Tensor) -> Tensor:
    return flat(x.contiguous(), torch.uint8)


class Update:
    """The tensors of an optimizer, and its step, which never waits for the GPU."""

    def __init__(self, ring: CommContext, count: int = TENSORS) -> None:
        self.ring = ring
        many = partial(_empty, count, ring.device)
        self.low, self.weights = many(torch.bfloat16), many(torch.bfloat16)
        self.wide, self.grads = many(torch.float32), many(torch.float32)
        self.means, self.squares = many(torch.float32), many(torch.float32)
        self.master = many(torch.float32)
        self.rate = torch.full((), 1e-3, device=ring.device)
        self.begin()

    def begin(self) -> None:
        """Start again: the same values at every call, other ones on every rank."""
        draw = torch.Generator(self.ring.device).manual_seed(1 + self.ring.rank)
        for tensor in (*self.low, *self.master):
            tensor.normal_(generator=draw)
        torch._foreach_zero_([*self.grads, *self.means, *self.squares])

    def step(self) -> None:
        """Add up, clip by the norm over all ranks, and move the weights."""
        torch._foreach_copy_(self.wide, self.low)
        torch._foreach_add_(self.grads, self.wide)
        norm = ops.all_reduce(torch.stack(torch._foreach_norm(self.grads)).square().sum()).sqrt()
        torch._foreach_mul_(self.grads, torch.clamp(MOST / (norm + EPS), max=1.0))
        torch._foreach_lerp_(self.means, self.grads, 1 - KEEP)
        torch._foreach_mul_(self.squares, KEEP_SQUARES)
        torch._foreach_addcmul_(self.squares, self.grads, self.grads, 1 - KEEP_SQUARES)
        scales = torch._foreach_sqrt(self.squares)
        torch._foreach_add_(scales, EPS)
        moves = torch._foreach_div(self.means, scales)
        torch._foreach_mul_(moves, self.rate)
        torch._foreach_sub_(self.master, moves)
        torch._foreach_copy_(self.weights, self.master)
        torch._foreach_zero_(self.grads)

    def after(self, step: Call) -> list[Tensor]:
        """Return what some steps from the start lead to."""
        self.begin()
        for _ in range(CHECKED):
            step()
        return [x.clone() for x in (*self.weights, *self.master, *self.means, *self.squares)]


def _empty(count: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty(SIDE, SIDE, device=device, dtype=dtype) for _ in range(count)]


class Passes:
    """A module, the same each time, and a pass forward and back through it."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        linear = partial(torch.nn.Linear, FEATURES, FEATURES, device=device)
        layers = (layer for _ in range(LAYERS) for layer in (linear(), torch.nn.ReLU()))
        self.module = torch.nn.Sequential(*layers)
        self.x, self.slope = (torch.randn(BATCH, FEATURES, device=device) for _ in range(2))
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def both(self, forward: Callable[[Tensor], Tensor]) -> Tensor:
        """Go through ``forward``, which is the module in some form, and back."""
        out = forward(self.x)
        out.backward(self.slope)
        return out.detach()

    def after(self, call: Callable[[], Tensor]) -> list[Tensor]:
        """Return the output of some passes and the sum of their gradients."""
        self.module.zero_grad(set_to_none=False)
        outs = [call().clone() for _ in range(CHECKED)]
        return [*outs, *(x.grad.clone() for x in self.module.parameters() if x.grad is not None)]


class Counter:
    """One kernel on a tensor from outside: no argument, no result."""

    def __init__(self, device: torch.device) -> None:
        self.x = torch.zeros(8, device=device)

    def count(self) -> None:
        """Add one."""
        self.x.add_(1)

    def after(self, call: Call) -> list[Tensor]:
        """Return what some calls count to."""
        self.x.zero_()
        for _ in range(CHECKED):
            call()
        return [self.x.clone()]


class Large:
    """A sum over a large tensor, which is made on the way."""

    def __init__(self, device: torch.device, seed: int) -> None:
        draw = torch.Generator(device).manual_seed(seed)
        self.x = torch.randn(COLUMNS, device=device, generator=draw)
        self.out = torch.zeros_like(self.x)
        self.rows = LARGE_BYTES // self.x.nbytes

    def add(self) -> None:
        """Write the sum of all rows."""
        self.out.copy_(self.x.repeat(self.rows, 1).sum(0))
