"""Hazards of graphs: one test per row of docs/graph_hazards.md that test_graph.py lacks.

Most rows show on a CPU, whose engine has a graph's stale addresses and baked branches. What only
streams, allocators and drivers do is asked where the ranks have GPUs.
"""

import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import commlib
from commlib import graph, ops
from commlib.compat import deepspeed
from commlib.errors import CommError, CommTimeout
from commlib.graph import GraphError
from commlib.graph.segments import Segments, making
from tests.support.checks import close, refused, same, settle
from tests.support.processes import run
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on
from tests.test_graph import on_gpu, whole

WAIT_S = 20  # for another thread; it is there at once
LATE_S = 2  # the deadline of a ring whose member does not come


def ring_of(comm: Any, ring_id: int, **more: Any) -> Any:
    """Return a fresh ring of the same ranks; it is closed after the test."""
    return commlib.new_ring(ring_id, range(comm.size), **more)


def in_capture() -> bool:
    """Whether the function is being captured, and not run before it."""
    return isinstance(making(), Segments)


# -- S: silent wrong numbers -----------------------------------------------------------------------


@runs_on("unified_ranks")
def test_outputs_that_outlive_the_graph(comm: Any) -> None:
    """An output that is held longer than its graph is right, or raises (S2, S4)."""
    x = torch.ones(1000, device=comm.device)
    held = graph.capture(lambda x: x + 1)(x)
    gc.collect()
    junk = [torch.full((1000,), 7.0, device=comm.device) for _ in range(50)]
    try:
        given = held.clone()
    except RuntimeError as error:
        same("graph" in str(error), True, str(error))
    else:
        close(given, x + 1, "after the end of its graph")
    del junk


@runs_on("unified_ranks")
def test_gradients_are_not_aliased(comm: Any) -> None:
    """Two backwards give their own gradients, to be added up by the program (S5)."""
    weight = torch.linspace(-1, 1, 6, device=comm.device, requires_grad=True)
    plain = [torch.linspace(turn, 2, 6, device=comm.device) for turn in range(4)]

    def both(call: Any) -> list[torch.Tensor]:
        total = [torch.zeros(6, device=comm.device) for _ in range(2)]
        kept: list[torch.Tensor] = []
        for value in plain:
            x = value.clone().requires_grad_()
            found = torch.autograd.grad(call(x).sum(), [x, weight])
            kept += found
            if len(kept) == 2:
                total = list(found)  # the first pair itself becomes the sum, as .grad does
            else:
                for one, more in zip(total, found, strict=True):
                    one.add_(more)
        return [*total, *kept[2:]]

    f = graph.capture(lambda x: torch.sin(x * weight) * x)
    for turn, (one, want) in enumerate(zip(both(f), both(f.fn), strict=True)):
        close(one, want, f"tensor {turn}")
    same(len(next(iter(f.entries.values())).parts), 1, "slots")


@runs_on("unified_ranks")
def test_plain_values_are_keys(comm: Any) -> None:
    """A flag, an int and a float are distinguished, also where they compare equal (S6, S7)."""

    def f(x: torch.Tensor, how: Any) -> torch.Tensor:
        if how is True:
            return -x
        if isinstance(how, float):
            return x / how
        return x + how if isinstance(how, int) else x.clone()

    g = graph.capture(f, outputs="copy")
    given = [True, 1, 1.0, 0, False, 2.0, None, "label"]
    for turn in range(3):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        for how in given:
            close(g(x, how), f(x, how), f"{how!r}, turn {turn}")
    same(len(g.entries), len(given), "kinds of calls")


@runs_on("unified_ranks")
def test_signed_zeros_are_keys(comm: Any) -> None:
    """0.0 and -0.0 compare equal and divide differently (S7)."""
    g = graph.capture(lambda x, by: x / by, outputs="copy")
    x = torch.ones(2, device=comm.device)
    for by in (0.0, -0.0, 0.0):
        close(g(x, by), x / by, f"by {by}")


@runs_on("unified_ranks")
def test_modes_are_keys(comm: Any) -> None:
    """Grad mode, autocast, its dtype, and ``key=`` for what the arguments do not show (S6)."""
    weight = torch.linspace(-1, 1, 16, device=comm.device).view(4, 4)
    doubled = [False]

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x @ weight
        y = y + 1 if torch.is_grad_enabled() else y
        return y * 2 if doubled[0] else y

    g = graph.capture(f, outputs="copy", key=lambda x: doubled[0])
    x = torch.linspace(0, 1, 8, device=comm.device).view(2, 4)
    for turn in range(2):
        for doubled[0] in (False, True):
            close(g(x), f(x), f"plain, turn {turn}")
            with torch.no_grad():
                close(g(x), f(x), f"no_grad, turn {turn}")
            for dtype in (torch.bfloat16, torch.float16):
                with torch.autocast(comm.device.type, dtype):
                    given = g(x)
                    same(given.dtype, dtype, "of autocast")
                    close(given, f(x), f"autocast to {dtype}, turn {turn}")
    same(len(g.entries), 8, "kinds of calls")


@runs_on("unified_ranks")
def test_autocast_around_a_capture(comm: Any) -> None:
    """Autocast keeps its copies of weights to itself: a replay reads the weights of now (S6)."""
    torch.manual_seed(4)
    module = torch.nn.Linear(4, 4).to(comm.device)
    g = graph.capture(module, outputs="copy")
    x = torch.linspace(0, 1, 8, device=comm.device).view(2, 4)
    for turn in range(3):
        with torch.autocast(comm.device.type, torch.bfloat16):
            given = g(x)
        with torch.autocast(comm.device.type, torch.bfloat16):
            close(given, module(x), f"turn {turn}")
        with torch.no_grad():
            module.weight.mul_(2)


@runs_on("unified_ranks")
def test_training_flag_of_a_part(comm: Any) -> None:
    """The training flag of a part of the module counts as that of the whole does (S6)."""
    module = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout(1.0)).to(comm.device)
    g = graph.capture(module, outputs="copy")
    x = torch.ones(8, device=comm.device)
    close(g(x), torch.zeros(8), "drops all")
    module[1].eval()
    close(g(x), torch.ones(8), "drops nothing")
    module[1].train()
    close(g(x), torch.zeros(8), "drops all again")


@runs_on("unified_ranks")
def test_ranks_with_different_keys(comm: Any) -> None:
    """Ranks whose calls have other keys: well with the same collectives, else refused (S11)."""
    g = graph.capture(lambda x, scale: ops.all_reduce(x * scale), outputs="copy")
    for turn in range(3):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        close(g(x, comm.rank + 1), x * 3, f"turn {turn}")  # 1 + 2
    ring = ring_of(comm, 90)

    @graph.capture
    def other(x: torch.Tensor, op: str) -> Any:
        y = comm.all_reduce(torch.zeros_like(x), x)
        return ring.all_reduce(torch.zeros_like(y), y, op=op)

    x = torch.ones(3, device=comm.device)
    mine, theirs = ("max", "sum") if comm.rank else ("sum", "max")
    with refused(GraphError, "ring 90", "number 0", "rank 0", "rank 1", "test_graph_hazards.py"):
        other(x, mine)
    same(len(other.entries), 0, "graphs")
    settle(comm)
    with refused(GraphError, "different collectives"):
        other(x, theirs)
    close(other(x, "max"), torch.full((3,), 2.0), "the next capture")
    settle(comm)


@pytest.mark.parametrize("size", [5, 30_000, 400_000])
@runs_on("unified_ranks")
def test_reset_between_replays(comm: Any, size: int) -> None:
    """ring.reset() between replays resets the ring's channels; its graphs stay right (S12)."""
    ring = ring_of(comm, 90)
    g = graph.capture(lambda x: ring.all_reduce(torch.zeros_like(x), x), outputs="copy")
    for turn in range(6):
        x = torch.full((size,), turn + comm.rank + 1.0, device=comm.device)
        close(g(x), torch.full((size,), 2 * turn + 3.0), f"turn {turn}")
        if turn % 2:
            ring.reset()
    ring.check()


@runs_on("unified_ranks")
def test_outputs_from_outside(comm: Any) -> None:
    """What the graph has not made is returned as it is, and no replay ends its life (S13)."""
    table = torch.arange(6.0, device=comm.device)

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        return [table, table[2:4], x[1:], x + table[:3]]

    g = graph.capture(f)
    x = torch.ones(3, device=comm.device)
    whole_table, part, view, _ = g(x)
    same(whole_table is table, True, "the table itself")
    for turn in range(3):
        table.add_(1)
        g(torch.full((3,), float(turn), device=comm.device))
        close(whole_table, torch.arange(6.0) + turn + 1, "still to be read")
        close(part, torch.arange(2.0, 4.0) + turn + 1, "a view of it")
        close(view, torch.ones(2), "a view of the caller's own")
    g.reset()
    gc.collect()
    close(part, torch.arange(2.0, 4.0) + 3, "after the graph")


OPTIMIZERS: dict[str, Callable[[list[torch.Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, capturable=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, capturable=True, foreach=True),
}


def optimizers(comm: Any, kind: str, how: str) -> None:
    """State that an optimizer makes at its first step counts once, or the capture says why (S14).

    ``how``: "lazy" captures the first step, which is refused where it makes state; "kept" lets the
    run before the capture be the first step; "stepped" takes an eager step before.
    """
    start = [torch.linspace(-1, i + 1, 4, device=comm.device) for i in range(3)]

    def train(captured: bool) -> list[torch.Tensor]:
        weights = [x.clone().requires_grad_() for x in start]
        for weight in weights:
            weight.grad = torch.zeros_like(weight)
        optimizer = OPTIMIZERS[kind](weights)

        def step() -> None:
            for weight in weights:
                assert weight.grad is not None
                weight.grad.copy_(torch.cos(weight.detach()))
            optimizer.step()

        steps = 5
        if how == "stepped":
            step()
            steps -= 1
        call: Callable[[], object] = step
        if captured:
            more: Any = {"first": "warmup", "warmup": 1} if how == "kept" else {}
            call = graph.capture(step, **more)
        for _ in range(steps):
            call()
        return [weight.detach() for weight in weights]

    plain = train(captured=False)
    for i, given in enumerate(train(captured=True)):
        close(given, plain[i], f"weight {i}")


@pytest.mark.parametrize("how", ["lazy", "kept", "stepped"])
@pytest.mark.parametrize("kind", ["sgd", "momentum"])
def test_optimizers(unified_ranks: Ranks, kind: str, how: str) -> None:
    unified_ranks(optimizers, kind, how)


@pytest.mark.parametrize("how", ["lazy", "kept", "stepped"])
@pytest.mark.parametrize("kind", ["rmsprop", "adam"])
def test_optimizers_that_count(gpu_ranks: Ranks, kind: str, how: str) -> None:
    """On a CPU torch reads their step counters on the host."""
    gpu_ranks(optimizers, kind, how)


NOTHING: dict[str, Callable[[torch.Tensor], Any]] = {
    "no work": lambda x: None,
    "the argument": lambda x: x,
    "a view": lambda x: x.view(2, 2),
    "memory": lambda x: torch.empty_like(x).shape,
}


@pytest.mark.parametrize("what", NOTHING)
@runs_on("unified_ranks")
def test_functions_without_kernels(comm: Any, what: str) -> None:
    """A function without any kernel is not a failed capture (S15)."""
    f = NOTHING[what]
    g = graph.capture(f)
    for turn in range(3):
        x = torch.full((4,), float(turn), device=comm.device)
        given, want = g(x), f(x)
        if isinstance(want, torch.Tensor):
            close(given, want, f"turn {turn}")
        else:
            same(given, want, f"turn {turn}")


@runs_on("unified_ranks")
def test_unfenced_collectives(comm: Any) -> None:
    """A raw collective on the comm stream is part of the graph all the same (S16)."""
    out = torch.zeros(4, device=comm.device)

    @graph.capture
    def f(x: torch.Tensor) -> None:
        comm.all_reduce(out, x, use_calc_stream=False, fenced=False)

    for turn in range(4):
        x = torch.full((4,), turn + 1.0, device=comm.device)
        settle(comm)  # an eager call reads it on the comm stream, and nothing orders that
        f(x)
        settle(comm)
        close(out, torch.full((4,), 2 * (turn + 1.0)), f"turn {turn}")
    same([len(row["collectives"]) for row in graph.report(f)], [1])


# -- C: a crash or an error at the capture ---------------------------------------------------------

COPIES: dict[str, tuple[Callable[[torch.Tensor], Any], tuple[str, ...]]] = {
    "cpu": (lambda x: x.cpu(), ("can't stand in a graph", "host waits")),
    "numpy": (lambda x: x.cpu().numpy(), ("can't stand in a graph", "host waits")),
    "list": (lambda x: x.tolist(), ()),
    # no operator of torch shows this: the driver refuses it
    "print": (lambda x: repr(x), ("capturing failed", "test_graph_hazards.py:")),
}


@pytest.mark.parametrize("what", COPIES)
@runs_on("gpu_ranks")
def test_copies_to_the_host(comm: Any, what: str) -> None:
    """Copies between host and GPU for which the host waits; the process stays whole (C1)."""
    f, words = COPIES[what]
    x = torch.ones(4, device=comm.device)
    with refused(GraphError, *words):
        graph.capture(f)(x)
    whole(comm)
    pinned = torch.ones(4).pin_memory()
    g = graph.capture(lambda x: x + pinned.to(x.device, non_blocking=True), outputs="copy")
    for turn in range(3):
        pinned.fill_(turn)
        close(g(x), torch.full((4,), turn + 1.0), "from pinned memory")
        torch.cuda.synchronize()


@runs_on("unified_ranks")
def test_first_uses(comm: Any) -> None:
    """Libraries and verbs that this process, or this ring, has not used before (C2, C8)."""
    ring = ring_of(comm, 90)

    def f(x: torch.Tensor) -> list[torch.Tensor]:
        found = [
            torch.fft.rfft(x).real,
            torch.nn.functional.conv2d(x.view(1, 1, 24, 35), x[:, :9].view(-1, 1, 3, 3)),
            torch.linalg.solve(torch.eye(24, device=x.device) * 2, x)
            if not on_gpu(comm)  # on a GPU its check of the result waits
            else x @ x.T,
            x.sort(dim=0).values,
            torch.cumsum(x, 0),
        ]
        for count in (10, 100_000, 5_000_000) if on_gpu(comm) else (10, 1000):
            y = x.new_full((count,), ring.rank + 1.0)
            for stream in (True, False):
                how: Any = {"use_calc_stream": stream}
                found.append(ring.all_reduce(torch.empty_like(y), y, **how))
                found.append(ring.all_gather(y.new_empty(count * ring.size), y, **how))
                found.append(ring.reduce_scatter(y.new_empty(count // ring.size), y, **how))
                found.append(ring.all_to_all(torch.empty_like(y), y, **how))
                found.append(ring.broadcast(torch.empty_like(y), y, root=1, **how))
        with ring.group():
            ring.send(y, peer=1 - ring.rank)
            found.append(ring.recv(torch.empty_like(y), peer=1 - ring.rank))
        ring.barrier()
        return found

    g = graph.capture(f, outputs="copy")
    for turn in range(2):
        x = torch.linspace(turn, 1, 840, device=comm.device).view(24, 35)
        given = g(x)
        for i, (one, want) in enumerate(zip(given, f(x), strict=True)):
            close(one, want, f"tensor {i}, turn {turn}")


@runs_on("unified_ranks")
def test_work_from_before(comm: Any) -> None:
    """A Work from before the capture is waited for in the function, or refused cleanly (C3)."""
    x = torch.full((4,), comm.rank + 1.0, device=comm.device)
    work = ops.all_gather(x, use_calc_stream=False, sync_op=False)
    g = graph.capture(lambda: work.wait() * 2, outputs="copy")
    wanted = torch.tensor([2.0] * 4 + [4.0] * 4)
    try:
        for _ in range(3):
            close(g(), wanted, "waited for inside")
    except GraphError:
        same(on_gpu(comm), True, "refused on a GPU alone")
        whole(comm)
    close(work.wait() * 2, wanted, "outside")
    work.wait()
    h = graph.capture(lambda: work.result * 2, outputs="copy")
    for _ in range(3):
        close(h(), wanted, "waited for before")


@pytest.mark.parametrize("inside", [False, True])
@runs_on("unified_ranks")
def test_stale_autograd_nodes(comm: Any, inside: bool) -> None:
    """Autograd nodes of an eager forward that is still held know another stream (C4)."""
    torch.manual_seed(6)
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    module.to(comm.device)
    x = torch.linspace(-1, 1, 12, device=comm.device).view(3, 4)
    module(x).sum().backward()
    held = module(x)  # its nodes live on, and with them those of the parameters
    module.zero_grad(set_to_none=False)

    def backward() -> None:
        module(x).square().sum().backward()

    def step(call: Any) -> None:
        if inside:
            call()
        else:
            call(x).square().sum().backward()

    captured = graph.capture(backward if inside else module)
    if on_gpu(comm) and not hasattr(torch.autograd.graph, "set_override_stale_capture_stream"):
        with refused(GraphError, "autograd node", "default stream", "delete that forward"):
            step(captured)
        whole(comm)
        held = torch.zeros(1, requires_grad=True)  # and the nodes are gone
    found = []
    for call in (captured, backward if inside else module):
        module.zero_grad(set_to_none=False)
        for _ in range(3):
            step(call)
        found.append([torch.clone(parameter.grad) for parameter in module.parameters()])
    for one, want in zip(*found, strict=True):
        close(one, want)
    held.sum().backward()
    settle(comm)


@pytest.mark.parametrize("held", [False, True])
@runs_on("unified_ranks")
def test_work_that_nobody_waits_for(comm: Any, held: bool) -> None:
    """Collectives on the comm stream that nobody waits for: joined, and undone, as any (C5, S8)."""
    out, seen = torch.zeros(4, device=comm.device), torch.zeros(4, device=comm.device)
    works: list[Any] = []
    keep = works.append  # a list that the function can reach would be put back

    @graph.capture
    def f(x: torch.Tensor) -> None:
        seen.add_(out)  # what the last call has left, 0 at the first
        out.zero_()
        if comm.rank == 1:
            if on_gpu(comm):
                torch.cuda._sleep(20_000_000)
            else:
                time.sleep(0.1)  # the others have to come back to this collective
        work = comm.all_reduce(out, x, use_calc_stream=False, sync_op=False)
        if held and not in_capture():
            keep(work)

    total = 0.0
    x = torch.ones(4, device=comm.device)
    for turn in range(4):
        x.fill_(turn + 1.0)
        f(x)
        close(seen, torch.full((4,), total), f"turn {turn}, before")
        close(out, torch.full((4,), 2 * (turn + 1.0)), f"turn {turn}, after")
        total += 2 * (turn + 1.0)
    settle(comm)


@pytest.mark.parametrize("how", ["cycle", "last reference"])
@runs_on("unified_ranks")
def test_graphs_that_die_in_a_capture(comm: Any, how: str) -> None:
    """A graph that becomes garbage while another one is captured does not end the capture (C6)."""
    x = torch.ones(1000, device=comm.device)
    held: list[Any] = []
    for _ in range(3):
        cycle: dict[str, Any] = {"graph": graph.capture(lambda x: x * 3 + 1)}
        cycle["self"] = cycle if how == "cycle" else None
        cycle["out"] = cycle["graph"](x)
        held.append(cycle)
    del cycle
    gone = [weakref.ref(one["graph"]) for one in held]
    alive: list[int] = []
    clear, note = held.clear, alive.append  # what lists hold would be put back after a capture

    def f(x: torch.Tensor) -> torch.Tensor:
        if in_capture():
            clear()
            rubbish: list[Any] = [[[]] for _ in range(20_000)]  # enough for every generation
            note(sum(one() is not None for one in gone))
            del rubbish
        return x * 2

    g = graph.capture(f, outputs="copy")
    for turn in range(3):
        close(g(x + turn), (x + turn) * 2, f"turn {turn}")
    if on_gpu(comm) and how == "cycle":
        same(alive[0], 3, "graphs that the capture leaves alone")
    gc.collect()
    same([one() for one in gone], [None] * 3, "all gone")
    whole(comm)


class Helper:
    """A thread that does one piece of work on request."""

    def __init__(self, comm: Any, work: Callable[[], None]) -> None:
        self._comm, self._work = comm, work
        self._go, self._done = threading.Event(), threading.Event()
        self.problem: BaseException | None = None
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            if self._go.wait(WAIT_S):
                if on_gpu(self._comm):
                    torch.cuda.set_device(self._comm.device)
                self._work()
        except BaseException as error:
            self.problem = error
        finally:
            self._done.set()

    def act(self) -> None:
        """Let it work, and wait until it has."""
        self._go.set()
        same(self._done.wait(WAIT_S), True, "the thread has finished")

    def raise_problem(self) -> None:
        """Raise what went wrong in the thread."""
        if self.problem is not None:
            raise self.problem


@runs_on("unified_ranks")
def test_tensors_of_another_thread(comm: Any) -> None:
    """What another thread computes, pins and waits for while a capture goes on is its own (C7)."""
    theirs = torch.full((5,), 2.0, device=comm.device)

    def work() -> None:
        y = torch.ones(3_000_000 + comm.rank).mul_(2)  # no cached memory is as large
        if on_gpu(comm):
            y = y.pin_memory().to(comm.device, non_blocking=True)
            torch.cuda.current_stream().record_event().synchronize()
        theirs.mul_(2)
        same(float(y.sum()), 6_000_000.0 + 2 * comm.rank)

    helper = Helper(comm, work)

    def f(x: torch.Tensor) -> torch.Tensor:
        y = ops.all_reduce(x)
        if in_capture():
            helper.act()
        twice: torch.Tensor = ops.all_reduce(y * 2)
        return twice

    g = graph.capture(f, outputs="copy")
    for turn in range(4):
        x = torch.full((3,), turn + 1.0, device=comm.device)
        close(g(x), x * 8, f"turn {turn}")
    helper.raise_problem()
    settle(comm)
    close(theirs, torch.full((5,), 4.0), "what the thread has done, once")


@runs_on("gpu_ranks")
def test_captures_from_any_stream(comm: Any) -> None:
    """A capture begins on any current stream, which stays the current one (C9)."""
    default, side = torch.cuda.default_stream(), torch.cuda.Stream()
    for stream in (default, side, torch.cuda.Stream(priority=-1)):
        g = graph.capture(lambda x: ops.all_reduce(x * 2) + 1, outputs="copy")
        for turn in range(3):
            stream.wait_stream(default)
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)  # what the capture reads is not there yet
                x = torch.full((1000,), turn + 1.0, device=comm.device)
                given = g(x)
                same(torch.cuda.current_stream(), stream, "the current stream")
            default.wait_stream(stream)
            close(given, x * 4 + 1, f"turn {turn}")
        with torch.cuda.stream(default):  # and is replayed on another one
            close(g(x), x * 4 + 1, "on the default stream")
    whole(comm)


@runs_on("unified_ranks")
def test_conditional_nodes(comm: Any) -> None:
    """torch.cond, in which no collective may stand, is refused by name (C10)."""

    def f(x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda x: ops.all_reduce(x), lambda x: x * 2, (x,))

    with refused((GraphError, NotImplementedError), "cond"):
        graph.capture(f)(torch.ones(3, device=comm.device))
    whole(comm)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
@runs_on("unified_ranks")
def test_hooks_that_read_values(comm: Any, kind: str) -> None:
    """A module's hook that reads a value is named by operator and line (C11)."""
    module = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(comm.device)
    seen: list[float] = []

    def look(_: object, tensors: Any, *more: object) -> None:
        tensor = tensors[0] if isinstance(tensors, tuple) else tensors
        seen.append(tensor.sum().item())

    line = f"{__file__}:{look.__code__.co_firstlineno + 2}"
    remove = getattr(module[1], f"register_{kind}_hook")(look).remove
    x = torch.ones(2, 3, device=comm.device)
    g = graph.capture(module, outputs="copy")
    with refused(GraphError, "item can't stand in a graph", line):
        g(x)
    same(seen, [], "what it has read")
    whole(comm)
    remove()
    for turn in range(3):
        close(g(x + turn), module(x + turn), f"turn {turn} without the hook")


def two_threads(comm: Any, what: str) -> None:
    """Two threads capture at once, each its own function (C12)."""
    rings = [ring_of(comm, 90 + i) for i in range(2)]
    meet = threading.Barrier(2)
    found: list[Any] = [None, None]

    def one(i: int) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            if in_capture() and not on_gpu(comm):  # on a GPU the second one waits for the first
                meet.wait(WAIT_S)
            y = x * (i + 2)
            return rings[i].all_reduce(torch.empty_like(y), y) if what == "collectives" else y + 1

        g = graph.capture(f, outputs="copy")
        if on_gpu(comm):
            torch.cuda.set_device(comm.device)
        meet.wait(WAIT_S)
        for turn in range(5):
            x = torch.full((100,), turn + 1.0, device=comm.device)
            want = x * (i + 2) * 2 if what == "collectives" else x * (i + 2) + 1
            close(g(x), want, f"thread {i}, turn {turn}")
        same([len(row["collectives"]) for row in graph.report(g)], [int(what == "collectives")])

    def guarded(i: int) -> None:
        try:
            one(i)
        except BaseException as error:
            found[i] = error
            meet.abort()

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    same([thread.is_alive() for thread in threads], [False] * 2, "threads that hang")
    same(found, [None, None], "what went wrong")
    whole(comm)


def test_two_threads_capture(unified_ranks: Ranks) -> None:
    unified_ranks(two_threads, "tensors")


def test_two_threads_capture_collectives(cpu_ranks: Ranks) -> None:
    """On a GPU these would be two orders of two rings on one stream (D3)."""
    cpu_ranks(two_threads, "collectives")


# -- D: several ranks ------------------------------------------------------------------------------


@runs_on("unified_ranks")
def test_one_rank_captures_alone(comm: Any) -> None:
    """A rank that captures while the other one replays learns which rank is late (D1)."""
    ring = ring_of(comm, 90, timeout=LATE_S)

    def f(x: torch.Tensor, scale: float) -> Any:
        return ring.all_reduce(torch.zeros_like(x), x * scale)

    g = graph.capture(f, outputs="copy", verify=False)
    x = torch.ones(4, device=comm.device)
    for _ in range(2):
        close(g(x, 1.0), torch.full((4,), 2.0), "together")
    settle(comm)
    comm.exchange([])
    if comm.rank == 1:
        with refused((CommTimeout, CommError), "ring 90"):
            g(x, 2.0)
        same(ring.report()["state"] == "ready", False, "the ring has failed")
    else:
        g(x, 1.0)
    comm.exchange([])
    commlib.CommContextManager.instance().close(90, abort=True)
    settle(comm)
    same(len(g.entries), 0, "graphs of the ring")
    h = graph.capture(lambda x: ops.all_reduce(x) * 2, outputs="copy")
    close(h(x), torch.full((4,), 4.0), "another ring")


def of_two_rings(comm: Any) -> tuple[list[Any], list[Any]]:
    """Return two rings and a captured function over each."""
    rings = [ring_of(comm, 90 + i) for i in range(2)]
    return rings, [
        graph.capture(lambda x, ring=ring: ring.all_reduce(torch.zeros_like(x), x), outputs="copy")
        for ring in rings
    ]


@runs_on("unified_ranks")
def test_replays_of_two_rings(comm: Any) -> None:
    """Graphs of two rings are replayed in turn (D3)."""
    _, graphs = of_two_rings(comm)
    x = torch.ones(100, device=comm.device)
    for turn in range(8):
        close(graphs[turn % 2](x + turn), (x + turn) * 2, f"turn {turn}")


@runs_on("gpu_ranks")
def test_replays_of_two_rings_on_streams(comm: Any) -> None:
    """The same from two streams, whose order is another one on each rank."""
    rings, graphs = of_two_rings(comm)
    x = torch.ones(100_000, device=comm.device)
    for g in graphs:
        close(g(x), x * 2)
    streams, found = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for turn in range(20):
        for i, (g, stream) in enumerate(zip(graphs, streams, strict=True)):
            with torch.cuda.stream(stream):
                if (turn + i) % 2 == comm.rank:
                    torch.cuda._sleep(2_000_000)
                found.append(g(x))
    torch.cuda.synchronize()
    for one in found:
        same(one.unique().tolist(), [2.0], "sums")
    for ring in rings:
        ring.check()


@runs_on("crowd")
def test_sends_in_a_circle(comm: Any) -> None:
    """Everybody sends to the next and to the one before, over one ring, as in a pipeline (D4)."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size

    @graph.capture(outputs="copy")
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ahead, back = torch.zeros_like(x), torch.zeros_like(x)
        with comm.group():
            comm.send(x * 2, peer=after)
            comm.recv(ahead, peer=before)
            comm.send(x * 3, peer=before)
            comm.recv(back, peer=after)
        return ahead + 1, back + 1

    for turn in range(4):
        x = torch.full((2000,), comm.rank + turn * 10.0, device=comm.device)
        ahead, back = f(x)
        close(ahead, torch.full((2000,), (before + turn * 10.0) * 2 + 1), f"ahead, turn {turn}")
        close(back, torch.full((2000,), (after + turn * 10.0) * 3 + 1), f"back, turn {turn}")


@pytest.mark.parametrize("abort", [False, True])
@runs_on("unified_ranks")
def test_ring_ends_before_its_graphs(comm: Any, abort: bool) -> None:
    """A ring ends before its graphs, in mid use: graphs of all kinds go with it (D5)."""
    manager = commlib.CommContextManager.instance()
    ring = ring_of(comm, 90)
    weight = torch.ones(4, device=comm.device, requires_grad=True)

    def f(x: torch.Tensor) -> Any:
        y = x.detach() * 1
        return ring.all_reduce(torch.zeros_like(y), y) * weight

    both = graph.capture(lambda x: ops.all_reduce(ring.all_reduce(torch.zeros_like(x), x)))
    trained = graph.capture(f)
    x = torch.ones(4, device=comm.device)
    close(both(x), torch.full((4,), 4.0), "over two rings")
    out = trained(x)
    out.sum().backward()
    close(weight.grad, torch.full((4,), 2.0), "with gradients")
    pending = trained(x).sum()
    settle(comm)
    comm.exchange([])
    manager.close(90, abort=abort)
    same([len(both.entries), len(trained.entries)], [0, 0], "graphs left")
    with refused(GraphError, "released"):
        pending.backward()
    for g in (both, trained):
        with refused(CommError, "aborted" if abort else "closed"):
            g(x)
    whole(comm)
    del out, pending
    ring = ring_of(comm, 90)
    close(both(x), torch.full((4,), 4.0), "captured again over the next ring")
    manager.close(90, abort=abort)
    del both, trained
    gc.collect()


def segments() -> None:
    """Replay collectives of all sizes in memory that torch's allocator maps piece by piece."""
    comm = commlib.init()
    for count in (100, 100_000, 20_000_000 if on_gpu(comm) else 1000):
        g = graph.capture(lambda x: ops.all_reduce(x * 2) + 1, outputs="copy")
        rest = []
        for turn in range(4):
            x = torch.full((count,), turn + 1.0, device=comm.device)
            assert g(x).unique().tolist() == [(turn + 1.0) * 2 * comm.size + 1]
            rest.append(x)  # the next one is elsewhere, in memory that was just mapped
        del rest
        if on_gpu(comm):
            torch.cuda.empty_cache()
            assert g(x).unique().tolist() == [8.0 * comm.size + 1]
    if comm.rank == 0:
        print("right")


@pytest.mark.gpu
def test_expandable_segments() -> None:
    """Graphs with NCCL's registration, under expandable segments (D7)."""
    code, out, err = run(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "tests.test_graph_hazards"),
        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True",
        FLAGS_dynamic_static_unified_comm="1",
    )
    assert code == 0, err
    assert out == "right\n"


@runs_on("unified_ranks")
def test_eager_calls_between_replays(comm: Any) -> None:
    """Eager calls of a ring between replays that hold calls of it (D8)."""
    for count in (7, 16_000_000 if on_gpu(comm) else 1000):
        g = graph.capture(lambda x: ops.all_reduce(x + 1), outputs="copy")
        x = torch.zeros(count, device=comm.device)
        for turn in range(8):
            x.fill_(turn)
            given = g(x)
            eager = ops.all_reduce(x * 2)
            apart = ops.all_reduce(x * 3, use_calc_stream=False)
            once_more = g(x)
            for one, want in ((given, turn + 1), (eager, turn * 2), (apart, turn * 3)):
                close(one[:5], torch.full((5,), 2.0 * want), f"turn {turn}")
                same(bool((one == one[0]).all()), True, f"turn {turn}")
            close(once_more[-5:], torch.full((5,), 2.0 * (turn + 1)), f"turn {turn}")


@runs_on("unified_ranks")
def test_threads_share_a_rank(comm: Any) -> None:
    """A process is one rank: its threads share rings and graphs (D9)."""
    g = graph.capture(lambda x: ops.all_reduce(x) * 3, outputs="copy")
    found: list[torch.Tensor] = []
    x = torch.ones(5, device=comm.device)

    def work() -> None:
        same(commlib.comm() is comm, True, "the ring of the process")
        for turn in range(3):
            found.append(g(x * (turn + 1)))
        settle(comm)

    helper = Helper(comm, work)
    settle(comm)
    helper.act()  # captured there
    helper.raise_problem()
    found.append(g(x * 4))  # and replayed here
    for turn, one in enumerate(found):
        close(one, torch.full((5,), 6.0 * (turn + 1)), f"turn {turn}")
    same(len(g.entries), 1, "graphs")


@runs_on("gpu_ranks")
def test_priority_of_the_comm_stream(comm: Any) -> None:
    """Collectives on the comm stream go before other work, in a graph too (D10)."""
    least, greatest = torch.cuda.Stream.priority_range()
    same(greatest < least, True, "a device with priorities")
    for ring in (comm, ring_of(comm, 90)):
        same(ring.stream.priority, greatest, f"priority of ring {ring.ring_id}")


@runs_on("gpu_ranks")
def test_a_capture_that_begins_late(comm: Any) -> None:
    """What torch writes when a capture begins comes late: the replay after it draws right."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(*args: Any, **kwargs: Any) -> None:
        torch.cuda._sleep(1_000_000_000)  # longer than the capture takes
        begin(*args, **kwargs)

    def eager(x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(2_000_000_000)  # the numbers are drawn after the late begin
        return torch.nn.functional.dropout(x)

    x = torch.ones(1000, device=comm.device)
    captured: Callable[..., Any] = graph.capture(eager, verify=False, outputs="copy")
    drawn: list[list[torch.Tensor]] = [[], []]
    with mock.patch.object(torch.cuda.CUDAGraph, "capture_begin", late):
        for found, call in zip(drawn, (captured, eager), strict=True):
            torch.manual_seed(5)
            for _ in range(3):
                x = x.clone()  # the second call captures again, with memory of the graph's own
                found.append(call(x))
    for turn, (one, want) in enumerate(zip(*drawn, strict=True)):
        close(one, want, f"call {turn}")


@runs_on("gpu_ranks")
def test_many_pools(comm: Any) -> None:
    """Torch numbers pools; numbers above 256 are objects, which torch's snapshot gives up."""
    for _ in range(300):
        torch.cuda.graph_pool_handle()
    for turn in range(10):
        module = torch.nn.Linear(4, 4).to(comm.device)
        captured, x = graph.capture(module), torch.ones(2, 4, device=comm.device)
        for _ in range(3):
            captured(x).sum().backward()
        found = torch.clone(module.weight.grad)
        module.zero_grad()
        for _ in range(3):
            module(x).sum().backward()
        close(found, module.weight.grad, f"pool {turn}")
    numbers = [torch.cuda.graph_pool_handle()[1] for _ in range(3)]
    same(numbers, [numbers[0], numbers[0] + 1, numbers[0] + 2], "numbers of pools")


# -- the programs that the rows come from ----------------------------------------------------------

WIDTH, ROWS, RATE = 8, 6, 0.05


class Sharded:
    """A layer whose weight is spread over the ranks, and a tensor-parallel pair after it."""

    def __init__(self, comm: Any, ring: Any) -> None:
        draw = torch.Generator().manual_seed(11)

        def shared(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=draw) * 0.3

        flat, up, down = shared(WIDTH * WIDTH), shared(WIDTH, 2 * WIDTH), shared(2 * WIDTH, WIDTH)
        part = slice(comm.rank * WIDTH, (comm.rank + 1) * WIDTH)
        self.ring = ring
        self.shard = flat.chunk(comm.size)[comm.rank].clone().to(comm.device)
        self.up, self.down = up[:, part].to(comm.device), down[part].clone().to(comm.device)
        self.dropped = torch.Generator(device=comm.device).manual_seed(5 + comm.rank)
        self.steps = torch.zeros((), dtype=torch.int64, device=comm.device)

    def step(self, x: torch.Tensor, target: torch.Tensor, rate: float) -> Any:
        """Gather, go forward and back, scatter the gradient, update the shard; returns the loss."""
        ring = self.ring
        full = ring.all_gather(self.shard.new_empty(WIDTH * WIDTH), self.shard)
        leaves = [full.view(WIDTH, WIDTH), self.up, self.down]
        weight, up, down = leaves = [one.detach().requires_grad_() for one in leaves]
        kept = torch.empty_like(x).bernoulli_(0.9, generator=self.dropped)
        hidden = ops.identity(torch.tanh(x @ weight) * kept, ring.ring_id)
        partial = torch.relu(hidden @ up) @ down
        y = ops.all_reduce(partial, ring.ring_id, backward="identity")
        loss = (y - target).square().mean()
        grads = torch.autograd.grad(loss, leaves)
        with torch.no_grad():
            mean = ring.reduce_scatter(
                torch.empty_like(self.shard), grads[0].reshape(-1).contiguous()
            )
            self.shard.sub_(mean, alpha=rate / ring.size)
            self.up.sub_(grads[1], alpha=rate)
            self.down.sub_(grads[2], alpha=rate)
            self.steps.add_(1)
        return loss.detach()


@runs_on("unified_ranks")
def test_a_sharded_step(comm: Any) -> None:
    """Sharded data parallel and tensor parallel as one captured step, bit for bit as eager."""
    manager = commlib.CommContextManager.instance()
    ring = ring_of(comm, 90)
    draw = torch.Generator().manual_seed(3 + comm.rank)
    x, target = (torch.zeros(ROWS, WIDTH, device=comm.device) for _ in range(2))
    plain, captured = Sharded(comm, ring), Sharded(comm, ring)
    step = graph.capture(captured.step, outputs="copy")
    losses = []
    for turn in range(4):
        x.copy_(torch.randn(ROWS, WIDTH, generator=draw))
        target.copy_(torch.randn(ROWS, WIDTH, generator=draw))
        close(step(x, target, RATE), plain.step(x, target, RATE), f"loss of step {turn}")
        for name in ("shard", "up", "down", "steps"):
            close(getattr(captured, name), getattr(plain, name), f"{name}, step {turn}")
        same(
            captured.dropped.get_state().tolist() == plain.dropped.get_state().tolist(),
            True,
            f"random numbers, step {turn}",
        )
        losses.append(captured.shard.tolist())
    same(len({tuple(one) for one in losses}), 4, "updates")
    (row,) = graph.report(step)
    arguments = 0 if on_gpu(comm) else x.nbytes + target.nbytes  # a CPU always copies these
    same(row["bytes_copied"], arguments, "bytes copied: no parameters")
    same([text.split()[0] for text in row["collectives"]],
         ["all_gather", "all_reduce", "all_reduce", "reduce_scatter"])  # fmt: skip
    close(step(x, target, 0.0), plain.step(x, target, 0.0), "another rate is another graph")
    same(len(step.entries), 2, "kinds of calls")
    manager.close(90)  # before its graphs, on purpose
    same(len(step.entries), 0, "graphs left")
    with refused(CommError, "closed"):
        step(x, target, RATE)


@runs_on("unified_ranks")
def test_deepspeed_clip(comm: Any) -> None:
    """DeepSpeed's norm and clip: the coefficient stays on the device, lists may change."""

    def clip(tensors: list[torch.Tensor], most: float) -> Any:
        def clip_tensors(tensors: list[torch.Tensor], most: float) -> Any:
            squares = torch.stack([t.square().sum() for t in tensors]).sum()
            norm = ops.all_reduce(squares).sqrt()
            factor = torch.clamp(most / (norm + 1e-6), max=1.0)
            for t in tensors:
                t.mul_(factor)
            return norm

        return deepspeed.graph_process(True, clip_tensors, tensors, most)

    for length in (2, 5, 2):
        for most in (1.0, 100.0):
            for turn in range(5):
                tensors = [
                    torch.full((3,), turn + i + 1.0, device=comm.device) for i in range(length)
                ]
                want = torch.cat(tensors * comm.size).norm()
                factor = torch.clamp(most / (want + 1e-6), max=1.0)
                after = [t * factor for t in tensors]
                close(clip(tensors, most), want, "norm", atol=1e-4)
                for t, expected in zip(tensors, after, strict=True):
                    close(t, expected, f"clipped, turn {turn}", atol=1e-5)
    deepspeed.graph_clear()


@runs_on("unified_ranks")
def test_deepspeed_numbers_in_closures(comm: Any) -> None:
    """A number that the function's closure holds may change between calls."""
    total = torch.zeros(3, device=comm.device)
    value, want, places = 0.0, 0.0, set()

    def add_value() -> None:
        total.add_(value)

    for turn in range(6):
        drawn = [turn * 100.0 + i for i in range(1000)]
        value = next((one for one in drawn if id(one) in places), drawn[0])  # where one was before
        places.add(id(value))
        del drawn
        want += value
        deepspeed.graph_process(True, add_value)
        same(total.tolist(), [want] * 3, f"turn {turn}")
    deepspeed.graph_clear()


@runs_on("unified_ranks")
def test_deepspeed_gradient_is_none(comm: Any) -> None:
    """A gradient that the first call makes is added to by the later ones."""
    weight = torch.ones(3, device=comm.device, requires_grad=True)
    total = torch.zeros(3, device=comm.device)

    def accumulate() -> None:
        (weight * 2).sum().backward()
        total.add_(weight.grad)

    for first in (True, False):
        weight.grad = None
        total.zero_()
        for turn in range(1, 6):
            deepspeed.graph_process(first, accumulate)
            close(weight.grad, torch.full((3,), 2.0 * turn), f"turn {turn}, grad")
            close(total, torch.full((3,), turn * (turn + 1.0)), f"turn {turn}")
    deepspeed.graph_clear()


@runs_on("unified_ranks")
def test_deepspeed_failed_capture(comm: Any) -> None:
    """A capture that fails leaves no entry that later calls would replay in vain."""
    total = torch.zeros(3, device=comm.device)
    reads = [True]

    def update() -> None:
        total.add_(1)
        if reads[0]:
            total.sum().item()

    for _ in range(2):
        with refused(GraphError, "item"):
            deepspeed.graph_process(True, update)
        close(total, torch.zeros(3), "after the refusal")
    reads[0] = False
    for turn in range(1, 6):
        deepspeed.graph_process(True, update)
        close(total, torch.full((3,), float(turn)), f"turn {turn}")
    deepspeed.graph_clear()


if __name__ == "__main__":
    segments()
    sys.exit(0)
