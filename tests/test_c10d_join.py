"""DDP with uneven inputs, and works that only C++ has: they are waited for as any other work."""

import gc
import inspect
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # registers wait_tensor
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

import commlib
from commlib.compat.c10d import pairs
from commlib.compat.c10d.backend import takes_subclasses
from commlib.compat.c10d.launching import Step
from commlib.compat.c10d.work import DONE, GroupWork, HostBarrier
from commlib.errors import CommTimeout
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, assert_same_as_stock, initialised

Tensor = torch.Tensor
Kind = Callable[[Any, Tensor], dist.Work]
JOINS: dict[str, dict[str, bool]] = {
    "default": {},
    "ranks that are left": {"divide_by_initial_world_size": False},
    "error": {"throw_on_early_termination": True},
}


def wrapped(device: torch.device) -> DistributedDataParallel:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    return DistributedDataParallel(model, bucket_cap_mb=0.0001)  # several buckets


def uneven(options: dict[str, bool], device: torch.device) -> Any:
    """Train with two more batches on rank 1; return the parameters and the text of the error."""
    model, rank, error = wrapped(device), dist.get_rank(), ""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        with model.join(**options):
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                torch.manual_seed(10 * rank + step)
                model(torch.randn(4, 4).to(device)).square().mean().backward()
                optimizer.step()
    except RuntimeError as raised:
        error = str(raised)
    return list(model.parameters()), error


@runs_on("ranks")
@pytest.mark.parametrize("join", JOINS)
def test_uneven_inputs_have_the_values_of_stock(ring: Any, join: str) -> None:
    def program(device: torch.device) -> Any:
        return uneven(JOINS[join], device)

    assert_same_as_stock(ring, program)


# -- works that Python drops -----------------------------------------------------------------------


def reduced(ring: Any, out: Tensor) -> dist.Work:
    work: dist.Work = dist.all_reduce(out, async_op=True)
    assert_equal(takes_subclasses() or type(work) is GroupWork, True, "type")
    return work


def received(ring: Any, out: Tensor) -> dist.Work:
    """Queue a send and a receive, as a GPU does; nothing launches them before the wait."""
    peer, x = 1 - ring.rank, out * 2
    sent = pairs.queue(ring, Step([partial(ring.send, x, peer=peer)], [x]))
    work: Any = pairs.queue(ring, Step([partial(ring.recv, out, peer=peer)], [out]), peer, peer)
    work.sent = sent  # which would be launched when it is dropped
    return work  # type: ignore[no-any-return]


def barrier(ring: Any, out: Tensor) -> dist.Work:
    work: dist.Work = dist.barrier(async_op=True)
    assert_equal(takes_subclasses() or type(work) is HostBarrier, True, "type")
    return work


def done(ring: Any, out: Tensor) -> dist.Work:
    return DONE


KINDS: dict[str, Kind] = {one.__name__: one for one in (reduced, received, barrier, done)}


def given(reducer: Any, work: dist.Work) -> "ref[dist.Work]":
    """Give a reducer the work of its divisor, which Python drops."""
    reducer._set_forward_pass_work_handle(work, False)
    return ref(work)


@runs_on("ranks")
@pytest.mark.parametrize("kind", ["reduced", "received"])
def test_a_reducer_waits_for_a_work_that_python_has_dropped(ring: Any, kind: str) -> None:
    with initialised(ring, OURS[ring.device.type]):
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False).to(ring.device))
        out = torch.full((1,), 4.0, device=ring.device)
        loss = model(torch.ones(1, 1, device=ring.device)).sum()
        work = given(model.reducer, KINDS[kind](ring, out))
        gc.collect()
        loss.backward()
        assert_equal(model.module.weight.grad.item(), 2 / 8, "sum of gradients, over the divisor")
        if takes_subclasses() and kind == "reduced":
            return  # there, C++ makes an object per call, which keeps ours
        later = given(model.reducer, KINDS[kind](ring, out))
        gc.collect()
        assert_equal((work(), later() is None), (None, False), "works that are kept")
        later().wait()  # type: ignore[union-attr]
        out_ref = ref(out)
        del model, loss, out
        gc.collect()
        assert_equal(later(), None, "after the reducer's end")
        if ring.device.type == "cpu":  # a GPU may still use it
            assert_equal(out_ref(), None, "output after the reducer's end")


@runs_on("ranks")
@pytest.mark.parametrize("kind", KINDS)
def test_an_operator_waits_for_a_work_that_python_has_dropped(ring: Any, kind: str) -> None:
    with initialised(ring, OURS[ring.device.type]):
        out = torch.full((1,), 4.0, device=ring.device)
        c10d._register_work(out, KINDS[kind](ring, out))
        gc.collect()
        torch.ops._c10d_functional.wait_tensor(out)
        expected = 8.0 if kind in ("reduced", "received") else 4.0
        assert_equal(out.item(), expected, "result")
        ring.barrier()


@runs_on("ranks")
def test_cpp_waits_for_what_a_group_returns_to_it(ring: Any) -> None:
    with initialised(ring, OURS[ring.device.type]) as group:
        out = torch.full((1,), 4.0, device=ring.device)
        work = dist.ProcessGroup.allreduce(group, [out], c10d.AllreduceOptions())
        gc.collect()
        assert_equal((work.wait(), out.item()), (True, 8.0), "result")
        dist.ProcessGroup.barrier(group, c10d.BarrierOptions()).wait()


@runs_on("cpu_ranks")
def test_a_backward_has_the_deadline_of_its_divisor(ring: Any) -> None:
    commlib.shutdown()
    with initialised(ring, "commlib") as group:
        store = distributed_c10d._get_default_store()
        model = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        loss = model(torch.ones(1, 1)).sum()
        group.set_timeout(timedelta(seconds=1))
        if ring.rank == 0:
            given(model.reducer, dist.all_reduce(torch.ones(1), async_op=True))
            with raises(CommTimeout, "all_reduce on ring 0", "rank 1"):
                loss.backward()
            store.set("over", "1")
        else:
            store.wait(["over"], timedelta(seconds=20))


# -- where works enter C++ -------------------------------------------------------------------------


def functions(holder: Any, seen: set[Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of all C++ functions of a module and of its classes."""
    for name, one in vars(holder).items():
        if inspect.isclass(one) and one not in seen:
            seen.add(one)
            yield from functions(one, seen)
        elif isinstance(text := getattr(one, "__doc__", None), str):
            yield name, text


def test_torch_has_two_functions_that_take_a_work() -> None:
    """A third one must keep the Python object, as ``_register_work`` does, or get a wrapper."""
    argument = re.compile(r"\((?:.*, )?(?!self\b)\w+: [\w.:]*\bWork\b.*\) ->")
    names = {name for name, text in functions(c10d, set()) if argument.search(text)}
    assert names == {"_register_work", "_set_forward_pass_work_handle"}
