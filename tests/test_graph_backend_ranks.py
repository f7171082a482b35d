"""graph.backend: collectives of rings are in the graphs, those of stock groups between them."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import commlib
from commlib import graph, ops
from commlib.errors import CommError
from tests.support.checks import assert_bits_equal, assert_equal, raises, wide
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised

SIZE, STEPS = 8, 4
STRICT = {"on_fail": "raise"}


@torch.library.custom_op(
    "graph_backend_ranks_tests::outside", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def outside(x: Tensor) -> Tensor:
    """An operator that no graph may hold, with a gradient that none may hold either."""
    return x * 2


outside.register_fake(torch.empty_like)
outside.register_autograd(lambda ctx, grad: outside(grad))


def drawn(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (SIZE, SIZE), generator=generator).float()


def rows_of(function: str) -> list[dict[str, Any]]:
    """Return the rows of a compiled function; other tests' graphs may be there on these ranks."""
    return [row for row in graph.report() if f"({function} at " in row["function"]]


@runs_on("unified_ranks")
def test_collectives_of_rings(comm: Any) -> None:
    """Gathered weights and reduced sums, forward and backward, against the formula in NumPy."""

    def projected(x: Tensor, shard: Tensor) -> Tensor:
        return ops.all_reduce(x @ ops.all_gather(shard), backward="identity")

    compiled = torch.compile(projected, backend=graph.backend, fullgraph=True, options=STRICT)
    full = drawn(100)
    shard = torch.nn.Parameter(full.chunk(comm.size)[comm.rank].to(comm.device, copy=True))
    for step in range(STEPS):
        x = drawn(step * comm.size + comm.rank).to(comm.device)
        out = compiled(x, shard)
        out.backward(torch.ones_like(out))
        sides = [wide(drawn(step * comm.size + rank)) for rank in range(comm.size)]
        total = np.sum(sides, axis=0)
        assert_bits_equal(out.detach(), torch.tensor(total @ wide(full)).float(), f"step {step}")
        rows = np.split(total.T @ np.ones((SIZE, SIZE)), comm.size)[comm.rank]
        assert_bits_equal(shard.grad, torch.tensor(rows).float(), f"gradient in step {step}")
        shard.grad = None
    (row,) = rows_of("projected")
    names = [text.split()[0] for text in row["collectives"]]
    assert_equal(names, ["all_gather", "all_reduce", "reduce_scatter"], "collectives in graphs")
    assert_equal((row["replays"], row["eager"]), (STEPS - 1, None), "replays")


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "cut"])
@runs_on("unified_ranks")
def test_apply_to_graphs_with_collectives(comm: Any, is_cut: bool) -> None:
    """A trainer that compiles its forward and backward itself, as FX graphs."""
    parts: dict[str, Any] = {}

    def compiler(kind: str) -> Any:
        def compile_part(gm: torch.fx.GraphModule, values: Sequence[Any]) -> Any:
            parts[kind] = graph.backend.apply(gm, values, **STRICT)
            return make_boxed_func(parts[kind])

        return compile_part

    def mixed(x: Tensor, shard: Tensor) -> Tensor:
        full = ops.all_gather(shard)
        y = ops.all_reduce(x @ full, backward="identity")
        return ops.reduce_scatter((outside(y) if is_cut else y) @ full)

    backend = aot_autograd(fw_compiler=compiler("forward"), bw_compiler=compiler("backward"))
    compiled = torch.compile(mixed, backend=backend, fullgraph=True)
    actual, expected = (
        torch.nn.Parameter(drawn(100).chunk(comm.size)[comm.rank].to(comm.device, copy=True))
        for _ in range(2)
    )
    for step in range(STEPS):
        x = drawn(step * comm.size + comm.rank).to(comm.device)
        out, want = compiled(x, actual), mixed(x, expected)
        assert_bits_equal(out.detach(), want.detach(), f"step {step}")
        weights = drawn(50 + step)[: len(out)].to(comm.device)
        for one in (out, want):
            one.backward(weights)
        assert_bits_equal(actual.grad, expected.grad, f"gradient in step {step}")
        actual.grad = expected.grad = None
    for kind, names in (
        ("forward", ["all_gather", "all_reduce", "reduce_scatter"]),
        ("backward", ["all_gather", "reduce_scatter"]),
    ):
        rows = [row for row in graph.report(parts[kind]) if row["eager"] is None]
        assert_equal(len(rows), 1 + is_cut, f"graphs of the {kind}")
        collectives = [text.split()[0] for row in rows for text in row["collectives"]]
        assert_equal(collectives, names, kind)
        assert_equal({row["replays"] for row in rows}, {STEPS - 1}, f"replays of the {kind}")
    torch._dynamo.reset()


@pytest.mark.parametrize("grad", [True, False])
@runs_on("unified_ranks")
def test_cut_graphs_with_collectives(comm: Any, grad: bool) -> None:
    """Parameters stay where they are, and inputs do not, in all parts of a cut."""

    def cut(x: Tensor, shard: Tensor, weight: Tensor) -> Tensor:
        y = outside(x @ ops.all_gather(shard))
        return ops.all_reduce((y @ weight) @ (x @ weight), backward="identity")

    compiled = torch.compile(cut, backend=graph.backend, fullgraph=True, options=STRICT)
    pairs = [
        (torch.nn.Parameter(local), torch.nn.Parameter(full))
        for local, full in ((drawn(100 + comm.rank)[: SIZE // comm.size], drawn(200)),) * 2
    ]
    pairs = [(one.to(comm.device), two.to(comm.device)) for one, two in pairs]
    for step in range(STEPS):
        x, results = drawn(step * comm.size + comm.rank).to(comm.device), []
        with torch.set_grad_enabled(grad):
            for call, (shard, weight) in zip((compiled, cut), pairs, strict=True):
                out = call(x, shard, weight)
                grads = torch.autograd.grad(out.sum(), (shard, weight)) if grad else ()
                results.append([out.detach(), *grads])
        for one, want in zip(*results, strict=True):
            assert_bits_equal(one, want, f"step {step}")
    rows = [row for row in rows_of("cut") if row["eager"] is None]
    assert_equal({row["replays"] for row in rows}, {STEPS - 1}, "replays of all parts")
    copied = {row["bytes_copied"] for row in rows if "forward" in row["function"]}
    assert_equal(copied, {x.nbytes, 2 * x.nbytes}, "bytes copied: x, and x with the cut's y")
    torch._dynamo.reset()


def noisy(x: Tensor, lengths: Tensor, generator: torch.Generator) -> Tensor:
    """Drop out by torch's own generator, add numbers of another, and multiply by host values."""
    dropped = torch.nn.functional.dropout(x, 0.5, True)
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    scale = (lengths * 2 + 1).float()  # on the CPU, also in a graph of a GPU
    return dropped * scale.to(x.device) + noise


@runs_on("unified_ranks")
def test_random_numbers_and_operators_of_the_host(comm: Any) -> None:
    """Replays draw on from both generators, and the host computes before each launch."""
    actual, expected = (torch.Generator(comm.device).manual_seed(7) for _ in range(2))
    x, lengths = drawn(comm.rank).to(comm.device), torch.tensor([1])
    gm = torch.fx.symbolic_trace(noisy)
    replayed = graph.backend.apply(gm, [x, lengths, actual], **STRICT)
    for turn in range(5):
        x, lengths = drawn(10 * turn + comm.rank).to(comm.device), torch.tensor([turn])
        torch.manual_seed(turn // 2)  # a seed of an earlier call, and a new one
        result = replayed(x, lengths, actual)
        torch.manual_seed(turn // 2)
        assert_bits_equal(result, noisy(x, lengths, expected), f"turn {turn}")
    rows = graph.report(replayed)
    assert_equal([(row["replays"], row["eager"]) for row in rows], [(4, None)], "replays")


@runs_on("unified_ranks")
def test_dropout_between_collectives(comm: Any) -> None:
    """Each rank has its own mask, the one of Inductor's code with the same seed."""

    def dropped(x: Tensor, weight: Tensor) -> Tensor:
        y = torch.nn.functional.dropout(ops.all_reduce(x @ weight), 0.5)
        return ops.all_reduce(y @ weight, op="max")

    outputs, weight = [], torch.eye(SIZE, device=comm.device)
    random = {"fallback_random": True}  # the kernel of torch: nothing is generated
    for backend, options in (("inductor", random), (graph.backend, STRICT | random)):
        torch._dynamo.reset()
        compiled = torch.compile(dropped, backend=backend, fullgraph=True, options=options)
        torch.manual_seed(40 + comm.rank)
        with torch.no_grad():
            outputs.append([compiled(drawn(s).to(comm.device) + 9, weight) for s in range(STEPS)])
    for step, (want, one) in enumerate(zip(*outputs, strict=True)):
        assert_bits_equal(one, want, f"step {step}")
    masks = {tuple((one == 0).flatten().tolist()) for one in outputs[1]}
    assert_equal(len(masks), STEPS, "masks, one per step")
    (row,) = [row for row in rows_of("dropped") if row["replays"]]
    assert_equal((row["replays"], row["eager"]), (STEPS - 1, None), "replays")
    torch._dynamo.reset()


def through(x: Tensor, weight: Tensor, group: str) -> Tensor:
    functional = torch.ops._c10d_functional
    reduced: Tensor = functional.wait_tensor(functional.all_reduce(x @ weight, "sum", group))
    return reduced @ weight


def through_ring(x: Tensor, weight: Tensor) -> Tensor:
    return through(x, weight, "ring")


def through_gloo(x: Tensor, weight: Tensor) -> Tensor:
    return through(x, weight, "gloo")


def replayed(comm: Any, name: str, group: Any, f: Any) -> tuple[list[str], list[str]]:
    """Return the collectives in graphs, and why others are outside."""
    torch._C._distributed_c10d._register_process_group(name, group)
    compiled = torch.compile(f, backend=graph.backend, fullgraph=True, options=STRICT)
    weight = torch.eye(SIZE, device=comm.device) * 2
    torch._dynamo.mark_static_address(weight)
    for step in range(STEPS):
        out = compiled(drawn(step * comm.size + comm.rank).to(comm.device), weight)
        sides = [wide(drawn(step * comm.size + rank)) for rank in range(comm.size)]
        total = np.sum(sides, axis=0)
        assert_bits_equal(out, torch.tensor(total * 4).float(), f"step {step}")
    torch._C._distributed_c10d._unregister_process_group(name)
    rows = rows_of(f.__name__)
    assert_equal({row["replays"] for row in rows if not row["eager"]}, {STEPS - 1}, "replays")
    inside = [text.split()[0] for row in rows for text in row.get("collectives", [])]
    return inside, [row["eager"] for row in rows if row["eager"]]


@runs_on("unified_ranks")
def test_functional_collectives_of_our_groups(comm: Any) -> None:
    with initialised(comm, OURS[comm.device.type]):
        collectives = replayed(comm, "ring", dist.group.WORLD, through_ring)
    assert_equal(collectives, (["all_reduce"], []), "collectives inside graphs, and outside")


@runs_on("unified_ranks")
def test_functional_collectives_of_stock_groups(comm: Any, tmp_path: Path) -> None:
    group = dist.ProcessGroup(dist.HashStore(), comm.rank, comm.size)
    store = dist.FileStore(str(tmp_path / "meet"), comm.size)
    gloo = dist.ProcessGroupGloo(store, comm.rank, comm.size)
    group._register_backend(comm.device, dist.ProcessGroup.BackendType.GLOO, gloo)
    text = "_c10d_functional.all_reduce.default on group 'gloo' of torch.distributed"
    collectives = replayed(comm, "gloo", group, through_gloo)
    assert_equal(collectives, ([], [text]), "collectives inside graphs, and outside")


@runs_on("unified_ranks")
def test_a_ring_that_is_closed_first(comm: Any) -> None:
    """Compiled code whose graphs hold calls of a closed ring says so, and is freed."""

    def summed(x: Tensor) -> Tensor:
        return ops.all_reduce(x @ x, ring_id=111)

    for turn in range(2):  # a ring of the same number has new graphs
        commlib.new_ring(111, range(comm.size))
        compiled = torch.compile(summed, backend=graph.backend, fullgraph=True, options=STRICT)
        x = torch.eye(SIZE, device=comm.device) * (turn + 1)
        for step in range(STEPS):
            assert_equal(compiled(x)[0, 0].item(), (turn + 1) ** 2 * comm.size, f"step {step}")
        (row,) = rows_of("summed")
        assert_equal((row["replays"], row["eager"]), (STEPS - 1, None), "replays")
        commlib.close_ring(111)
        with raises(CommError, "ring 111"):
            compiled(x)
        torch._dynamo.reset()
        del compiled
        gc.collect()
        assert_equal(rows_of("summed"), [], "graphs of freed code")
    comm.barrier()
