"""Wrong arguments of expert_dispatch and expert_combine: refused before anything is launched."""

from typing import Any

import torch

import commlib
from commlib import flags, ops
from commlib.errors import (
    ArgumentError,
    CommTimeout,
    DeviceError,
    DtypeError,
    MismatchError,
    RingError,
    ShapeError,
)
from commlib.p2p.experts.tables import ExpertSpec
from tests.support.checks import assert_equal, on_gpu, raises, sample, settle
from tests.support.operator import ABSENT_RING, calls, compile_whole
from tests.support.runs_on import runs_on
from tests.test_custom_allreduce import another

TOKENS, TOP_K, WIDTH = 4, 2, 16


def tensors(comm: Any) -> dict[str, Any]:
    return {
        "x": sample(comm.rank, (TOKENS, WIDTH), torch.float32).to(comm.device),
        "expert_ids": torch.zeros((TOKENS, TOP_K), dtype=torch.int64, device=comm.device),
        "num_experts": 3,
        "capacity": 20,
    }


@runs_on("ranks")
def test_refused_numbers_and_options(comm: Any) -> None:
    good, before = tensors(comm), calls(comm)
    for name in ("num_experts", "capacity"):
        for value in (0, -2, True, 1.5, None):
            with raises(ArgumentError, f"expert_dispatch: {name}={value!r}", "number >= 1"):
                ops.expert_dispatch(**{**good, name: value})
    with raises(ArgumentError, "quantize='int8'", "expected None or 'fp8'"):
        ops.expert_dispatch(**good, quantize="int8")
    with raises(ArgumentError, "on_overflow='raise'", "'error' or 'drop'"):
        ops.expert_dispatch(**good, on_overflow="raise")
    with raises(ArgumentError, f"rank {comm.rank} of 2", "capacity=1073741824", "at most"):
        ops.expert_dispatch(**{**good, "capacity": 2**30})
    with raises(ArgumentError, "makes 1073741824 rows on a rank", "at most 1073741823"):
        ops.expert_dispatch(**{**good, "capacity": 2**29})
    with raises(RingError, ABSENT_RING):
        ops.expert_dispatch(**good, ring_id=ABSENT_RING)
    wanting = {**good, "x": good["x"].requires_grad_()}
    with raises(ArgumentError, "x requires grad with quantize='fp8'", "x.detach()"):
        ops.expert_dispatch(**wanting, quantize="fp8")
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_refused_tensors(comm: Any) -> None:
    good, before = tensors(comm), calls(comm)
    x, ids = good["x"], good["expert_ids"]
    ones = torch.ones(TOKENS, TOP_K, device=comm.device)
    cases: list[tuple[type[Exception], dict[str, Any], tuple[str, ...]]] = [
        (ArgumentError, {"x": [1.0]}, ("x is list", "torch.Tensor")),
        (DtypeError, {"x": x.int()}, ("x is torch.int32", "pass x.float()")),
        (ShapeError, {"x": x[0]}, ("x has shape (16,)", "[tokens, width]")),
        (DeviceError, {"x": x.to("meta")}, ("x is on meta",)),
        (ArgumentError, {"expert_ids": [[1]]}, ("expert_ids is list",)),
        (DtypeError, {"expert_ids": ids.float()}, ("expert_ids is torch.float32", ".long()")),
        (ShapeError, {"expert_ids": ids[None]}, ("(1, 4, 2)", "[tokens, top_k] or [tokens]")),
        (ShapeError, {"expert_ids": ids[1:]}, ("(3, 2)", "[4, top_k]", "tokens of x")),
        (ShapeError, {"expert_ids": ids[:, :0]}, ("(4, 0)", "top_k >= 1")),
        (DeviceError, {"expert_ids": ids.to("meta")}, ("expert_ids is on meta",)),
        (ArgumentError, {"weights": 1.0}, ("weights is float",)),
        (DtypeError, {"weights": ids}, ("weights is torch.int64", "pass weights.float()")),
        (ShapeError, {"weights": ones[:, :1]}, ("(4, 1)", "(4, 2)", "shape of expert_ids")),
        (DeviceError, {"weights": ones.to("meta")}, ("weights is on meta",)),
        (ArgumentError, {"active": [1, 1]}, ("active is list",)),
        (DtypeError, {"active": ids[:2, 0]}, ("active is torch.int64", "pass active.bool()")),
        (ShapeError, {"active": ids[:, 0].bool()}, ("(4,)", "[2]", "one element per rank")),
        (ShapeError, {"quantize": "fp8"}, ("width 16", "multiple of 128", "pad the rows")),
    ]
    for error, wrong, words in cases:
        with raises(error, "expert_dispatch", *words):
            ops.expert_dispatch(**{**good, **wrong})
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_a_handle_of_a_ring_with_another_size(comm: Any) -> None:
    ring = commlib.new_ring(92, [0, 1])
    assert ring is not None
    sent = ops.expert_dispatch(**{**tensors(comm), "num_experts": 1}, ring_id=92)
    commlib.close_ring(92)
    ring = commlib.new_ring(92, [comm.rank])
    assert ring is not None
    with raises(RingError, "expert_combine on ring 92", "2 ranks", "created again"):
        ops.expert_combine(sent.rows, sent.handle)
    commlib.close_ring(92)


@runs_on("ranks")
def test_refused_combines(comm: Any) -> None:
    sent = ops.expert_dispatch(**tensors(comm))
    y, handle = sent.rows, sent.handle
    before = calls(comm)
    cases: list[tuple[type[Exception], Any, Any, tuple[str, ...]]] = [
        (ArgumentError, y, sent, ("handle is Dispatched", "ops.expert_dispatch returns")),
        (ArgumentError, [1.0], handle, ("y is list",)),
        (ArgumentError, None, handle, ("y is NoneType",)),
        (DtypeError, y.int(), handle, ("y is torch.int32", "pass y.float()")),
        (ShapeError, y[0], handle, ("(20, 16)", "[2, 20, width]")),
        (ShapeError, y[:, :7], handle, ("(2, 7, 16)", "[2, 20, width]", "capacity of the handle")),
        (DeviceError, y.to("meta"), handle, ("y is on meta",)),
    ]
    for error, one, other, words in cases:
        for weighted in (True, False):
            with raises(error, "expert_combine", *words):
                ops.expert_combine(one, other, weighted=weighted)
    with raises(RingError, f"ring {ABSENT_RING} does not exist"):
        ops.expert_combine(y, handle._replace(ring_id=ABSENT_RING))
    with raises(ArgumentError, "ring.group"), comm.group():
        ops.expert_combine(y, handle)
    with raises(ArgumentError, "ring.group"), comm.group():
        ops.expert_dispatch(**tensors(comm))
    assert_equal(calls(comm), before, "calls launched by refused ones")


OTHER: list[tuple[type[Exception], dict[str, list[Any]], tuple[str, ...]]] = [
    (ArgumentError, {"num_experts": [3, 4]}, ("num_experts is [3, 4], by rank", "all ranks")),
    (ShapeError, {"capacity": [20, 21]}, ("capacity is [20, 21], by rank", "the same number")),
    (ShapeError, {"top_k": [1, 2]}, ("expert_ids has [1, 2] choices per token", "fill rows up")),
    (
        DtypeError,
        {"dtype": [torch.float32, torch.float64]},
        ("x is [torch.float32, torch.float64], by rank", "cast x"),
    ),
    (ShapeError, {"width": [128, 256]}, ("x has width [128, 256], by rank", "pad the rows")),
    (ArgumentError, {"quantize": [None, "fp8"]}, ("quantize is [None, 'fp8'], by rank",)),
]


def dispatched(comm: Any, ring_id: int, **kwargs: Any) -> Any:
    """Dispatch with numbers of this test; ``how`` has other ones."""
    kwargs = {"num_experts": 3, "capacity": 20, "top_k": 2, "width": 128, **kwargs}
    ids = torch.zeros((TOKENS, kwargs.pop("top_k")), dtype=torch.int64, device=comm.device)
    dtype, width = kwargs.pop("dtype", torch.float32), kwargs.pop("width")
    x = torch.ones((TOKENS, width), dtype=dtype, device=comm.device)
    return ops.expert_dispatch(x, ids, ring_id=ring_id, **kwargs)


@runs_on("ranks")
def test_ranks_with_other_numbers(comm: Any) -> None:
    """Each rank gets the error from its first such call, and nothing is launched."""
    with another(comm, 102) as ring:
        before = calls(ring)
        for error, options, words in OTHER:
            mine = {name: values[comm.rank] for name, values in options.items()}
            for _ in range(2):
                with raises(error, "expert_dispatch on ring 102", *words):
                    dispatched(comm, 102, **mine)
        compiled = compile_whole(lambda: dispatched(comm, 102, capacity=20 + comm.rank).rows)
        with raises(ShapeError, "capacity is [20, 21], by rank"):
            compiled()
        assert_equal(calls(ring), before, "calls launched by refused ones")
        sent = dispatched(comm, 102)
        y = sent.rows[..., : 64 * (comm.rank + 1)]
        with raises(ShapeError, "expert_combine on ring 102", "y has width [64, 128], by rank"):
            ops.expert_combine(y, sent.handle)
        compared = dispatched(comm, 102), ops.expert_combine(sent.rows, sent.handle)
        assert_equal(tuple(compared[1].shape), (TOKENS, 128), "sums")


@runs_on("ranks")
def test_numbers_that_only_one_rank_changes(comm: Any) -> None:
    """A rank that compares alone raises at the ring's deadline, and names the others."""
    dispatched(comm, 0)  # compiles the kernels
    seconds = 15 if on_gpu(comm) else 5  # NCCL must connect within it
    with another(comm, 103, timeout=seconds) as ring:
        dispatched(comm, 103)
        ring.barrier()
        words = "waiting for positions [0]", "capacity is 21", "pass the same numbers"
        if comm.rank == 1:
            with raises(CommTimeout, "expert_dispatch on ring 103", f"after {seconds} s", *words):
                dispatched(comm, 103, capacity=21)
        settle(comm)
        comm.barrier()


@runs_on("ranks")
def test_compared_calls(comm: Any) -> None:
    """With FLAGS_comm_check=2 no rank waits where one rank alone changes its numbers."""
    with flags.override(flags.CHECK, 2), another(comm, 104) as ring:
        dispatched(comm, 104)
        before = calls(ring)
        words = ["detected mismatch", "rank 1: expert_dispatch with new numbers at"]
        if comm.rank == 1:
            words += ["the first expert_dispatch", "capacity is 21"]
        with raises(MismatchError, *words):
            dispatched(comm, 104, capacity=20 + comm.rank)
        assert_equal(calls(ring), before, "calls launched by refused ones")
        dispatched(comm, 104)


@runs_on("ranks")
def test_compared_calls_of_kernels(comm: Any) -> None:
    """Equal numbers of rows are not enough: a launch with other numbers is refused."""
    x = torch.zeros(120, 8, device=comm.device)
    good = ExpertSpec(3, 20, 2, x.dtype, 8)
    launched = []

    def launch(*given: Any) -> None:
        launched.append(given)

    with flags.override(flags.CHECK, 2), another(comm, 105) as ring:

        def call(spec: ExpertSpec) -> None:
            ring._expert_call("expert_combine", launch, x, x, (spec,), True)

        for name, value in {"num_experts": 4, "capacity": 10, "top_k": 3, "quantize": True}.items():
            shown = f"{name}=fp8" if name == "quantize" else f"{name}={value}"
            words = "rank 0: expert_combine(num_experts=3, capacity=20, top_k=2)", "rank 1: expert"
            with raises(MismatchError, *words, shown):
                call(good._replace(**{name: value}) if comm.rank == 1 else good)
        assert_equal(launched, [], "launched")
        call(good)
        assert_equal(len(launched), 1, "launched once the numbers are equal")


@runs_on("three_ranks")
def test_masked_ranks_with_other_numbers(comm: Any) -> None:
    if comm.rank == 1:  # it makes no call, so no rank may wait for it
        return
    active = torch.tensor([True, False, True])
    words = "capacity is [20, 'left out', 22], by rank", "the same number"
    for _ in range(2):
        with raises(ShapeError, "expert_dispatch", *words):
            dispatched(comm, 0, capacity=20 + comm.rank, active=active)
    dispatched(comm, 0, active=active)


@runs_on("three_ranks")
def test_masks_that_differ(comm: Any) -> None:
    """Ranks that take part compare their masks; a rank that another leaves out has a deadline."""
    active = torch.tensor([True, True, comm.rank != 1])
    last = (
        "left out" if comm.rank == 1 else True
    )  # rank 1 has no mask from the rank that it leaves out
    seen, same = f"active[2] is {[True, False, last]}, by rank", "pass the same active="
    with another(comm, 107, timeout=4) as ring:
        ring.barrier()
        if comm.rank < 2:
            with raises(ArgumentError, "expert_dispatch on ring 107", seen, same):
                dispatched(comm, 107, active=active)
        else:
            words = "did not finish within 4 s", "active leaves out all ranks but [0, 1, 2]", same
            with raises(CommTimeout, "rank 2 of 3", *words):
                dispatched(comm, 107, active=active)
        comm.barrier()


@runs_on("three_ranks")
def test_masked_ranks_are_not_compared(comm: Any) -> None:
    """A rank that is left out makes no call, at any level of the check of calls."""
    with flags.override(flags.CHECK, 2), another(comm, 106) as ring:
        active = torch.tensor([True, False, True])
        if comm.rank != 1:
            dispatched(comm, 106, active=active)
        ring.barrier()
