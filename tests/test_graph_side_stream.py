"""Backwards of captured calls: their nodes on a side stream, their graphs on the caller's."""

import copy
import functools
import gc
import itertools
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
import torch

from commlib import graph
from commlib.graph.recording.segments import Segments
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on

_A_WHILE = 50_000_000  # cycles of a GPU: more than the host takes for a backward


def chain(layers: int, device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(8)
    parts = (torch.nn.Linear(256, 256, bias=False) for _ in range(layers))
    return torch.nn.Sequential(*parts).to(device)


def rows(turn: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(-1, turn + 1, 256 * 64, device=device).view(64, 256)


def taken(module: torch.nn.Module) -> list[torch.Tensor]:
    """Return the gradients of parameters, and leave none."""
    grads = [x.grad for x in module.parameters() if x.grad is not None]
    module.zero_grad()
    return grads


def images(device: torch.device) -> torch.nn.Sequential:
    torch.manual_seed(9)
    convolution = torch.nn.Conv2d(4, 4, 3, padding=1, bias=False)
    parts = torch.nn.Unflatten(1, (4, 8, 8)), convolution, torch.nn.Flatten()
    return torch.nn.Sequential(*parts).to(device)


def equal(found: list[torch.Tensor], wanted: list[torch.Tensor], what: str) -> None:
    assert_equal(len(found), len(wanted), what)
    for i, (one, want) in enumerate(zip(found, wanted, strict=True)):
        assert_equal(bool(torch.equal(one, want)), True, f"{what}, gradient {i}")


def waits(layers: int, device: torch.device) -> int:
    """Return how often a stream waits for another in a replayed forward and backward."""
    module = chain(layers, device)
    captured, x = graph.capture(module, verify=False), rows(0, device)
    for _ in range(3):
        captured(x).sum().backward()
        module.zero_grad()
    gc.collect()  # a Work of an earlier test waits when it is freed
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        captured(x).sum().backward()
    calls = [event for event in profile.key_averages() if "StreamWaitEvent" in event.key]
    return sum(event.count for event in calls)


@runs_on("gpu_ranks")
def test_number_of_fences(comm: Any) -> None:
    """The gradients of many parameters take no more fences than those of one."""
    few = waits(1, comm.device)
    assert_equal(few > 0, True, "fences that the profiler has seen")
    assert_equal(waits(30, comm.device), few, "fences of 30 parameters")


@runs_on("gpu_ranks")
@pytest.mark.parametrize("verify", [None, True])
def test_no_warning_of_streams(comm: Any, verify: bool | None) -> None:
    """Gradients come from other streams than the parameters' nodes belong to, as is meant."""
    module, x = chain(2, comm.device), rows(0, comm.device)
    captured, before = graph.capture(module, verify=verify), torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "The AccumulateGrad node's stream")
            for _ in range(4):
                captured(x).sum().backward()
            module(x).sum().backward()
            on_a_stream(lambda: captured(x).sum().backward(), comm.device)
            in_a_thread(lambda: captured(x).sum().backward(), comm.device)
    finally:
        torch.set_warn_always(before)


@runs_on("gpu_ranks")
def test_a_hook_that_reads_late(comm: Any) -> None:
    """A hook's kernels still read a gradient when its memory is that of the next gradient."""

    def hooked(parts: list[torch.nn.Sequential], seen: list[torch.Tensor]) -> None:
        def take(parameter: torch.Tensor) -> None:
            assert parameter.grad is not None
            torch.cuda._sleep(_A_WHILE)
            seen.append(parameter.grad.clone())
            parameter.grad = None

        for part in parts:
            for parameter in part.parameters():
                parameter.register_post_accumulate_grad_hook(take)

    parts = [chain(1, comm.device) for _ in range(3)]
    others = copy.deepcopy(parts)
    grads, wanted = list[torch.Tensor](), list[torch.Tensor]()
    hooked(parts, grads)
    hooked(others, wanted)
    captured = [graph.capture(part, verify=False) for part in parts]
    for turn in range(3):
        for calls in (captured, others):
            x = rows(turn, comm.device)
            for call in calls:
                x = call(x)
            x.square().sum().backward()
    equal(grads, wanted, "hooks")


class Slow(torch.autograd.Function):
    """A product whose gradients are a while in coming."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        torch.cuda._sleep(_A_WHILE)
        return grad * weight, (grad * x).sum(0)


class Scale(torch.nn.Module):
    """One weight a column."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(1, 2, 256, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Slow.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


@runs_on("gpu_ranks")
def test_a_gradient_that_comes_late(comm: Any) -> None:
    """A hook reads a gradient at once, and the graph that writes it is still under way."""
    seen: list[list[torch.Tensor]] = [[], []]
    for copies, captured in zip(seen, (True, False), strict=True):
        module = Scale(comm.device)
        module.weight.register_post_accumulate_grad_hook(
            lambda parameter, copies=copies: copies.append(torch.clone(parameter.grad))
        )
        call: Any = graph.capture(module, verify=False) if captured else module
        for turn in range(3):
            call(rows(turn, comm.device)).square().sum().backward()
            module.zero_grad()
    equal(*seen, "hooks")


@runs_on("gpu_ranks")
def test_dropped_gradients(comm: Any) -> None:
    """The caller's kernels still read gradients when these are dropped and new ones are made."""
    module = chain(3, comm.device)
    other = copy.deepcopy(module)
    captured = graph.capture(module, verify=False)
    grads, wanted = list[torch.Tensor](), list[torch.Tensor]()
    for turn in range(4):
        for call, of, saved in ((captured, module, grads), (other, other, wanted)):
            call(rows(turn, comm.device)).square().sum().backward()
            torch.cuda._sleep(_A_WHILE)
            saved += [x.clone() for x in taken(of)]
    equal(grads, wanted, "gradients that were dropped")


@runs_on("gpu_ranks")
def test_two_models_on_two_streams(comm: Any) -> None:
    """What one stream's caller drops is not given to another one, whose kernels do not wait."""
    grads, wanted = list[torch.Tensor](), list[torch.Tensor]()
    default = torch.cuda.default_stream(comm.device)
    for eager, saved in ((False, grads), (True, wanted)):
        modules = [chain(1, comm.device) for _ in range(2)]
        calls: list[Any] = [x if eager else graph.capture(x, verify=False) for x in modules]
        streams = [torch.cuda.Stream(comm.device) for _ in modules]
        for turn in range(4):
            for number, (module, call) in enumerate(zip(modules, calls, strict=True)):
                streams[number].wait_stream(default)
                with torch.cuda.stream(streams[number]):
                    call(rows(turn + number, comm.device)).square().sum().backward()
                    if number == 0:
                        torch.cuda._sleep(_A_WHILE)
                    saved += [x.clone() for x in taken(module)]
            for stream in streams:
                default.wait_stream(stream)
    equal(grads, wanted, "gradients of two models")


@runs_on("gpu_ranks")
def test_many_streams(comm: Any) -> None:
    """More streams call than torch has to deal out: side streams are shared, numbers right."""
    module = chain(1, comm.device)
    grads = list[torch.Tensor]()
    for number in range(40):
        part = copy.deepcopy(module)
        captured = graph.capture(part, verify=False)
        torch.cuda.synchronize(comm.device)
        with torch.cuda.stream(torch.cuda.Stream(comm.device)):
            for turn in range(3):
                captured(rows(turn, comm.device)).sum().backward()
            torch.cuda.current_stream(comm.device).synchronize()
        if number in (0, 20, 39):
            grads.append(*taken(part))
    equal(grads[1:], [grads[0], grads[0]], "gradients by stream")


def on_a_stream(call: Callable[[], Any], device: torch.device) -> Any:
    current, stream = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        result = call()
    current.wait_stream(stream)
    return result


def in_a_thread(call: Callable[[], Any], device: torch.device) -> Any:
    def run() -> Any:
        torch.cuda.set_device(device)
        return call()

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result(60)


def elsewhere(comm: Any) -> None:
    """Calls from other streams and threads than the first, some of them held at the same time."""
    ways, made = (on_a_stream, in_a_thread), (functools.partial(chain, 2), images)
    for way, make in itertools.product(ways, made):
        module = make(comm.device)
        other = copy.deepcopy(module)
        captured = graph.capture(module, verify=False)
        grads: dict[str, list[torch.Tensor]] = {"captured": [], "eager": []}
        for turn in range(4):
            for name, call, of in (("captured", captured, module), ("eager", other, other)):

                def forward(call: Any = call, turn: int = turn) -> torch.Tensor:
                    out: torch.Tensor = call(rows(turn, comm.device)).clone()
                    return out

                main_out, side_out = forward(), way(forward, comm.device)
                torch.cuda._sleep(_A_WHILE)
                (main_out * side_out).sum().backward()
                grads[name] += taken(of)
        equal(grads["captured"], grads["eager"], way.__name__)


@runs_on("gpu_ranks")
def test_calls_from_elsewhere(comm: Any) -> None:
    with torch.backends.cudnn.flags(deterministic=True):
        elsewhere(comm)


@runs_on("gpu_ranks")
def test_a_backward_that_fails(comm: Any) -> None:
    """After a backward that raises where its graph is launched, the next ones are right."""
    module = chain(2, comm.device)
    other = copy.deepcopy(module)
    captured = graph.capture(module, verify=False)
    for turn in range(4):
        out = captured(rows(turn, comm.device))
        if turn == 2:
            broken = mock.patch.object(Segments, "replay", side_effect=RuntimeError("no launch"))
            with broken, raises(RuntimeError, "no launch"):
                out.sum().backward()
            assert_equal(taken(module), [], "gradients of a backward that failed")
            continue
        out.sum().backward()
        other(rows(turn, comm.device)).sum().backward()
        equal(taken(module), taken(other), f"turn {turn}")


@pytest.mark.two_gpus
@runs_on("gpu_ranks")
def test_another_current_device(comm: Any) -> None:
    """The GPU of a captured call need not be the current one, which stays what it is."""
    module = chain(2, comm.device)
    eager, captured = copy.deepcopy(module), graph.capture(module)
    other = 1 - comm.device.index
    with torch.cuda.device(other):
        for turn in range(4):
            for call in (eager, captured):
                call(rows(turn, comm.device)).square().sum().backward()
                assert_equal(torch.cuda.current_device(), other, f"current device, turn {turn}")
            equal(taken(module), taken(eager), f"turn {turn}")
