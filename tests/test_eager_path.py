"""The eager path is short, and takes the calls that need no check."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import commlib
from commlib import graph, ops
from commlib.core.calls.call import apart
from commlib.core.dispatch import is_plain
from commlib.core.observers import unwaited
from commlib.core.work import Work
from tests.support.checks import assert_equal
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

PACKAGE = Path(commlib.__file__).parent
# Functions, and files that they are in. On CPUs the call is posted for the neighbours first, which
# keeps gloo from ending a process. On GPUs a push kernel is launched, and nothing is waited for.
MOST = {"gloo": (8, 5), "c10d": (8, 5), "nccl": (8, 6)}


def functions_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the file and the name of every function of the package that ``call`` runs."""
    seen = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            seen.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def short(comm: Any) -> None:
    x = torch.ones(64, device=comm.device)
    calls: dict[str, Callable[[], object]] = {
        "in place": lambda: ops.all_reduce(x, out=x),
        "a new output": lambda: ops.all_reduce(x),
    }
    most, files = MOST[comm.engine]
    for name, call in calls.items():
        for _ in range(3):
            call()
        # Of two traces the shorter one: one call in 1000 closes a window of the call log.
        called = min((functions_of(call) for _ in range(2)), key=len)
        listed = "\n".join(f"{file}: {function}" for file, function in called)
        assert_equal(len(called) <= most, True, f"{name}, {len(called)} functions:\n{listed}")
        assert_equal(len({file for file, _ in called}) <= files, True, f"{name}, files:\n{listed}")
        assert_equal("launched" in {function for _, function in called}, True, listed)


def test_few_functions_run_in_an_eager_call(cpu_ranks: Ranks) -> None:
    cpu_ranks(short)


def test_few_functions_launch_a_push_kernel(gpu_ranks: Ranks) -> None:
    gpu_ranks(short)


@pytest.fixture
def ring() -> Iterator[commlib.CommContext]:
    yield commlib.init(device="cpu")
    commlib.shutdown()


def freed() -> torch.Tensor:
    x = torch.ones(4)
    x.untyped_storage().resize_(0)
    return x


SPECIAL = {
    "strided": lambda: torch.ones(4, 4).t(),
    "negated": lambda: torch._neg_view(torch.ones(4)),
    "conjugated": lambda: torch.ones(4, dtype=torch.complex64).conj(),
    "with a gradient": lambda: torch.ones(4, requires_grad=True),
    "on another device": lambda: torch.ones(4, device="meta"),
    "without memory": freed,
    "empty": lambda: torch.ones(0),
    "sparse": lambda: torch.ones(4).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged),
    "a number": lambda: 1.0,
    "none": lambda: None,
}


@pytest.mark.parametrize("make", SPECIAL.values(), ids=SPECIAL)
def test_what_needs_a_check_is_not_plain(
    ring: commlib.CommContext, make: Callable[[], Any]
) -> None:
    x, other = torch.ones(4), make()
    assert [is_plain(ring, *pair) for pair in ((other, other), (x, other), (other, x))] == 3 * [
        False
    ]


def test_plain_pairs(ring: commlib.CommContext) -> None:
    x = torch.ones(8)
    assert is_plain(ring, x, x)
    assert is_plain(ring, x, torch.nn.Parameter(torch.ones(8), requires_grad=False))
    assert is_plain(ring, x[:4], x[4:])
    assert not is_plain(ring, x[:5], x[3:])
    assert not is_plain(ring, x, torch.ones(8, dtype=torch.int32))


def test_a_part_in_its_place_is_plain(
    ring: commlib.CommContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine that has such a form, and as the launch itself looks for shared bytes."""
    x = torch.ones(8)
    assert not is_plain(ring, x[:4], x, part=True)
    monkeypatch.setattr(type(ring._engine), "parts_in_place", True)
    assert not is_plain(ring, x[:4], x)
    assert not is_plain(ring, x[:4], x.view(torch.int32), part=True)
    memory, plain = torch.ones(40), set()
    for size in (1, 2, 3, 4):
        full = memory[8 : 8 + 4 * size]
        for rank in range(size):
            fake: Any = SimpleNamespace(
                rank=rank, _device_number=ring._device_number, _engine=ring._engine
            )
            for start in range(8 + 4 * size):
                part = memory[start : start + 4]
                gathers = is_plain(fake, part, full, part=True)
                scatters = is_plain(fake, full, part, part=True)
                assert gathers == apart(full, part, 4 * rank)
                assert scatters == apart(part, full, -4 * rank)
                if gathers and start > 4:
                    plain.add((size, rank, start))
    assert plain == {(size, rank, 8 + 4 * rank) for size in (1, 2, 3, 4) for rank in range(size)}


@pytest.mark.filterwarnings("ignore:`torch.jit.trace` is deprecated")
def test_no_call_is_plain_where_operators_are_watched(ring: commlib.CommContext) -> None:
    x, seen = torch.ones(4), []

    def add(y: torch.Tensor) -> torch.Tensor:
        seen.append(is_plain(ring, y, y))
        return y + 1

    with FlopCounterMode(display=False):
        add(x)
    with forward_ad.dual_level():
        add(x)
    torch.jit.trace(add, x, check_trace=False)
    assert seen == 3 * [False]


@runs_on("cpu_ranks")
def test_a_captured_call_begins_no_work(comm: Any) -> None:
    """Its tensors would be kept to the end of the run, and Ctrl-C would wait for the peers."""
    begun: list[Work[Any]] = []

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        with unwaited() as works:
            comm.all_reduce(y, y)
            begun.extend(works)
        return y

    captured = graph.capture(f)
    for _ in range(3):
        captured(torch.ones(4))
    assert_equal(begun, [], "Works of synchronous calls")
