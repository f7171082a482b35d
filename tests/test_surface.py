"""The forms of arguments that every operator takes, and the in-place operators."""

import ast
import inspect
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib import export, ops
from commlib.core import collectives
from commlib.core.collectives.broadcast import Broadcast
from commlib.core.collectives.every import Collectives
from commlib.core.collectives.reduce import Reduce
from commlib.core.ring import Ring
from commlib.engines.reductions import unknown
from commlib.errors import ArgumentError, PeerError, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

REDUCTIONS = {
    "sum": dist.ReduceOp.SUM,
    "prod": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "avg": dist.ReduceOp.AVG,
}
WITH_OUT: Any = [
    ops.all_gather,
    ops.all_reduce,
    ops.all_to_all,
    ops.broadcast,
    ops.gather,
    ops.partial_all_gather,
    ops.reduce,
    ops.reduce_scatter,
    ops.scatter,
]


def sample_of(ring: Any) -> torch.Tensor:
    return torch.arange(4.0, device=ring.device).add(float(ring.rank + 1))


@runs_on("ranks")
def test_operators_take_a_ring_or_its_id(ring: Any) -> None:
    x = sample_of(ring)
    expected = ops.all_reduce(x, 0)
    assert_equal(ops.all_reduce(x, ring).tolist(), expected.tolist(), "all_reduce on a ring object")
    gathered = ops.all_gather(x, 0)
    assert_equal(ops.all_gather(x, ring_id=ring).tolist(), gathered.tolist(), "all_gather")
    assert_equal(ops.concat(x, ring).tolist(), gathered.tolist(), "concat")
    ops.barrier(ring)


@runs_on("ranks")
def test_a_closed_ring_is_an_error_even_if_its_id_is_used_again(ring: Any) -> None:
    old = commlib.new_ring(61, [0, 1])
    assert old is not None
    commlib.CommContextManager.instance().close(61)
    with raises(RingError, "ring 61 was closed"):
        ops.all_reduce(sample_of(ring), old)
    commlib.new_ring(61, [0, 1])
    with raises(RingError, "ring 61 was closed"):
        ops.all_reduce(sample_of(ring), old)
    commlib.CommContextManager.instance().close(61)


@runs_on("ranks")
def test_a_reduction_is_no_ring(ring: Any) -> None:
    """Torch's reductions equal numbers, which may be those of rings."""
    commlib.new_ring(1, [0, 1])  # AVG equals 1
    x = sample_of(ring)
    calls: Any = (ops.all_reduce, ops.all_gather, ops.broadcast, ops.all_reduce_)
    for op in (dist.ReduceOp.AVG, dist.ReduceOp(dist.ReduceOp.AVG), dist.ReduceOp.SUM):
        for call in calls:
            with raises(RingError, "ring_id=", "pass the reduction as op="):
                call(x, op)
    for name in ("SUM", "avg"):
        with raises(RingError, f"pass op={name!r} for a reduction"):
            ops.all_reduce(x, name)
    commlib.close_ring(1)


@runs_on("ranks")
def test_rings_are_closed_by_name_and_by_themselves(ring: Any) -> None:
    manager = commlib.CommContextManager.instance()
    commlib.new_ring(62, [0, 1], name="tp")
    with raises(RingError, "ring_id='pp'", "names: ['tp']"):
        ops.barrier("pp")
    with raises(RingError, "pass a name as name='tp'"):
        commlib.new_ring("tp", [0, 1])
    assert manager.has("tp") and not manager.has("pp")
    commlib.close_ring("tp")
    assert not manager.has("tp") and not manager.has(62)
    old = commlib.new_ring(62, [0, 1])
    commlib.close_ring(old)
    new = commlib.new_ring(62, [0, 1])
    commlib.close_ring(old)  # its id belongs to another ring now
    assert manager.has(new) and not manager.has(old)
    with raises(RingError, "ring_id='pp'"):
        commlib.close_ring("pp")
    commlib.close_ring(62)
    assert_equal(manager.rings(), [0], "rings")


@runs_on("ranks")
def test_reductions_have_several_names(ring: Any) -> None:
    x = sample_of(ring)
    wide: Any = torch.cat([x, x])
    forms: Any = [
        form for name, op in REDUCTIONS.items() for form in ((name, name.upper()), (name, op))
    ]
    for name, form in [*forms, ("sum", "Sum"), ("max", dist.ReduceOp(dist.ReduceOp.MAX))]:
        for call, tensor in ((ops.all_reduce, x), (ops.reduce, x), (ops.reduce_scatter, wide)):
            expected = call(tensor, op=name)
            assert_equal(
                call(tensor, op=form).tolist(), expected.tolist(), f"{call.__name__} {form}"
            )
    scaled = ops.all_reduce(x, op="premul_sum", factor=0.5)
    for form in ("PREMUL_SUM", dist.ReduceOp.PREMUL_SUM):
        for call in (ops.all_reduce, ring.all_reduce):
            assert_bits_equal(call(x, op=form, factor=0.5), scaled, f"{form}")
            with raises(ArgumentError, "on ring 0", "premul_sum", "pass factor="):
                call(x, op=form)
    scaling: Any = torch.distributed._make_nccl_premul_sum(0.5)
    scaled_calls: Any = (ops.all_reduce, ring.all_reduce, ring.reduce_scatter)
    kwargs: Any
    for call in scaled_calls:
        for kwargs in ({}, {"factor": 2.0}):
            with raises(ArgumentError, "on ring 0", "PREMUL_SUM", "factor="):
                call(x, op=scaling, **kwargs)
    for form in ("mean", "MEAN", 3, ["sum"]):
        with raises(ArgumentError, "explain on ring 0", "expected one of", "sum"):
            ring.explain(64, x.dtype, form)
        anyhow: Any = (ops.all_reduce, ring.all_reduce, ring.reduce_scatter)
        for call in anyhow:
            with raises(ArgumentError, "expected one of", "sum"):
                call(x, op=form)
            with raises(ArgumentError, f"{call.__name__} on ring 0", "expected one of", "sum"):
                call(x.clone().requires_grad_(), op=form)


@runs_on("ranks")
def test_rings_take_the_same_reductions(ring: Any) -> None:
    x = sample_of(ring)
    for name, op in REDUCTIONS.items():
        expected = ops.all_reduce(x, op=op)
        for form in (name, name.upper(), op, dist.ReduceOp(op)):
            assert_bits_equal(ring.all_reduce(x, op=form), expected, f"all_reduce {form}")
            assert_bits_equal(
                ring.reduce_scatter(x, op=form), expected.chunk(2)[ring.rank], f"parts {form}"
            )
            reduced = ring.reduce(torch.zeros_like(x), x, root=1, op=form)
            assert_bits_equal(reduced, expected if ring.rank == 1 else x * 0, f"reduce {form}")
            assert_equal(ring.explain(64, x.dtype, form), ring.explain(64, x.dtype, name), f"{op}")


@runs_on("cpu_ranks")
def test_bitwise_reductions_have_several_names(ring: Any) -> None:
    x = torch.tensor([12, 10], dtype=torch.int64) >> ring.rank
    forms: Any = (("bor", "BOR"), ("band", dist.ReduceOp.BAND), ("bxor", dist.ReduceOp.BXOR))
    for name, form in forms:
        expected = ring.all_reduce(x, op=name)
        assert_equal(ring.all_reduce(x, op=form).tolist(), expected.tolist(), str(form))
        assert_equal(ops.all_reduce(x, op=form).tolist(), expected.tolist(), f"ops {form}")


@runs_on("ranks")
def test_the_only_tensor_of_a_ring_is_its_input(ring: Any) -> None:
    """A ring's method with one tensor returns what the operator returns."""
    x = torch.arange(12.0, device=ring.device).view(4, 3).t().add(float(ring.rank))  # not dense
    even = x.t()
    before, rows = x.clone(), [1, 3] if ring.rank else [3, 1]
    calls: list[tuple[str, torch.Tensor, dict[str, Any]]] = [
        ("all_reduce", x, {}),
        ("all_gather", x, {}),
        ("reduce_scatter", even, {}),
        ("all_to_all", even, {}),
        ("all_to_all", even, {"in_splits": rows, "out_splits": rows}),
    ]
    for root in (0, 1):
        calls += [(name, x, {"root": root}) for name in ("broadcast", "reduce", "gather")]
        calls.append(("scatter", even, {"root": root}))
    for name, tensor, kwargs in calls:
        expected = getattr(ops, name)(tensor, **kwargs)
        result = getattr(ring, name)(tensor, **kwargs)
        assert_equal(result.shape, expected.shape, f"{name} {kwargs}: shape")
        assert_bits_equal(result, expected, f"{name} {kwargs}")
        work = getattr(ring, name)(tensor, **kwargs, use_calc_stream=False, sync_op=False)
        work.wait()
        assert_bits_equal(work.result, expected, f"{name} {kwargs}: result of the Work")
    assert_bits_equal(x, before, "the input afterwards")


@runs_on("ranks")
def test_none_is_no_input(ring: Any) -> None:
    x: Any = sample_of(ring)
    for name in ("all_to_all", "reduce", "gather"):
        kwargs = {} if name == "all_to_all" else {"root": 0}
        with raises(ArgumentError, f"{name} on ring 0", "x is NoneType", "torch.Tensor"):
            getattr(ring, name)(x, None, **kwargs)
    for name in ("broadcast", "reduce", "gather", "scatter"):
        with raises(PeerError, f"{name} on ring 0", "root=2"):
            getattr(ring, name)(x, root=2)
        with raises(ArgumentError, f"{name} on ring 0", "out is list and there is no x"):
            getattr(ring, name)([x, x], root=ring.rank)
    for name in ("all_gather", "all_to_all"):
        with raises(ArgumentError, f"{name} on ring 0", "out is list and there is no x"):
            getattr(ring, name)([x, x])


@runs_on("ranks")
def test_the_order_of_torch_distributed_is_an_error(ring: Any) -> None:
    x, out = sample_of(ring), sample_of(ring)
    for call in WITH_OUT:
        with raises(ArgumentError, f"{call.__name__} takes x first; pass the output as out="):
            call(out, x)
    point_to_point: Any = (ops.send, ops.recv)
    for call in point_to_point:
        with raises(ArgumentError, f"call ops.{call.__name__}(", "its name as ring_id"):
            call(out, x)
        with raises(PeerError, call.__name__, "peer=None"):
            call(x)


@runs_on("ranks")
def test_a_tensor_is_no_ring(ring: Any) -> None:
    x: Any = sample_of(ring)
    with raises(ArgumentError, "shape (4,); call ops.barrier(ring_id) with a ring, its id"):
        ops.barrier(x)
    with raises(ArgumentError, "call ops.softmax_with_cross_entropy(logits, label, ring_id) with"):
        ops.softmax_with_cross_entropy(x.view(2, 2), x[:2].long(), x)


@runs_on("ranks")
def test_the_error_names_what_is_before_the_ring(ring: Any) -> None:
    """It names what else the call needs too, and the in-place form that was called."""
    x: Any = sample_of(ring)
    for name in ops.__all__:
        call = getattr(ops, name)
        parameters = inspect.signature(call).parameters
        if "ring_id" not in parameters or call in WITH_OUT:
            continue
        before = [*parameters][: [*parameters].index("ring_id")]
        needed = [role for role in parameters if parameters[role].default is inspect._empty]
        after = [role for role in needed if role not in before]
        if "peer" in parameters:
            after = ["peer"]  # its default is refused
        taken = ", ".join([*before, "ring_id", *(f"{role}={role}" for role in after)])
        with raises(ArgumentError, f"{name}: ring_id is", f"call ops.{name}({taken}) with a ring"):
            call(*arguments_before(x, before), x, **dict.fromkeys(after, 0))


def arguments_before(x: torch.Tensor, roles: list[str]) -> list[Any]:
    """Return arguments that are checked before the ring is: numbers and ids must be such."""
    others = {"num_experts": 2, "capacity": 2, "expert_ids": x.long()}
    return [others.get(role, x) for role in roles]


@runs_on("ranks")
def test_the_error_names_the_ring_of_an_optimizer(ring: Any) -> None:
    x: Any = sample_of(ring)
    parameters = [torch.nn.Parameter(x)]
    for role in ("shard_ring", "cross_ring"):
        with raises(ArgumentError, f"{role} is a tensor", f"its id or its name as {role}="):
            ops.DistributedFusedLamb(parameters, ring, **{role: x})
        with raises(RingError, f"{role}=True", "a bool is none"):
            ops.DistributedFusedLamb(parameters, ring, **{role: True})


@runs_on("ranks")
def test_in_place_operators_return_their_argument(ring: Any) -> None:
    for stream in (True, False):
        x, before = sample_of(ring), sample_of(ring)
        expected = ops.all_reduce(before, op="max")
        assert_equal(ops.all_reduce_(x, op="MAX", use_calc_stream=stream) is x, True, "all_reduce_")
        assert_equal(x.tolist(), expected.tolist(), "all_reduce_")
        x = sample_of(ring)
        assert_equal(
            ops.broadcast_(x, ring, root=1, use_calc_stream=stream) is x, True, "broadcast_"
        )
        assert_equal(x.tolist(), ops.broadcast(before, root=1).tolist(), "broadcast_")
        x = sample_of(ring)
        assert_equal(
            ops.reduce_(x, root=1, op="prod", use_calc_stream=stream) is x, True, "reduce_"
        )
        assert_equal(x.tolist(), ops.reduce(before, root=1, op="prod").tolist(), "reduce_")
    with raises(ArgumentError, "no gradient can flow through out", "x.detach()"):
        ops.all_reduce_(sample_of(ring).requires_grad_())


def _reductions_can_be_traced() -> bool:
    """Return True if this torch can trace a comparison of its reductions (2.11 can't)."""

    def compare(x: torch.Tensor, op: Any) -> torch.Tensor:
        return x if op == dist.ReduceOp.SUM else -x

    try:
        torch.compile(compare, backend="eager", fullgraph=True)(torch.ones(1), dist.ReduceOp.SUM)
    except torch._dynamo.exc.Unsupported:
        return False
    return True


@runs_on("unified_ranks")
def test_compiled_code_takes_the_same_forms(ring: Any) -> None:
    def forms(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            ops.all_reduce(x, ring),
            ops.all_reduce(x, op="MAX"),
            ops.reduce_scatter(x, ring, op="SUM"),
        )

    def torch_reductions(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            ops.all_reduce(x, op=dist.ReduceOp.MIN),
            ops.reduce_scatter(x, ring, op=dist.ReduceOp.SUM),
        )

    def replaced(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        ops.all_reduce_(y, ring, op="MAX")
        ops.broadcast_(y, root=1)
        return ops.reduce_(y, ring)

    functions: list[Any] = [forms, replaced, torch_reductions]
    for function in functions if _reductions_can_be_traced() else functions[:2]:
        fast: Any = torch.compile(function, backend="aot_eager", fullgraph=True)
        results, expected = fast(sample_of(ring)), function(sample_of(ring))
        for result, value in zip(results, expected, strict=True):
            assert_equal(result.tolist(), value.tolist(), function.__name__)


METHODS = [
    method
    for name, method in inspect.getmembers(commlib.CommContext, inspect.isfunction)
    if not name.startswith("_")
]
WAITED = [method for method in METHODS if "sync_op" in inspect.signature(method).parameters]
FAMILIES = [ast.parse(path.read_text()) for path in Path(*collectives.__path__).glob("*.py")]


@pytest.mark.parametrize("call", [*WITH_OUT, *METHODS, export.aoti_load_package])
def test_hints_name_no_any(call: Any) -> None:
    assert "Any" not in str(get_type_hints(call)["return"])


def test_no_collective_inherits_another_one() -> None:
    assert len(Collectives.__bases__) > 10
    assert {base.__bases__ for base in Collectives.__bases__} == {(Ring,)}


def test_only_declarations_are_overridden() -> None:
    """They raise, so that none of them can take the place of a method without an error."""
    made: dict[str, list[type]] = {}
    for base in commlib.CommContext.__mro__:
        for name, value in vars(base).items():
            if not name.startswith("__") and (callable(value) or isinstance(value, property)):
                made.setdefault(name, []).append(base)
    twice = {name: bases for name, bases in made.items() if len(bases) > 1}
    assert sorted(twice) == ["_describe", "_open_group", "broadcast", "reduce"]
    assert twice["broadcast"] == [Broadcast, Ring] and twice["reduce"] == [Reduce, Ring]
    assert commlib.CommContext.broadcast is Broadcast.broadcast
    assert commlib.CommContext.reduce is Reduce.reduce
    ring: Any = None
    x = torch.ones(1)
    with pytest.raises(NotImplementedError):
        Ring.broadcast(ring, x, x, root=0)
    with pytest.raises(NotImplementedError):
        Ring.reduce(ring, x, x, root=0, op="sum", factor=None)


@pytest.mark.parametrize(
    "name",
    [
        "commlib.compat",
        "commlib.compat.c10d",
        "commlib.compat.deepspeed",
        "commlib.compat.deepspeed.comm",
        "commlib.compat.deepspeed.graphs",
        "commlib.compat.paddle",
        "commlib.compat.paddle.distributed",
        "commlib.compat.paddle.distributed.fleet",
        "commlib.compat.paddle.distributed.fleet.meta_optimizers",
        "commlib.compat.paddle.distributed.fleet.meta_parallel",
        "commlib.compat.paddle.distributed.mp_ops",
        "commlib.compat.paddle.distributed.pp_utils",
        "commlib.compat.paddle.distributed.stream",
        "commlib.errors",
        "commlib.export",
        "commlib.ops.inference",
    ],
)
def test_modules_list_their_public_names(name: str) -> None:
    module: Any = import_module(name)
    further = ["distributed"] if name == "commlib.compat.paddle" else []
    assert dir(module) == sorted([*module.__all__, *further])
    assert all(hasattr(module, public) for public in dir(module))


def returns_of_overloads(name: str) -> list[str]:
    """Return what the overloads of a ring's method return, from the source."""
    nodes = (node for family in FAMILIES for node in ast.walk(family))
    return [
        ast.unparse(node.returns)
        for node in nodes
        if isinstance(node, ast.FunctionDef) and node.name == name
        if node.decorator_list and node.returns is not None
    ]


@pytest.mark.parametrize("method", [one for one in WAITED if one.__name__ != "group"])
def test_a_ring_returns_a_work_only_without_sync_op(method: Any) -> None:
    returns = returns_of_overloads(method.__name__)
    assert returns
    for waited, unwaited, either in (returns[at : at + 3] for at in range(0, len(returns), 3)):
        assert waited in ("Tensor", "AtRoot", "None", "list[Tensor]")
        assert unwaited == f"Work[{waited}]"
        assert set(either.split(" | ")) == {waited, unwaited}


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("avgg", "avg"),
        ("Mean", "avg"),
        ("mul", "prod"),
        ("or", "bor"),
        ("bxorr", "bxor"),
        (3, "sum"),
    ],
)
def test_the_nearest_reduction(given: Any, near: str) -> None:
    assert unknown(given).endswith(f"pass op={near!r}")
