"""Tensors without memory and modes of torch: carried with the right values, or refused by name.

Every case also asserts how many collectives were launched: a mode that only looks must not change
that number, a fake tensor must keep it at zero.
"""

import warnings
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

from commlib import compat, ops
from commlib.errors import ArgumentError, DeviceError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.modes import UNARY, Names, every, given
from tests.support.operator import calls
from tests.support.ranks import NewRanks
from tests.support.runs_on import runs_on

# -- kinds of tensors ----------------------------------------------------------------------------


@runs_on("ranks")
def test_zero_tensors(comm: Any) -> None:
    """A ZeroTensor has no memory; its values arrive all the same."""
    for name, call in every(comm).items():
        zero = torch._efficientzerotensor((4, 6), device=comm.device)
        assert_bits_equal(call(zero), call(torch.zeros(4, 6, device=comm.device)), name)
    x, zero = given(comm), torch._efficientzerotensor((4, 6), device=comm.device)
    out = torch.full_like(x, 7)
    comm.all_reduce(out, zero)
    assert_bits_equal(out, torch.zeros_like(x), "the ring's own")
    if comm.rank == 0:
        ops.send(zero, peer=1)
    else:
        assert_bits_equal(ops.recv(out + 7, peer=0), torch.zeros_like(x), "received")
    before = calls(comm)
    for call in (lambda: ops.all_reduce(x, out=zero), lambda: comm.all_reduce(zero, x)):
        with raises(ArgumentError, "all_reduce on ring 0", "ZeroTensor", "torch.zeros"):
            call()
    with raises(ArgumentError, "recv on ring 0", "ZeroTensor"):
        ops.recv(zero, peer=1 - comm.rank)
    assert_equal(calls(comm), before, "calls launched by refused ones")


class _Zero(torch.autograd.Function):
    """An identity whose gradient is a ZeroTensor, as torch's own formulas return it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch._efficientzerotensor(grads[0].shape, device=grads[0].device)


@runs_on("ranks")
def test_zero_gradients(comm: Any) -> None:
    for name in ("all_gather", "all_reduce", "all_to_all", "broadcast", "concat", "reduce_scatter"):
        x = given(comm).requires_grad_()
        _Zero.apply(UNARY[name](x)).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert_bits_equal(x.grad, torch.zeros_like(x), name)


def pending(comm: Any) -> None:
    """The result of torch's functional collective is waited for; a DTensor is refused."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as funcol
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh, x = init_device_mesh("cpu", (2,)), given(comm)
    for name, call in every(comm).items():
        total = funcol.all_reduce(x, "sum", mesh)
        assert_equal(type(total).__name__, "AsyncCollectiveTensor", "what torch returns")
        assert_bits_equal(call(total), call(funcol.all_reduce(x, "sum", mesh).wait()), name)
    out = torch.empty_like(x)
    comm.all_reduce(out, funcol.all_reduce(x, "sum", mesh))
    assert_bits_equal(out, ops.all_reduce(ops.all_reduce(x)), "the ring's own")
    total = funcol.all_reduce(x, "sum", mesh)
    with raises(ArgumentError, "pending", "out.wait()"):
        ops.all_reduce(x, out=total)
    spread = distribute_tensor(x, mesh, [Shard(0)])
    before = calls(comm)
    for call in every(comm).values():
        with raises(DeviceError, "is a DTensor", "to_local()"):
            call(spread)
    for verb in (comm.all_reduce, comm.all_to_all):
        with raises(DeviceError, f"{verb.__name__} on ring 0", "DTensor", "x.to_local()"):
            verb(out, spread)
    with raises(DeviceError, "send on ring 0", "x.to_local()"):
        ops.send(spread, peer=1 - comm.rank)
    with raises(DeviceError, "recv on ring 0", "out.to_local()"):
        ops.recv(spread, peer=1 - comm.rank)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    assert_bits_equal(ops.all_reduce(torch.ones(2)), torch.full((2,), 2.0), "the ring afterwards")
    dist.destroy_process_group()


def test_distributed_tensors(new_ranks: NewRanks) -> None:
    with new_ranks(2) as ranks:
        ranks(pending)


class Wrapper(torch.Tensor):
    """A user's wrapper subclass: another tensor holds the values."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> "Wrapper":
        made = torch.Tensor._make_wrapper_subclass(cls, held.shape, device=held.device)
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub lacks func
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        inner = tree_map_only(Wrapper, lambda x: x.held, (args, kwargs or {}))
        out = tree_map_only(torch.Tensor, Wrapper, func(*inner[0], **inner[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, out)


class Named(torch.Tensor):
    """A subclass with its own memory: torch functions alone know of it."""


@runs_on("ranks")
def test_tensors_without_readable_memory(comm: Any) -> None:
    """Refused on the rank that passes it, before anything is launched, with what to pass."""
    x, before = given(comm), calls(comm)
    freed = given(comm)
    freed.untyped_storage().resize_(0)
    rows = [x[:1], x[1:]]
    kinds: list[tuple[torch.Tensor, str, str]] = [
        (Wrapper(x), "Wrapper, a wrapper without its own memory", "pass the tensors that it holds"),
        (freed, "storage was freed", "fill x again"),
        (torch.nested.nested_tensor(rows, layout=torch.jagged), "torch.jagged", "x.values()"),
        (torch.nested.nested_tensor(rows), "nested tensor", "to_padded_tensor(x, 0.0)"),
        (x.to_sparse(), "torch.sparse_coo", "x.to_dense()"),
    ]
    if comm.rank == 1:
        for tensor, cause, remedy in kinds:
            for call in UNARY.values():
                with raises(DeviceError, "rank 1 of 2", cause, remedy):
                    call(tensor)
            with raises(DeviceError, "all_reduce on ring 0", cause, remedy):
                comm.all_reduce(torch.empty_like(x), tensor)
            with raises(DeviceError, "send on ring 0", cause, remedy):
                ops.send(tensor, peer=0)
            with raises(DeviceError, "all_reduce on ring 0", cause, remedy.replace("x", "out", 1)):
                ops.all_reduce(x, out=tensor)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    assert_bits_equal(
        ops.all_reduce(x.as_subclass(Named)), ops.all_reduce(x), "a subclass with memory"
    )
    assert_bits_equal(ops.all_reduce(torch.nn.Parameter(x)), ops.all_reduce(x), "a parameter")


# -- modes ---------------------------------------------------------------------------------------


@runs_on("ranks")
def test_a_mode_sees_every_collective_once(comm: Any) -> None:
    """A user's mode sees every collective once, with the values and calls of eager code."""
    x = given(comm)
    for name, call in every(comm).items():
        before = calls(comm)
        want = call(x)
        launched, before = calls(comm) - before, calls(comm)
        with Names() as mode:
            actual = call(x)
        assert_bits_equal(actual, want, name)
        assert_equal(calls(comm) - before, launched, f"{name}: calls under a mode")
        assert_equal(len(mode.ours()), 1, f"{name}: {mode.ours()}")
        assert_equal(mode.ours()[0].startswith("commlib."), True, f"{name}: {mode.ours()}")


@runs_on("ranks")
def test_forms_under_a_mode(comm: Any) -> None:
    """out=, an asynchronous call, messages, a barrier and gradients under a mode."""
    x = given(comm)
    want, out = ops.all_reduce(x), torch.empty_like(x)
    with Names() as mode:
        assert_equal(ops.all_reduce(x, out=out) is out, True, "what out= returns")
        work = ops.all_reduce(x, use_calc_stream=False, sync_op=False)
        ops.barrier()
        if comm.rank == 0:
            ops.send(x, peer=1)
            ops.partial_recv(out.clone(), peer=1, num=2, id=1)
        else:
            got = ops.recv(torch.empty_like(x), peer=0)
            ops.partial_send(x, peer=0, num=2, id=1)
    assert_bits_equal(out, want, "out=")
    assert_bits_equal(work.wait(), want, "asynchronous")
    if comm.rank == 1:
        assert_bits_equal(got, sample(0, (4, 6), torch.float32), "received")
    assert_equal(len(mode.ours()), 5, mode.ours())
    leaf = x.clone().requires_grad_()
    with Names() as mode:
        ops.all_gather(leaf).square().sum().backward()
    forward_and_back = ["commlib.all_gather.default", "commlib.reduce_scatter.default"]
    assert_equal(mode.ours(), forward_and_back, "forward and backward")
    assert_bits_equal(leaf.grad, 4 * x, "gradient")


@runs_on("ranks")
def test_calls_without_an_operator(comm: Any) -> None:
    """A ring's own collectives and calls that a group delays have no operator: refused by name."""
    x, before = given(comm), calls(comm)
    out = torch.empty_like(x)
    remedy = "call commlib.ops.all_reduce(..., ring_id=0)"
    with Names():
        with raises(ArgumentError, "all_reduce on ring 0", "under Names", remedy):
            comm.all_reduce(out, x)
        with raises(ArgumentError, "under Names", remedy):
            comm.all_reduce_begin(out, x)
        with raises(ArgumentError, "under Names", "commlib.ops.barrier"):
            comm.barrier()
        with raises(ArgumentError, "recv on ring 0", "ring.group()"), comm.group():
            ops.recv(out, peer=1 - comm.rank)
        with raises(ArgumentError, "dynamic_shape"):
            compat.paddle.send_v2(x, peer=1 - comm.rank, dynamic_shape=True)
    with FakeTensorMode():
        fake = torch.ones(4, device=comm.device)
        with raises(ArgumentError, "under FakeTensorMode", remedy):
            comm.all_reduce(fake, fake)
    with raises(ArgumentError, "with a symbolic FakeTensor", remedy):
        comm.all_reduce(fake, fake)
    with raises(ArgumentError, "out is a symbolic FakeTensor", "x is an ordinary Tensor"):
        ops.all_reduce(x, out=fake)
    with raises(ArgumentError, "under ProxyTorchDispatchMode", remedy):
        make_fx(lambda t: comm.all_reduce(t, t))(x)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    with Names(), comm.group():
        total = ops.all_reduce(x[::2])
    assert_bits_equal(total, ops.all_reduce(x[::2]), "in a group under a mode")


@runs_on("ranks")
def test_fake_tensors(comm: Any) -> None:
    """Fake tensors give shapes and launch nothing, inside their mode and without it."""
    x = given(comm)
    wants = {name: call(x) for name, call in every(comm).items()}
    before = calls(comm)
    if comm.rank == 1:  # alone: a launch would wait for rank 0
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(x)
            results = {name: call(fake) for name, call in every(comm).items()}
            ops.barrier()
            ops.send(fake, peer=0)
            ops.recv(fake, peer=0)
            ids = torch.zeros(3, dtype=torch.int64, device=comm.device)
            assert_equal(
                ops.vocab_parallel_embedding(ids, fake, vocab_size=4).shape, (3, 6), "embedding"
            )
        for name, call in UNARY.items():
            results[f"{name} alone"], wants[f"{name} alone"] = call(fake), wants[name]
        for name, result in results.items():
            assert_equal(isinstance(result, FakeTensor), True, f"{name}: {type(result)}")
            assert_equal(tuple(result.shape), tuple(wants[name].shape), name)
            assert_equal((result.dtype, result.device), (wants[name].dtype, x.device), name)
    assert_equal(calls(comm), before, "calls launched for fake tensors")


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@runs_on("ranks")
def test_make_fx(comm: Any, tracing: str) -> None:
    """The graph of make_fx holds each collective, also unused ones, and replays against eager."""
    x = given(comm)

    def body(t: torch.Tensor) -> torch.Tensor:
        ops.all_reduce(t)
        ops.all_reduce(t)
        ops.barrier()
        gathered = ops.all_gather(t * 2)
        total: torch.Tensor = ops.reduce_scatter(gathered) + ops.broadcast(t, root=1)
        return total

    bodies = {"chain": body, **every(comm)}
    for name, call in bodies.items():
        want, before = call(x), calls(comm)
        if tracing == "real" or comm.rank == 1:
            graph = make_fx(lambda t: call(t), tracing_mode=tracing)(x)  # noqa: B023
            held = [n for n in graph.graph.nodes if str(n.target).startswith("commlib.")]
            assert_equal(len(held), 6 if name == "chain" else 1, f"{name}: {graph.code}")
            call = graph if comm.rank == 1 else call
        if tracing != "real":
            assert_equal(calls(comm), before, f"{name}: calls launched by the trace")
        assert_bits_equal(call(x), want, f"{name} replayed")


@runs_on("ranks")
def test_jit_trace(comm: Any) -> None:
    """torch.jit.trace keeps collectives that nobody uses, and equal ones."""
    x = given(comm)

    def body(t: torch.Tensor) -> torch.Tensor:
        ops.barrier()
        ops.all_reduce(t)
        ops.all_reduce(t)
        gathered: torch.Tensor = ops.all_gather(t) * 2
        return gathered

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = torch.jit.trace(body, (x,))
        assert_equal(str(graph.graph).count("commlib::"), 4, str(graph.graph))
        want = body(x)
        call = graph if comm.rank == 1 else body
        for _ in range(3):  # the second call optimises
            before = calls(comm)
            assert_bits_equal(call(x), want, "replayed")
            assert_equal(calls(comm) - before, 4, "collectives")
        with raises(ArgumentError, "under torch.jit.trace", "commlib.ops.all_reduce"):
            torch.jit.trace(lambda t: comm.all_reduce(torch.empty_like(t), t), (x,))


class Functions(TorchFunctionMode):
    """A user's function mode that changes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@runs_on("ranks")
def test_function_modes(comm: Any) -> None:
    x = given(comm)
    for name, call in every(comm).items():
        want = call(x)
        with Functions():
            assert_bits_equal(call(x), want, name)
    for name, call in UNARY.items():
        want = call(x)
        with torch.device("meta"):  # a mode that redirects factories
            actual = call(x)
        assert_bits_equal(actual, want, f"{name} under another default device")
    with Functions():
        comm.all_reduce(x, x)


@runs_on("ranks")
def test_operators_of_several_ops(comm: Any) -> None:
    """Operators of two registered ops, and those whose sizes depend on values."""
    x, one = given(comm), torch.ones(2, dtype=torch.int64, device=comm.device)
    labels = torch.tensor([0, 3, 3, 6], device=comm.device)
    ids = torch.tensor([[0, 1], [1, 0]], device=comm.device)
    both = (one * 2).cpu()
    bodies: dict[str, tuple[Any, int]] = {
        "global_scatter": (lambda: ops.global_scatter(x, both, both), 2),
        "global_gather": (lambda: ops.global_gather(x, both, both), 2),
        "class_center_sample": (lambda: ops.class_center_sample(labels, 4, 2, seed=1)[0], 2),
        "assign_pos": (lambda: ops.assign_pos(ids, one.cumsum(0) * 2), 1),
    }
    for name, (call, count) in bodies.items():
        want = call()
        with Names() as mode:
            assert_bits_equal(call(), want, name)
        assert_equal(len(mode.ours()), count, f"{name}: {mode.ours()}")
    with Names() as mode:
        ops.vocab_parallel_embedding(labels, x, vocab_size=7)
        compat.paddle.c_sync_comm_stream(x)
    assert_equal(mode.ours(), ["commlib.paddle_order.default"], "without a collective")
