"""compat.deepspeed.comm: DeepSpeed's names on rings, and its counters."""

import inspect
import os
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

import commlib
from commlib.compat.deepspeed import comm as dist
from commlib.compat.deepspeed.comm.counters import counters
from commlib.errors import ArgumentError, CommTimeout
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.ports import free_port
from tests.support.processes import run, start
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, end_earlier_group, initialised

Tensor = torch.Tensor
SHAPE = (4, 3)
LOGGED = ("prof", "log_name", "debug")
# The positional arguments of DeepSpeed 0.18, without those that every logged call has.
SIGNATURES = {
    "all_gather": ["tensor_list", "tensor", "group", "async_op"],
    "all_gather_into_tensor": ["output_tensor", "tensor", "group", "async_op"],
    "all_reduce": ["tensor", "op", "group", "async_op"],
    "all_reduce_coalesced": ["tensors", "op", "group", "async_op"],
    "all_to_all_single": [
        *("output", "tensor", "output_split_sizes", "input_split_sizes", "group", "async_op"),
    ],
    "barrier": ["group", "async_op", "device_ids"],
    "broadcast": ["tensor", "src", "group", "async_op"],
    "gather": ["tensor", "gather_list", "dst", "group", "async_op"],
    "inference_all_reduce": ["tensor", "op", "group", "async_op"],
    "irecv": ["tensor", "src", "group", "tag"],
    "isend": ["tensor", "dst", "group", "tag"],
    "monitored_barrier": ["group", "timeout", "wait_all_ranks"],
    "recv": ["tensor", "src", "group", "tag"],
    "reduce": ["tensor", "dst", "op", "group", "async_op"],
    "reduce_scatter": ["output", "input_list", "op", "group", "async_op"],
    "reduce_scatter_tensor": ["output_tensor", "tensor", "op", "group", "async_op"],
    "scatter": ["tensor", "scatter_list", "src", "group", "async_op"],
    "send": ["tensor", "dst", "group", "tag"],
}
LOG_NAMES = {"all_reduce_coalesced": "all_reduce", "inference_all_reduce": "all_reduce"}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    parameters = inspect.signature(getattr(dist, name)).parameters
    assert list(parameters) == [*SIGNATURES[name], *LOGGED]
    assert parameters["log_name"].default == LOG_NAMES.get(name, name)
    assert parameters["prof"].default is False


def inputs(rank: int, seed: int = 0) -> Tensor:
    return sample(rank, SHAPE, torch.float32, seed)


def everyone(comm: Any) -> list[Tensor]:
    return [inputs(rank) for rank in range(comm.size)]


Calls = dict[str, Callable[[], tuple[Any, Any]]]


def filled(call: Callable[..., Any], x: Tensor, *shape: int) -> Tensor:
    out = x.new_empty(shape)
    call(out)
    return out


def listed(call: Callable[..., Any], x: Tensor, size: int) -> list[Tensor]:
    outs = [torch.empty_like(x) for _ in range(size)]
    call(outs)
    return outs


def in_place(call: Callable[..., Any], x: Tensor) -> Tensor:
    copy = x.clone()
    call(copy)
    return copy


def coalesced(x: Tensor) -> list[Tensor]:
    copies = [x.clone(), x.clone() * 2]
    dist.all_reduce_coalesced(copies)
    return copies


def gathered_as_one(x: Tensor) -> list[Tensor]:
    outs = [x.new_empty((8, 3)), x.new_empty((8, 3))]
    dist.all_gather_coalesced(outs, [x, x * 2])
    return outs


def paired(x: Tensor, rank: int) -> Tensor:
    out = torch.empty_like(x)
    works = [dist.isend(x, 1 - rank), dist.irecv(out, 1 - rank)]
    for work in works:
        assert work is not None
        work.wait()
    if rank:
        dist.send(x, 0)
    else:
        assert_equal(dist.recv(out, 1), 1)
    return out


def objects(rank: int) -> list[Any]:
    sent, received = [{"rank": rank}, rank], [None, None]
    dist.broadcast_object_list(sent, 1)
    dist.all_gather_object(received, rank)
    return [*sent, *received]


def asynchronous(x: Tensor) -> Tensor:
    copy = x.clone()
    work = dist.all_reduce(copy, async_op=True)
    assert work is not None
    work.wait()
    return copy


def sums(comm: Any, x: Tensor) -> Calls:
    both, summed = everyone(comm), inputs(0) + inputs(1)
    return {
        "all_reduce": lambda: (in_place(dist.all_reduce, x), summed),
        "max": lambda: (
            in_place(lambda t: dist.all_reduce(t, op=dist.ReduceOp.MAX), x),
            both[0].maximum(both[1]),
        ),
        "async": lambda: (asynchronous(x), summed),
        "inference_all_reduce": lambda: (in_place(dist.inference_all_reduce, x), summed),
        "all_reduce_coalesced": lambda: (coalesced(x), [summed, inputs(0) * 2 + inputs(1) * 2]),
        "broadcast": lambda: (in_place(lambda t: dist.broadcast(t, 1), x), both[1]),
        "reduce": lambda: (in_place(lambda t: dist.reduce(t, 0), x), x if comm.rank else summed),
    }


def gathered(comm: Any, x: Tensor) -> Calls:
    both = everyone(comm)
    full = torch.cat(both)
    return {
        "all_gather": lambda: (listed(lambda outs: dist.all_gather(outs, x), x, comm.size), both),
        "all_gather_into_tensor": lambda: (
            filled(lambda out: dist.all_gather_into_tensor(out, x), x, 8, 3),
            full,
        ),
        "allgather_fn": lambda: (filled(lambda out: dist.allgather_fn(out, x), x, 8, 3), full),
        "all_gather_coalesced": lambda: (gathered_as_one(x), [full, full * 2]),
    }


def scattered(comm: Any, x: Tensor) -> Calls:
    both, half = everyone(comm), slice(2 * comm.rank, 2 * comm.rank + 2)
    part = (inputs(0) + inputs(1))[half]
    return {
        "reduce_scatter": lambda: (
            filled(lambda out: dist.reduce_scatter(out, [x[:2], x[2:]]), x, 2, 3),
            part,
        ),
        "reduce_scatter_tensor": lambda: (
            filled(lambda out: dist.reduce_scatter_tensor(out, x), x, 2, 3),
            part,
        ),
        "reduce_scatter_fn": lambda: (
            filled(lambda out: dist.reduce_scatter_fn(out, x), x, 2, 3),
            part,
        ),
        "all_to_all_single": lambda: (
            filled(lambda out: dist.all_to_all_single(out, x), x, 4, 3),
            torch.cat([both[0][half], both[1][half]]),
        ),
        "all_to_all": lambda: (
            listed(lambda outs: dist.all_to_all(outs, [x, x + 1]), x, comm.size),
            [one + comm.rank for one in both],
        ),
    }


def between_two(comm: Any, x: Tensor) -> Calls:
    both, rank = everyone(comm), comm.rank
    return {
        "gather": lambda: (
            listed(lambda outs: dist.gather(x, None if rank else outs), x, comm.size)
            if not rank
            else dist.gather(x, None),
            None if rank else both,
        ),
        "scatter": lambda: (
            filled(lambda out: dist.scatter(out, None if rank else [x, x + 1]), x, *SHAPE),
            both[0] + rank,
        ),
        "pairs": lambda: (paired(x, rank), both[1 - rank]),
        "objects": lambda: (objects(rank), [{"rank": 1}, 1, 0, 1]),
    }


def calls_of(comm: Any) -> Calls:
    """Return for each name a call on this rank, and what it gives by the formula."""
    x = inputs(comm.rank).to(comm.device)
    families = (sums, gathered, scattered, between_two)
    return {name: call for family in families for name, call in family(comm, x).items()}


NAMES = ["all_reduce", "max", "async", "inference_all_reduce", "all_reduce_coalesced"]
NAMES += ["broadcast", "reduce", "all_gather", "all_gather_into_tensor", "allgather_fn"]
NAMES += ["all_gather_coalesced", "reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_fn"]
NAMES += ["all_to_all_single", "all_to_all", "gather", "scatter", "pairs", "objects"]


@runs_on("ranks")
def test_values(comm: Any) -> None:
    """Each call gives the bits of its formula, and runs on the ring."""
    with initialised(comm, OURS[comm.device.type]):
        calls = calls_of(comm)
        assert_equal(list(calls), NAMES)
        for name, call in calls.items():
            before = comm.report()["calls"]
            actual, wanted = call()
            if isinstance(wanted, Tensor):
                actual, wanted = [actual], [wanted]
            if wanted is None or not isinstance(wanted[0], Tensor):
                assert_equal(actual, wanted, name)
            else:
                for got, want in zip(actual, wanted, strict=True):
                    assert_bits_equal(got, want, name)
            ran = comm.report()["calls"] - before
            assert name == "objects" or ran > 0, f"{name} did not run on the ring"


@runs_on("ranks")
def test_groups(comm: Any) -> None:
    with initialised(comm, OURS[comm.device.type]):
        assert_equal((dist.get_rank(), dist.get_world_size()), (comm.rank, comm.size))
        assert_equal(dist.get_all_ranks_from_group(), list(comm.ranks))
        assert_equal(dist.get_local_rank(), int(os.environ["LOCAL_RANK"]))
        group = dist.new_group([1])
        assert_equal(dist.get_rank(group), comm.rank - 1)
        if comm.rank:
            assert_equal((dist.get_global_rank(group), dist.get_world_size(group)), (1, 1))
        mesh = dist.initialize_mesh_device((2,), ("dp",))
        assert commlib.ring_from_group(mesh["dp"], device=comm.device) is comm
        dist.barrier()
        dist.monitored_barrier()
        if comm.rank == 0:
            with raises(CommTimeout, "monitored_barrier", "rank 1"):
                dist.monitored_barrier(timeout=timedelta(seconds=0.2))
        dist.barrier()


@runs_on("ranks")
def test_start_and_end(comm: Any, tmp_path: Path) -> None:
    """`init_distributed("nccl")` makes groups of rings; the world is ring 0."""
    end_earlier_group()
    kwargs = {"init_method": f"file://{tmp_path}/store", "rank": comm.rank, "world_size": comm.size}
    with raises(ArgumentError, "dist_init_required=False", "not initialised"):
        dist.init_distributed(dist_init_required=False)
    backend = "nccl" if comm.device.type == "cuda" else "gloo"
    for _ in range(2):  # the second call finds that it was done
        dist.init_distributed(backend, verbose=False, **kwargs)
    assert dist.is_initialized() and dist.is_available()
    x = torch.full((2,), comm.rank + 1.0, device=comm.device)
    before = comm.report()["calls"]
    dist.all_reduce(x, prof=True, debug="a line")
    assert_equal((x.tolist(), comm.report()["calls"] - before), ([3.0, 3.0], 1))
    dist.init_distributed(dist_init_required=False)
    dist.destroy_process_group()
    assert not dist.is_initialized()


_PROGRAM = """
import torch
from commlib.compat.deepspeed import comm as dist
dist.init_distributed("gloo", auto_mpi_discovery=True, verbose=False)
x = torch.full((2,), dist.get_rank() + 1.0)
dist.all_reduce(x)
print(dist.get_rank(), dist.get_world_size(), x.tolist())
dist.destroy_process_group()
"""


def test_start_without_rank() -> None:
    """Open MPI's variables are read; a process without a launcher is alone."""
    port = str(free_port())
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMPI_COMM_WORLD_SIZE": "2"}
    flag = {"FLAGS_dynamic_static_unified_comm": "1"}
    both = [
        start("-c", _PROGRAM, OMPI_COMM_WORLD_RANK=str(rank), **meeting, **flag) for rank in (0, 1)
    ]
    said = [process.communicate(timeout=60) for process in both]
    assert [out for out, _ in said] == ["0 2 [3.0, 3.0]\n", "1 2 [3.0, 3.0]\n"], said
    assert run("-c", _PROGRAM, **flag)[1] == "0 1 [1.0, 1.0]\n"


@runs_on("cpu_ranks")
def test_lists_that_are_refused(comm: Any) -> None:
    """Nothing is launched, and later calls work."""
    x = torch.ones(2)
    with initialised(comm, "commlib"):
        with raises(ArgumentError, "2 outputs for 1 inputs"):
            dist.all_gather_coalesced([x, x], [x])
        with raises(ArgumentError, "all_reduce_coalesced: no tensors"):
            dist.all_reduce_coalesced([])
        dist.all_reduce(x)
    assert_equal(x.tolist(), [2.0, 2.0], "a later call")


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("enabled", "all", "names"):
        monkeypatch.setattr(counters, name, getattr(counters, name))
    monkeypatch.setattr(counters, "found", {})


def count(*calls: tuple[str, int, bool]) -> dict[tuple[str, int], tuple[int, int]]:
    counters.found.clear()
    for name, elements, asked in calls:
        counters.count(name, [torch.empty(elements), None], asked)
    return {key: (one.calls, one.bytes) for key, one in counters.found.items()}


@pytest.mark.usefixtures("clean")
def test_what_is_counted() -> None:
    """Nothing by default; all calls, calls that ask, or calls by name."""
    calls = (("all_reduce", 4, False), ("all_reduce", 4, True), ("send", 2, False))
    assert count(*calls) == {}
    dist.configure(enabled=True)
    assert count(*calls) == {("all_reduce", 16): (2, 32), ("send", 8): (1, 8)}
    dist.configure(prof_all=False)
    assert count(*calls) == {("all_reduce", 16): (1, 16)}
    dist.configure({"comms_logger": {"prof_ops": ["send"], "verbose": True}})
    assert count(*calls) == {("all_reduce", 16): (1, 16), ("send", 8): (1, 8)}

    class Logger:
        enabled, prof_all, prof_ops = False, None, None

    class Config:
        comms_config = type("CommsConfig", (), {"comms_logger": Logger()})()

    dist.configure(Config())
    assert count(*calls) == {}


@pytest.mark.usefixtures("clean")
def test_summary(capsys: pytest.CaptureFixture[str]) -> None:
    dist.configure(enabled=True)
    count(("all_reduce", 4, False), ("send", 2, False), ("send", 2, False))
    dist.log_summary()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["all_reduce", "16", "1", "16"],
        ["send", "8", "2", "16"],
    ]
    result = dist.log_summary(return_dict=True)
    assert result is not None
    of_size = result["summary"]["send"][8]
    assert (of_size["count"], of_size["msg_size_bytes"], of_size["avg_latency_ms"]) == (2, 8, None)
    assert result["straggler_analysis"] is None
    assert (result["metadata"]["world_size"], result["metadata"]["rank"]) == (1, 0)
    assert dist.has_comm_data() and dist.get_comm_operation_count() == 3
    assert dist.get_logged_comm_ops() == ["all_reduce", "send"]
    dist.reset_log()
    result = dist.log_summary(return_dict=True)
    assert result is not None and result["summary"] == {} and not dist.has_comm_data()
    with raises(ArgumentError, "show_straggler=True", "FLAGS_comm_check=1"):
        dist.log_summary(show_straggler=True)


@runs_on("cpu_ranks")
def test_calls_are_counted(comm: Any) -> None:
    with initialised(comm, "commlib"):
        dist.configure(enabled=True)
        counters.found.clear()
        try:
            for call in calls_of(comm).values():
                call()
            counts = Counter(name for name, _ in counters.found)
        finally:
            dist.configure(enabled=False)
    others = {"barrier", "monitored_barrier", "send", "recv", *LOG_NAMES}
    assert_equal({*SIGNATURES} - others - {*counts}, set(), "names that were not counted")
    assert_equal(("send" if comm.rank else "recv") in counts, True)
    assert_equal(counts["all_gather_into_tensor"], 1, "sizes")
