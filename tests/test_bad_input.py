"""Wrong calls of every kind: our error, with the numbers in it, and a pair that still works."""

import os
from typing import Any

import torch

import commlib
from commlib import ops
from commlib.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    FlagError,
    RingError,
    ShapeError,
)
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.operator import calls
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on

UNARY = (
    ops.all_gather,
    ops.all_reduce,
    ops.all_to_all,
    ops.broadcast,
    ops.concat,
    ops.gather,
    ops.identity,
    ops.reduce,
    ops.reduce_scatter,
    ops.scatter,
    ops.split,
)
manager = commlib.CommContextManager.instance


@runs_on("cpu_ranks")
def test_explain(comm: Any) -> None:
    with raises(ArgumentError, "explain on ring 0", "dtype='float32'", "pass torch.float32"):
        comm.explain(1024, "float32")


@runs_on("ranks")
def test_wrong_on_one_rank(comm: Any) -> None:
    """One rank makes a wrong call; only this rank gets an error, and the other rank never waits."""
    x = torch.ones(4, 4, device=comm.device)
    before = calls(comm)
    if comm.rank == 1:
        for call in UNARY:
            with raises(RingError, "ring 99", "rings here: [0]", "new_ring"):
                call(x, 99)
            for ring_id in (-1, "0", None, 0.5):
                with raises(RingError, f"ring_id={ring_id!r}: expected", "rings here: [0]"):
                    call(x, ring_id)
            with raises(RingError, "ring_id='max'", "pass op='max' for a reduction"):
                call(x, "max")
            for wrong in ([1.0], None, 3, x.cpu().numpy()):
                with raises(ArgumentError, type(wrong).__name__):
                    call(wrong)
            with raises(TypeError):
                call(x, 0, None)  # everything after ring_id goes by keyword
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_unknown_names(comm: Any) -> None:
    with raises(AttributeError, "all_reduced"):
        _ = getattr(ops, "all_" + "reduced")
    with raises(AttributeError, "all_reduced"):
        _ = torch.ops.commlib.all_reduced
    with raises(ArgumentError, "op='Add'", "sum"):
        ops.all_reduce(torch.ones(2, device=comm.device), op="Add")  # type: ignore[call-overload]


@runs_on("ranks")
def test_verbs(comm: Any) -> None:
    """The verbs of a ring refuse by themselves; ``out`` comes first."""
    x, before = torch.ones(4, 3, device=comm.device), calls(comm)
    half, twice = torch.ones(2, 3, device=comm.device), torch.ones(8, 3, device=comm.device)
    for out, verb, more, expected in (
        (half, comm.all_reduce, {}, 12),
        (x, comm.all_gather, {}, 24),
        (x, comm.reduce_scatter, {}, 6),
        (half, comm.broadcast, {"root": comm.rank}, 12),
        (half, comm.reduce, {"root": comm.rank}, 12),
        (x, comm.gather, {"root": comm.rank}, 24),
        (x, comm.scatter, {"root": comm.rank}, 6),
    ):
        context = (f"{verb.__name__} on ring 0", f"rank {comm.rank} of 2")
        with raises(ShapeError, *context, tuple(out.shape), f"expected {expected}"):
            verb(out, x, **more)
        with raises(DtypeError, *context, "float32", "float64"):
            verb(twice.double(), x, **more)
        with raises(ArgumentError, *context, "requires grad", "detach"):
            verb(torch.ones(4, requires_grad=True, device=comm.device), x, **more)
        with raises(ArgumentError, "NoneType"):
            verb(None, x, **more)
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_other_devices(comm: Any) -> None:
    x = torch.ones(2, device=comm.device)
    with raises(DeviceError, "meta", comm.device, f".to('{comm.device}')"):
        comm.all_reduce(x.to("meta"), x)
    if comm.device.type == "cuda":
        others = {*range(torch.cuda.device_count())} - {comm.device.index}
        for wrong in (x.cpu(), *(torch.ones(2, device=f"cuda:{other}") for other in others)):
            with raises(DeviceError, wrong.device, comm.device):
                ops.all_reduce(wrong)


@runs_on("ranks")
def test_an_inference_tensor_outside_of_inference_mode(comm: Any) -> None:
    """Refused before the launch where the engine would copy to it; in place it is not copied to."""
    x, part = torch.ones(4, device=comm.device), torch.ones(2, device=comm.device)
    with torch.inference_mode():
        same, half, double = (torch.zeros(n, device=comm.device) for n in (4, 2, 8))
    wrong = (
        lambda: comm.all_reduce(same, x),
        lambda: comm.all_reduce(same, x, op="premul_sum", factor=2.0),
        lambda: comm.all_gather(double, x),
        lambda: comm.reduce_scatter(half, x),
        lambda: comm.broadcast(same, x, root=0),
        lambda: comm.reduce(same, x, root=comm.rank),
        lambda: comm.gather(double, x, root=comm.rank),
        lambda: comm.scatter(half, x, root=comm.rank),
        lambda: comm.all_to_all(same, x),
        lambda: comm.all_to_all(list(same.chunk(2)), [part, part]),
        lambda: ops.all_reduce(x, out=same),
    )
    before = calls(comm)
    for call in wrong:
        with raises(ArgumentError, "is an inference tensor", "torch.inference_mode()", ".clone()"):
            call()
    assert_equal(calls(comm), before, "launched")
    with torch.inference_mode():
        assert_equal(comm.all_gather(double, x).tolist(), [1.0] * 8, "in inference mode")
    comm.broadcast(same, same, root=0)
    same_again = comm.all_reduce(same, same, op="premul_sum", factor=0.5)
    assert_equal(same_again.tolist(), [0.0] * 4, "in place, outside")
    assert_equal(comm.all_reduce(x, x).tolist(), [2.0] * 4, "the ring afterwards")


@runs_on("ranks")
def test_rings(comm: Any) -> None:
    """Ring ids and members: reused, doubled, outside; all refused at once on every rank."""
    with raises(RingError, "ring 0", "[0, 1]", f"[{comm.rank}]"):
        commlib.new_ring(0, [comm.rank])
    assert_equal(commlib.new_ring(31, [1 - comm.rank]), None, "not a member")
    with raises(RingError, "ring 31", "rings here: [0]"):
        commlib.comm(31)
    with raises(RingError, f"rank {comm.rank}", f"[{1 - comm.rank}]", "new_ring"):
        manager().create(31, [1 - comm.rank])
    for ranks in ([], [0, 0], [0, 2], [-1, 0], [0, 1, 1]):
        with raises(RingError, "ring 32", ranks, "0 to 1"):
            commlib.new_ring(32, ranks)
    for ring_id in (-1, True, "3", None):
        with raises(RingError, f"ring_id={ring_id!r}"):
            commlib.new_ring(ring_id, [0, 1])
    for timeout in (0, -1, float("inf"), float("nan")):
        with raises(ArgumentError, f"timeout={timeout!r}"):
            commlib.new_ring(33, [0, 1], timeout=timeout)
    assert_equal(manager().rings(), [0], "rings afterwards")

    solo_ring = commlib.new_ring(34, [comm.rank])
    assert solo_ring is not None
    x = torch.ones(3, device=comm.device)
    assert_bits_equal(ops.all_reduce(x, 34), x, "a ring of this rank alone")
    with raises(RingError, "ring 34 exists", f"[{comm.rank}]", "close_ring(34)"):
        commlib.new_ring(34, [0, 1])
    manager().close(34)
    with raises(RingError, "ring 34 was closed"):
        ops.all_reduce(x, 34)
    with raises(RingError, "closed"):
        solo_ring.all_reduce(x, x)


@runs_on("ranks")
def test_flag_changed_after_start(comm: Any) -> None:
    """The engine is chosen once: a flag that changes later is refused, one that repeats is not."""
    name = "FLAGS_dynamic_static_unified_comm"
    now = commlib.flags.get(name)
    with commlib.flags.override(name, now):
        assert_equal(commlib.flags.get(name), now, "the flag set to what it is")
    with raises(FlagError, name, repr(now), repr(not now), "shutdown"):
        commlib.flags.set(name, not now)
    with raises(FlagError, name, "frozen"), commlib.flags.override(name, not now):
        pass
    with raises(FlagError, "no flag 'FLAGS_nothing'", name):
        commlib.flags.get("FLAGS_nothing")
    with raises(FlagError, name, "'maybe'", "true"):
        commlib.flags.set(name, "maybe")
    assert_equal(commlib.flags.get(name), now, "the flag afterwards")


@runs_on("ranks")
def test_environment_changed_after_start(comm: Any) -> None:
    """Changed in the environment it is refused when the next communicator would be created."""
    name = "FLAGS_dynamic_static_unified_comm"
    before = os.environ[name]
    os.environ[name] = "0" if before == "1" else "1"
    try:
        with raises(FlagError, name, "frozen"):
            commlib.new_ring(35, [0, 1])
    finally:
        os.environ[name] = before
    assert_equal(commlib.new_ring(35, [0, 1]) is not None, True, "the flag put back")
    manager().close(35)


def nothing_created(comm: Any) -> None:
    """Without a ring the error says how to get one; afterwards everything starts again."""
    commlib.shutdown()
    commlib.shutdown()
    with raises(RingError, "ring 0", "commlib.init()"):
        ops.all_reduce(torch.ones(2))
    with raises(ArgumentError, "mpi", "nccl", "gloo"):
        commlib.init("mpi")
    with raises(DeviceError, "meta"):
        commlib.init(device="meta")
    with raises(DeviceError, "cuda:7", "cpu"):
        commlib.init(device="cuda:7")
    commlib.flags.set("FLAGS_dynamic_static_unified_comm", True)
    assert_equal(commlib.init().engine, "gloo", "engine after the flag was set")
    assert_bits_equal(ops.all_reduce(torch.ones(2)), torch.full((2,), 2.0), "after it all")


def test_before_init(new_ranks: NewRanks) -> None:
    with new_ranks(2) as ranks:
        ranks(nothing_created)
