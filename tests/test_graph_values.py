"""Captured functions against eager ones, bit for bit, where torch hides what it does."""

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from commlib import graph, ops
from commlib.errors import GraphError
from tests.support.checks import close, refused, same
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on


def alike(program: Callable[[Callable[..., Any]], list[Any]], what: str) -> None:
    """Raise unless a program gives the same with captured functions as with eager ones.

    ``program`` makes all that it uses, and hands its functions to what it is given.
    """
    wanted = program(lambda fn, **options: fn)
    found = program(graph.capture)
    for i, (one, want) in enumerate(zip(found, wanted, strict=True)):
        if isinstance(want, torch.Tensor):
            close(one, want, f"{what}: number {i}")
        else:
            same(one, want, f"{what}: number {i}")


def on_gpu(comm: Any) -> bool:
    return bool(comm.device.type == "cuda")


# -- what operators write without saying so --------------------------------------------------------


def batch_norms(comm: Any) -> None:
    """Running statistics count each call once, in training, in evaluation, for every shape."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(1)
        norm = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3)).to(comm.device)
        step, found = captured(norm), []
        for turn in range(6):
            norm.train(turn != 4)
            x = torch.randn(4 + turn % 2, 3).to(comm.device).requires_grad_(turn % 3 == 0)
            with torch.set_grad_enabled(turn != 5):
                y = step(x)
                found.append(y.detach().clone())
            if y.requires_grad:
                y.square().sum().backward()
            found += [part.clone() for part in norm.buffers()]
        return found + [part.grad for part in norm.parameters()]

    alike(program, "batch norms")


# -- views -----------------------------------------------------------------------------------------


def views(comm: Any) -> None:
    """A view of an argument is one of this call's, wherever it is; other types are copies."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        base = torch.arange(48.0, device=comm.device)
        table = base.view(6, 8)
        tail, left, turned = (
            captured(fn) for fn in (lambda x: x[1:], lambda x: x[:, :2], lambda x: (x.t(), x + 1))
        )
        found = []
        for start in (0, 3, 9):
            found.append(tail(base[start : start + 4]).clone())
            found.append(left(table[:, start % 2 :: 2]).clone())
            found += [part.clone() for part in turned(table[start % 5 : start % 5 + 2])]
        view = tail(base[5:9])
        view += 100  # reaches the argument
        ints, conjugate, real = (
            captured(fn)
            for fn in (lambda x: x.view(torch.int32), lambda x: x.conj(), lambda x: x.real)
        )
        z = torch.tensor([1 + 2j, 3 - 1j], device=comm.device)
        found += [ints(base[:3]).clone(), conjugate(z).resolve_conj().clone(), real(z).clone()]
        return [*found, base]

    alike(program, "views")


class Reverse(torch.autograd.Function):
    """The identity forward, and the other sign back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return -grad


def gradients_of_views(comm: Any) -> None:
    """A view has the gradient that it has eagerly: none if detached, and not that of its place."""

    reverse: Any = Reverse.apply

    def program(captured: Callable[..., Any]) -> list[Any]:
        fns = (
            lambda x: (x.detach(), x * 2),
            lambda x: (reverse(x), x * 1),
            lambda x: (x[1:].unsqueeze(0), x * 3),
            lambda x: (x.expand(2, 3), x.exp()),
            lambda x: (x.unfold(0, 2, 1), x * x),
            lambda x: ((x * x).conj(), x * 1),
        )
        found = []
        for fn in fns:
            call = captured(fn)
            for turn in range(3):
                x = torch.linspace(turn, turn + 1, 3, device=comm.device).requires_grad_()
                one, other = call(x)
                (one.sum() * 2 + (other * other).sum()).backward()
                found += [one.requires_grad, one.detach().clone(), x.grad]
        return found

    alike(program, "gradients of views")


def same_twice(comm: Any) -> None:
    """What is returned twice is one tensor."""

    @graph.capture
    def call(x: torch.Tensor) -> Any:
        y = x + 1
        return y, y.t(), y

    for turn in range(3):
        one, _, other = call(torch.full((2, 2), float(turn), device=comm.device))
        same(one is other, True, "identity")
        one.mul_(5)
        close(other, torch.full((2, 2), 5.0 * (turn + 1)), "written through the other")


# -- autocast --------------------------------------------------------------------------------------


class Times(torch.autograd.Function):
    """x @ weight, with a backward that autocast would see."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (weight,) = ctx.saved_tensors
        return grad @ weight, None


def autocast(comm: Any) -> None:
    """The caller's autocast is over when operators are replayed, and in a backward after it."""
    kind = comm.device.type

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(2)
        weight = torch.randn(8, 8).to(comm.device).requires_grad_()
        plain = weight.detach().clone()

        def outside(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast(kind, enabled=False):
                return x @ plain

        def twice(x: torch.Tensor) -> torch.Tensor:  # one cast of the weight, used twice
            return torch.nn.functional.gelu(x @ weight) @ weight

        found = []
        times: Any = Times.apply

        for fn in (outside, twice, lambda x: times(x, plain)):
            call = captured(fn)
            for _ in range(3):
                x = torch.randn(4, 8).to(comm.device).requires_grad_()
                with torch.autocast(kind, dtype=torch.bfloat16):
                    y = call(x)
                (y.float() * torch.linspace(0, 1, 8, device=comm.device)).sum().backward()
                found += [y.detach().clone(), x.grad]
            with torch.autocast(kind, dtype=torch.bfloat16):  # also after the forward
                x = torch.randn(4, 8).to(comm.device).requires_grad_()
                (call(x).float() * torch.linspace(0, 1, 8, device=comm.device)).sum().backward()
            found.append(x.grad)
            found.append(None if weight.grad is None else weight.grad.clone())
        return found

    alike(program, "autocast")


# -- gradients -------------------------------------------------------------------------------------


def hooks(comm: Any) -> None:
    """Hooks of leaves run once a backward, with what they make of the gradient."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        weight = torch.ones(2, device=comm.device, requires_grad=True)
        runs: list[int] = []

        def double(grad: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return grad * 2

        weight.register_hook(double)
        call = captured(lambda x: weight * x)
        for turn in range(3):
            call(torch.full((2,), turn + 1.0, device=comm.device)).sum().backward()
        return [weight.grad, len(runs)]

    alike(program, "hooks")


def some_outputs(comm: Any) -> None:
    """Where only some outputs go back, the others give nothing: no zeros, and no NaN from them."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(3)
        one, two = (nn.Linear(3, 3).to(comm.device) for _ in range(2))
        weights = [*one.parameters(), *two.parameters()]

        def step(x: torch.Tensor) -> Any:
            h = one(x).tanh()
            return h.exp(), two(h), (h * 0).sqrt(), torch.dropout(h, 0.5, True)

        call, optimizer = captured(step), torch.optim.SGD(weights, 0.1, momentum=0.9)
        ways = [(0,), (1,), (0, 1), (1,), (0,), (3,), (0, 1)]
        found: list[Any] = []
        for way in ways:
            x = torch.randn(2, 3).to(comm.device).requires_grad_()
            outs = call(x)
            optimizer.zero_grad()
            torch.stack([outs[i].sum() for i in way]).sum().backward()
            if way != (3,):  # the mask is drawn otherwise on a GPU
                found += [x.grad, *(weight.grad for weight in weights)]
            found = [None if part is None else part.clone() for part in found]
            optimizer.step() if way != (3,) else None
        return found

    alike(program, "some outputs")


def unfrozen(comm: Any) -> None:
    """Parameters that want a gradient at one call and not at another."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(4)
        module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(comm.device)
        call, found = captured(module), []
        for turn in range(4):
            module[0].requires_grad_(turn % 2 == 1)
            call(torch.full((1, 2), turn + 1.0, device=comm.device)).sum().backward()
            grads = [weight.grad for weight in module.parameters()]
            found += [None if grad is None else grad.clone() for grad in grads]
        return found

    alike(program, "frozen and not")


def tied(comm: Any) -> None:
    """What is computed outside and wants a gradient is refused however it is read."""
    weight = torch.ones(2, device=comm.device, requires_grad=True)
    other = torch.ones(2, device=comm.device, requires_grad=True)
    x, outside = torch.ones(2, device=comm.device), torch.zeros(2, device=comm.device)
    computed = weight * 2
    plain = computed.detach()
    for fn in (lambda x: plain * x + computed * x * other, lambda x: plain * x + computed * x):
        with refused(GraphError, "wants a gradient", "detach"):
            graph.capture(fn)(x)
    part = torch.zeros(2, 2, device=comm.device)[0]
    for target in (outside, part):
        with refused(GraphError, "is written with", "detach"):
            graph.capture(lambda x, target=target: target.copy_(x * weight))(x)
        same(target.tolist(), [0.0, 0.0], "as before")
    same(outside.requires_grad, False, "no part of the graph")


def written_between(comm: Any) -> None:
    """What a backward needs and somebody has written to since is refused, as in eager code."""
    x = torch.ones(2, device=comm.device, requires_grad=True)
    weight = torch.ones(2, device=comm.device, requires_grad=True)
    shift = torch.ones(2, device=comm.device, requires_grad=True)
    times, plus, power = (
        graph.capture(fn) for fn in (lambda x: x * weight, lambda x: x + shift, lambda x: x.exp())
    )
    x.grad = torch.zeros(2, device=comm.device)
    for call in (times, plus, power):
        call(x)
    for turn in range(3):
        y, z, w = times(x), plus(x), power(x)
        with torch.no_grad():
            weight.add_(1)
            shift.add_(1)  # a sum needs nothing
            w.zero_()
        for out in (y, w):
            with refused(GraphError, "modified in place"):
                out.sum().backward()
        z.sum().backward()
        close(x.grad, torch.full((2,), turn + 1.0), f"turn {turn}")
    times(x).sum().backward()
    close(x.grad, torch.full((2,), 7.0), "the next call")


def written_in_passing(comm: Any) -> None:
    """Also where nobody holds what was written to; what a hook reads is as it is then."""
    weight = torch.ones(4, device=comm.device, requires_grad=True)
    power = graph.capture(lambda x: torch.sigmoid(x * weight))
    power(torch.ones(4, device=comm.device))
    for _ in range(3):  # two that are verified, and one that is not
        with refused(GraphError, "modified in place"):
            power(torch.ones(4, device=comm.device)).mul_(3).sum().backward()

    def program(captured: Callable[..., Any]) -> list[Any]:
        scale = torch.ones((), device=comm.device)
        weight = torch.ones(3, device=comm.device, requires_grad=True)

        def scaled(x: torch.Tensor) -> torch.Tensor:
            y = x * weight
            y.register_hook(lambda grad: grad * scale)
            return y * 2

        call = captured(scaled)
        for _ in range(3):
            y = call(torch.ones(3, device=comm.device))
            scale.add_(1)
            y.sum().backward()
        return [weight.grad]

    alike(program, "a hook that reads")


def inference(comm: Any) -> None:
    """Outputs of inference mode have no versions."""
    for outputs in ("borrow", "copy"):
        call = graph.capture(lambda x: x * 2, outputs=outputs)
        with torch.inference_mode():
            for turn in range(3):
                x = torch.full((3,), float(turn), device=comm.device)
                close(call(x), x * 2, f"turn {turn}, {outputs}")


def freed(comm: Any) -> None:
    """A captured function keeps no gradient of an argument alive."""
    x = torch.ones(3, device=comm.device, requires_grad=True)
    x.grad = torch.ones(3, device=comm.device)
    call = graph.capture(lambda x: x * 2)
    call(x).sum().backward()
    held = weakref.ref(x.grad)
    x.grad = None
    same(held(), None, "the gradient")


def own_grad(comm: Any) -> None:
    """Whether an argument has a gradient can be asked; its values would be another tensor's."""
    ask = graph.capture(lambda x: x * 2 if x.grad is None else x * 3)
    read = graph.capture(lambda x: x * 2 if x.grad is None else x * x.grad)
    x = torch.ones(2, device=comm.device, requires_grad=True)
    close(ask(x), torch.full((2,), 2.0), "without")
    x.grad = torch.ones(2, device=comm.device)
    close(ask(x), torch.full((2,), 3.0), "with")
    with refused(GraphError, "reads .grad of argument tensor 0"):
        read(x)


# -- state -----------------------------------------------------------------------------------------


def seeds(comm: Any) -> None:
    """A function that sets a generator is refused, wherever it does so; what it was stays."""

    @contextmanager
    def forked() -> Iterator[None]:
        with torch.random.fork_rng(devices=[comm.device] if on_gpu(comm) else []):
            yield

    def first(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + torch.rand_like(x)

    def last(x: torch.Tensor) -> torch.Tensor:
        y = x + torch.rand_like(x)
        torch.manual_seed(3)
        return y

    def inside(x: torch.Tensor) -> torch.Tensor:
        with forked():
            return x + torch.rand_like(x)

    own = torch.Generator(comm.device)

    def again(x: torch.Tensor) -> torch.Tensor:  # as the program has just done
        torch.manual_seed(8)
        return x + torch.rand_like(x)

    def of_its_own(x: torch.Tensor) -> torch.Tensor:
        own.manual_seed(8)
        return x + torch.rand(3, generator=own, device=x.device)

    def made(x: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator(x.device).manual_seed(8)
        return x + torch.rand(3, generator=generator, device=x.device)

    x = torch.zeros(3, device=comm.device)
    for fn in (first, last, inside, again, of_its_own, made):
        torch.manual_seed(8)
        want = torch.rand_like(x)
        torch.manual_seed(8)
        with refused(GraphError, "sets a generator"):
            graph.capture(fn)(x)
        close(torch.rand_like(x), want, "drawn after")
    draw: Any = graph.eager(lambda x: x + torch.rand_like(x))

    def between(x: torch.Tensor) -> torch.Tensor:
        return torch.dropout(draw(torch.dropout(x + 1, 0.5, True)), 0.5, True)

    drawing = graph.capture(between, outputs="copy")
    same(tuple(drawing(x).shape), (3,), "drawn where no operator shows it")


def rebound(comm: Any) -> None:
    """State under a name that each call binds again can't be replayed; a table that is kept can."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = torch.zeros(1, device=comm.device)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = self.count + x
            return self.count * 1

    class Table(nn.Module):
        table: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.table is None:
                self.table = torch.arange(3.0, device=x.device)
            return x + self.table

    with refused(GraphError, "state = state +", "add_"):
        graph.capture(Counter())(torch.ones(1, device=comm.device))
    with refused(GraphError, "state = state +"):
        graph.capture(Counter(), first="warmup")(torch.ones(1, device=comm.device))
    call = graph.capture(Table(), warmup=3)
    for turn in range(3):
        x = torch.full((3,), float(turn), device=comm.device)
        close(call(x), x + torch.arange(3.0, device=comm.device), f"turn {turn}")


def shared(comm: Any) -> None:
    """An argument in memory that the function uses without being given it: right, or refused."""
    buffer = torch.arange(5.0, device=comm.device)

    def write(x: torch.Tensor) -> torch.Tensor:
        buffer.add_(1)
        return x * 2

    def read(x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return buffer * 2

    for fn in (write, read):
        call = graph.capture(fn, outputs="copy")
        for start in (0, 1, 2):
            before = buffer.clone()
            want = fn(buffer[start : start + 2]).clone()
            behind = buffer.clone()
            buffer.copy_(before)
            try:
                close(call(buffer[start : start + 2]), want, f"{fn.__name__} at {start}")
                close(buffer, behind, f"{fn.__name__} at {start}: the buffer")
            except GraphError as error:
                same("without receiving it" in str(error), True, str(error))
                break
    table = torch.zeros(2, 4, device=comm.device)
    call = graph.capture(lambda x: x + table[1].add_(1), outputs="copy")
    for turn in range(3):  # another place of the same memory
        close(call(table[0]), torch.full((4,), turn + 1.0), f"during, turn {turn}")


def containers(comm: Any) -> None:
    x = torch.ones(1, device=comm.device)

    def put(found: dict[str, torch.Tensor]) -> None:
        found["y"] = found["x"] * 2

    def append(found: list[torch.Tensor]) -> None:
        found.append(found[0] * 2)

    arguments: list[tuple[Any, Any]] = [(put, {"x": x}), (append, [x])]
    for fn, given in arguments:
        with refused(GraphError, "changes a list or dict"):
            graph.capture(fn)(given)
        same(len(given), 1, "as before")


# -- arguments and outputs -------------------------------------------------------------------------


def strides(comm: Any) -> None:
    """Arguments keep their strides: an order of summing, and a branch, may depend on them."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(5)
        table = torch.randn(64, 200).to(comm.device)
        call = captured(lambda x: (x.sum(), x.stride()[0] * (x * 2)))
        found = []
        for start in range(3):
            given = [
                table[:, start::2][:, :90],
                table[:, start],
                table[start].expand(7, 200),
                table.t()[start : start + 9],
                table.view(-1)[start : start + 90].unfold(0, 10, 3),
                table[start:start],
            ]
            found += [part.clone() for x in given for part in call(x)]
        return found

    alike(program, "strides")


class Cache:
    """An object of a program, as caches of transformers are: rows of tensors, and numbers."""

    def __init__(self, rows: list[Any], count: int) -> None:
        self.rows, self.count = rows, count
        self.settings = SETTINGS


SETTINGS = SimpleNamespace(size=3)


def objects(comm: Any) -> None:
    """An object around tensors is a new one at each replay, as the function makes it."""
    y = torch.zeros(2, device=comm.device)
    outside = SimpleNamespace(y=y)

    def program(captured: Callable[..., Any]) -> list[Any]:
        weight = torch.ones(2, device=comm.device, requires_grad=True)

        def step(x: torch.Tensor) -> Any:
            cache = Cache([SimpleNamespace(key=x * weight, value=y), {"more": (x + 1, y)}], 2)
            return {"cache": cache, "total": cache.rows[0].key.sum()}

        call, found = captured(step), list[Any]()
        for turn in range(4):
            out = call(torch.full((2,), turn + 1.0, device=comm.device))
            cache = out["cache"]
            same((type(cache), cache.count, cache.settings is SETTINGS), (Cache, 2, True))
            same(cache.rows[0].value is y, True, "a tensor from outside")
            cache.rows.append(turn)  # no part of the next one
            same(len(cache.rows), 3, "rows")
            cache.rows[0].key.square().sum().backward()
            found += [cache.rows[0].key, cache.rows[1]["more"][0], out["total"], weight.grad]
            found = [x.detach().clone() for x in found]
            weight.grad = None
        return found

    alike(program, "objects")
    kept = graph.capture(lambda x: (outside, x * 2))
    for _ in range(3):
        same(kept(y)[0] is outside, True, "an object from outside")


def hiding(comm: Any) -> None:
    """What no replay could fill again is refused."""

    def run(x: torch.Tensor) -> Any:
        yield x * 2

    def round_about(x: torch.Tensor) -> Any:
        found = SimpleNamespace(y=x * 2)
        found.itself = found
        return found

    x = torch.ones(2, device=comm.device)
    with refused(GraphError, "holds itself"):
        graph.capture(round_about)(x)
    for fn in (lambda x: [{"y": {(x * 2, 1)}}], run):
        with refused(GraphError, "register_pytree_node"):
            graph.capture(fn)(x)


def own_operators(comm: Any) -> None:
    """Losses and embeddings that look at labels leave that out in a capture, on a CPU too."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(4)
        weight = torch.randn(8, 4).to(comm.device)

        def step(ids: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> Any:
            rows = ops.vocab_parallel_embedding(ids, weight, 8 * comm.rank, vocab_size=16)
            return rows, ops.softmax_with_cross_entropy(logits, labels)

        call, found = captured(step), list[Any]()
        for turn in range(4):
            ids = torch.arange(5, device=comm.device) * (turn + 1) % 16
            logits = torch.linspace(turn, 1, 40).view(5, 8).to(comm.device)
            found += [x.clone() for x in call(ids, logits, ids.view(5, 1))]
        return found

    alike(program, "own operators")


def keys(comm: Any) -> None:
    """Values that compare as equal, and act otherwise, are other kinds of calls."""
    x = torch.ones(1, device=comm.device)
    sign = graph.capture(lambda x, c: x * math.copysign(1, c.imag))
    same([float(sign(x, c)) for c in (0j, complex(0, -0.0), 0j)], [1.0, -1.0, 1.0], "complex")
    other = graph.capture(lambda x, c: x * math.copysign(1, c))
    found = [float(other(x, c)) for c in (np.float32(0), np.float32(-0.0))]
    same(found, [1.0, -1.0], "numpy")
    mode: Any = 1
    by_key = graph.capture(lambda x: x * (2 if mode is True else 3), key=lambda x: (mode,))
    first = float(by_key(x))
    mode = True
    same((first, float(by_key(x))), (3.0, 2.0), "key=")
    drop: Any = nn.Dropout(0.5)
    as_argument = graph.capture(lambda module, x: module(x) * 1)
    as_method = graph.capture(drop.forward)
    ones = torch.ones(64, device=comm.device)
    calls: list[Callable[[], Any]] = [lambda: as_argument(drop, ones), lambda: as_method(ones)]
    for call in calls:
        drop.train()
        same(bool((call() == 0).any()), True, "training")
        drop.eval()
        close(call(), ones, "evaluation")
    typed = graph.capture(lambda x: torch.full((2,), 1.5, device=x.device))
    before = torch.get_default_dtype()
    try:
        dtypes = [typed(x).dtype]
        torch.set_default_dtype(torch.float64)
        dtypes.append(typed(x).dtype)
    finally:
        torch.set_default_dtype(before)
    same(dtypes, [torch.float32, torch.float64], "default dtype")


def reads(comm: Any) -> None:
    """On a CPU values can be read past torch's operators."""
    x = torch.ones(2, device=comm.device)
    ways: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x * sum(x.tolist()),
        lambda x: x * float(x.cpu().numpy()[0]),
        lambda x: x * float(np.asarray(x.cpu())[0]),
        lambda x: x + torch.from_dlpack(x.cpu()).sum(),
    ]
    for way in ways:
        with refused(GraphError, "can't stand in a graph"):
            graph.capture(way)(x)


def eager_parts(comm: Any) -> None:
    """An eager part that returns something else than at the capture is reported."""
    total: Any = graph.eager(lambda x: sum(x.tolist()))
    pick: Any = graph.eager(lambda x: x[x > 1])
    x = torch.tensor([2.0, 3.0, 0.0], device=comm.device)
    times = graph.capture(lambda x: x * total(x), outputs="copy")
    some = graph.capture(lambda x: pick(x).sum(), outputs="copy")
    close(times(x), x * 5, "a value")
    close(times(x.flip(0)), x.flip(0) * 5, "the same one")
    with refused(GraphError, "an eager part", "key="):
        times(x + 1)
    same([float(some(x)), float(some(x.flip(0)))], [5.0, 5.0], "a shape")
    with refused(GraphError, "an eager part"):
        some(x + 2)


def shapes(comm: Any) -> None:
    """Indices that are not masks are fine, and so are own tensors that get another shape."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        rows = torch.tensor([2, 0], device=comm.device)
        index = captured(lambda x: (x[rows], x[[1, 0]] if not on_gpu(comm) else x + 1))

        def reshaped(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            y.unsqueeze_(0)
            return (y.squeeze_(0).t_() + 1).unsqueeze_(2)

        call = captured(reshaped)
        tables = [torch.arange(6.0, device=comm.device).view(3, 2) + turn for turn in range(3)]
        found = [part.clone() for x in tables for part in index(x)]
        return found + [call(x).clone() for x in tables]

    alike(program, "shapes")
    x = torch.ones(3, device=comm.device)
    with refused(GraphError, "unsqueeze_", "from outside"):
        graph.capture(lambda x: x.unsqueeze_(0) * 2)(x)
    same(tuple(x.shape), (3,), "as before")


CASES = (
    batch_norms, views, gradients_of_views, same_twice, autocast, hooks, some_outputs,
    unfrozen, tied, written_between, written_in_passing, inference, freed, own_grad, seeds,
    rebound, shared, containers, strides, objects, hiding, own_operators, keys, reads,
    eager_parts, shapes,
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_values(unified_ranks: Ranks, case: Callable[[Any], None]) -> None:
    unified_ranks(case)


@runs_on("cpu_ranks")
def test_literals(comm: Any) -> None:
    """A tensor that is written down in a function is new at each call, on a CPU."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        def step(x: torch.Tensor) -> Any:
            total, other = torch.tensor([0.0, 1.0]), x.new_tensor([2.0, 3.0])
            total += x
            other *= x
            return total * 1, other + 0

        call = captured(step)
        return [part.clone() for _ in range(3) for part in call(torch.full((2,), 2.0))]

    alike(program, "literals")
    array = np.zeros(2, np.float32)
    with refused(GraphError, "writes to an array"):
        graph.capture(lambda x: torch.as_tensor(np.zeros(2, np.float32)).add_(x))(torch.ones(2))
    read = graph.capture(lambda x: x + torch.from_numpy(array))
    for turn in range(3):
        array += 1
        close(read(torch.ones(2)), torch.full((2,), turn + 2.0), "an array that is read")


@runs_on("gpu_ranks")
def test_literals_on_a_gpu(comm: Any) -> None:
    """A tensor that is written down in a function is new at each call, on a GPU too."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        def step(x: torch.Tensor) -> Any:
            total, other = torch.tensor([0.0, 1.0], device=x.device), x.new_tensor([2.0, 3.0])
            total += x
            other *= x
            return total * 1, other + torch.ones(2).to(x.device), x.copy_(torch.full((2,), 2.0))

        call = captured(step)
        x = torch.full((2,), 2.0, device=comm.device)
        return [part.clone() for _ in range(3) for part in call(x)]

    alike(program, "literals")


@runs_on("cpu_ranks")
def test_recurrent(comm: Any) -> None:
    """On the CPU alone: cuDNN's own kernels are not business of the recording engine."""

    def program(captured: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(6)
        module = nn.LSTM(3, 4)
        call, found = captured(module), []
        for _ in range(3):
            x = torch.randn(5, 2, 3)
            y, (h, c) = call(x)
            (y.sum() + h.sum() * 2 + c.sum()).backward()
            found += [y.detach().clone(), h.detach().clone(), c.detach().clone()]
        return found + [weight.grad for weight in module.parameters()]

    alike(program, "LSTM")


@runs_on("unified_ranks")
def test_one_hot(comm: Any) -> None:
    """one_hot with a number of classes, whose check of the values is a part of each call."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot(x, 4) * 2

    g = graph.capture(f, outputs="copy")
    for turn in range(4):
        x = torch.tensor([[turn, 1], [2, 3 - turn]], device=comm.device)
        same(torch.equal(g(x), f(x)), True, f"turn {turn}")
    same(graph.report(g)[0]["replays"], 3, "replays")
    if not on_gpu(comm):
        with refused(RuntimeError, "out of bounds"):
            g(torch.tensor([[1, 1], [4, 1]]))


@runs_on("unified_ranks")
def test_arguments_that_are_made_to_want_a_gradient(comm: Any) -> None:
    """A function that makes an argument want a gradient is refused, or eager at every call."""

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.requires_grad_() * 2).detach()

    def given(turn: int) -> torch.Tensor:
        return torch.full((3,), float(turn), device=comm.device)

    with refused(GraphError, "sets requires_grad of tensor 0 of its arguments to True"):
        graph.capture(f)(given(1))
    g = graph.capture(f, on_fail="eager")
    for turn in range(4):
        x = given(turn)
        close(g(x), given(turn) * 2, f"turn {turn}")
        same(x.requires_grad, True, "the argument")
    same((len(g.entries), len(graph.report(g))), (0, 2), "graphs, and kinds that stay eager")
