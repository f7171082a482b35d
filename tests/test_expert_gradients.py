"""Gradients of expert_dispatch and expert_combine, eager and compiled, against formulas."""

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

import commlib
from commlib import ops
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, raises, rounded, sample, wide
from tests.support.experts import Routing, given, random_routing, tokens_of
from tests.support.operator import compile_whole, generating
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

WIDTH = 8


def leaf(x: torch.Tensor, comm: Any) -> torch.Tensor:
    return x.to(comm.device, copy=True).requires_grad_()


def cases(comm: Any) -> list[Routing]:
    return [random_routing(comm.size, seed, tokens=[5] * comm.size) for seed in range(3)]


@runs_on("ranks")
def test_gradient_of_a_dispatch(comm: Any) -> None:
    """A token's gradient is the sum of those of its rows, unweighted."""
    for routing in cases(comm):
        for dtype in (torch.float32, torch.bfloat16):
            x = leaf(tokens_of(routing, WIDTH, dtype)[comm.rank], comm)
            shape = (routing.local, routing.capacity, WIDTH)
            grads = [sample(40 + rank, shape, dtype) for rank in range(comm.size)]
            sent = ops.expert_dispatch(x, **given(routing, comm))
            sent.rows.backward(grads[comm.rank].to(comm.device))
            expected = routing.combined([wide(g) for g in grads], comm.rank, weighted=False)
            assert_bits_equal(x.grad, rounded(expected, dtype), f"{dtype} {routing}")


@runs_on("ranks")
def test_gradients_of_a_combine(comm: Any) -> None:
    """Of y to the bit; of the weights as float32 adds up a dot product."""
    for routing in cases(comm):
        for dtype in (torch.float32, torch.bfloat16):
            arguments = given(routing, comm)
            weights = arguments["weights"].requires_grad_()
            x = tokens_of(routing, WIDTH, dtype)[comm.rank].to(comm.device)
            shape = (routing.local, routing.capacity, WIDTH)
            ys = [sample(50 + rank, shape, dtype) for rank in range(comm.size)]
            grads = tokens_of(routing, WIDTH, dtype, seed=9)
            for asks in (True, False):  # for the gradient of the weights
                handle = ops.expert_dispatch(x, **arguments).handle
                if not asks:
                    handle = handle._replace(weights=arguments["weights"].detach())
                y = leaf(ys[comm.rank], comm)
                out = ops.expert_combine(y, handle)
                out.backward(grads[comm.rank].to(comm.device))
                expected = routing.gradient_of_y([wide(g) for g in grads], comm.rank)
                assert_bits_equal(y.grad, rounded(expected, dtype), f"y: {dtype} {routing}")
            numbers = [wide(g) for g in grads], [wide(y) for y in ys]
            expected = routing.gradient_of_weights(*numbers, comm.rank)
            assert_bits_equal(weights.grad, expected.astype("f4"), f"weights {routing}", atol=1e-5)


@runs_on("ranks")
def test_gradients_of_rows_without_elements(comm: Any) -> None:
    """Rows of width 0 have gradients of their shape; those of the weights are 0."""
    routing = random_routing(comm.size, 7, tokens=[5] * comm.size)
    arguments = given(routing, comm)
    weights = arguments["weights"].requires_grad_()
    x = torch.zeros(5, 0, device=comm.device, requires_grad=True)
    sent = ops.expert_dispatch(x, **arguments)
    for weighted in (True, False):
        ops.expert_combine(sent.rows, sent.handle, weighted=weighted).sum().backward(
            retain_graph=True
        )
        assert_bits_equal(x.grad, torch.zeros(5, 0), f"x, weighted={weighted}")
        assert_bits_equal(weights.grad, torch.zeros(weights.shape), f"weights, {weighted}")


def layer(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    scale: torch.Tensor,
    num_experts: int,
    capacity: int,
    ring_id: int = 0,
) -> torch.Tensor:
    """Apply an expert that multiplies by a scale."""
    sent = ops.expert_dispatch(
        x, ids, num_experts, capacity, ring_id, weights=weights, on_overflow="drop"
    )
    y = torch.tanh(sent.rows * scale)
    return ops.expert_combine(y, sent.handle)


def arguments_of(comm: Any, routing: Routing, seed: int = 0) -> tuple[Any, ...]:
    x = leaf(tokens_of(routing, WIDTH, torch.float32, seed)[comm.rank], comm)
    made = given(routing, comm)
    local = sample(comm.rank, (routing.local, 1, WIDTH), torch.float32, seed)
    tensors = x, made["expert_ids"], made["weights"].requires_grad_(), leaf(local, comm)
    return *tensors, routing.num_experts, routing.capacity


def gradients(out: torch.Tensor, arguments: tuple[Any, ...]) -> list[torch.Tensor]:
    wanted = [arguments[0], arguments[2], arguments[3]]
    return [out, *torch.autograd.grad(out.square().sum(), wanted)]


@runs_on("ranks")
def test_saved_tensors_are_read_once(comm: Any) -> None:
    """Checkpoints without reentrant autograd, and hooks that hand over a tensor once, work."""
    for weighted in (True, False):
        routing = random_routing(comm.size, 7, tokens=[5] * comm.size)

        def run(
            x: Any, ids: Any, weights: Any, scale: Any, *numbers: int, on: bool = weighted
        ) -> Any:
            sent = ops.expert_dispatch(x, ids, *numbers, weights=weights, on_overflow="drop")
            y = ops.expert_combine(torch.tanh(sent.rows * scale), sent.handle, weighted=on)
            return y + 0 * weights.sum()

        arguments = arguments_of(comm, routing)
        expected = gradients(run(*arguments), arguments)
        again = checkpoint(run, *arguments, use_reentrant=False)
        for actual, want in zip(gradients(again, arguments), expected, strict=True):
            assert_bits_equal(actual, want, f"checkpoint, weighted={weighted}")
        with torch.autograd.graph.saved_tensors_hooks(lambda x: [x], lambda held: held.pop()):
            out = run(*arguments)
        for actual, want in zip(gradients(out, arguments), expected, strict=True):
            assert_bits_equal(actual, want, f"hooks, weighted={weighted}")


@runs_on("ranks")
def test_a_layer_is_the_same_on_one_rank(comm: Any) -> None:
    """Experts over several ranks train as torch operators on all tokens of one process do."""
    routing = random_routing(comm.size, 21, tokens=[6, 3], top_k=2, num_experts=4, capacity=9)
    arguments = arguments_of(comm, routing)
    actual = gradients(layer(*arguments), arguments)
    every = [leaf(x, comm) for x in tokens_of(routing, WIDTH, torch.float32)]
    scales = [sample(r, (routing.local, 1, WIDTH), torch.float32) for r in range(comm.size)]
    all_scales = torch.cat(scales)[:, 0].to(comm.device).requires_grad_()
    weights = [leaf(torch.from_numpy(w), comm) for w in routing.weights]
    outs = []
    for x, ids, weight in zip(every, routing.ids, weights, strict=True):
        chosen = torch.tensor(ids, device=comm.device)
        valid = (chosen >= 0) & (chosen < routing.num_experts)
        y = torch.tanh(x[:, None] * all_scales[chosen.clamp(0, routing.num_experts - 1)])
        outs.append((torch.where(valid, weight, 0.0)[..., None] * y).sum(1))
    torch.stack([out.square().sum() for out in outs]).sum().backward()
    span = slice(comm.rank * routing.local, (comm.rank + 1) * routing.local)
    assert all_scales.grad is not None
    expected = (
        outs[comm.rank].detach(),
        *(every[comm.rank].grad, weights[comm.rank].grad, all_scales.grad[span, None]),
    )
    for name, one, other in zip(("out", "x", "weights", "scale"), actual, expected, strict=True):
        assert other is not None
        assert_bits_equal(one.detach(), other.cpu(), name, atol=2e-5)


def compiled(comm: Any, backend: str) -> None:
    """One graph for any choices; results and gradients are eager's, bit for bit."""
    compiled_fn = compile_whole(layer, backend=backend)
    for seed in range(3):
        routing = random_routing(
            comm.size, 30 + seed, tokens=[4 + seed] * 2, top_k=2, num_experts=5, capacity=3
        )
        arguments = arguments_of(comm, routing, seed)
        pairs = zip(
            gradients(compiled_fn(*arguments), arguments),
            gradients(layer(*arguments), arguments),
            strict=True,
        )
        for one, other in pairs:
            if backend == "aot_eager":
                assert_bits_equal(one, other, f"compiled {seed}")
            else:  # Inductor has its own tanh
                assert_bits_equal(one, other, f"generated {seed}", atol=1e-5)


def test_compiled(ranks: Ranks) -> None:
    ranks(compiled, "aot_eager")


def test_generated_code(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(compiled, "inductor", deadline=240)


@runs_on("ranks")
def test_second_derivatives(comm: Any) -> None:
    """A dispatch is linear and has them; a weighted sum refuses them."""
    routing = random_routing(comm.size, 2, tokens=[4, 4])
    x = leaf(tokens_of(routing, WIDTH, torch.float64)[comm.rank], comm)
    arguments = given(routing, comm)
    sent = ops.expert_dispatch(x, **arguments)
    (first,) = torch.autograd.grad(sent.rows.square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    rows = (sent.handle.positions >= 0).sum(1, keepdim=True)
    assert_bits_equal(second, (2.0 * rows.double()).expand(x.shape).contiguous(), "of a dispatch")
    y = leaf(torch.ones(sent.rows.shape, dtype=torch.float64), comm)
    out = ops.expert_combine(y, sent.handle)
    (first,) = torch.autograd.grad(out.square().sum(), y, create_graph=True)
    with raises(ArgumentError, "the gradient of expert_combine has no gradient"):
        first.sum().backward()
    comm.barrier()


@runs_on("ranks")
def test_gradcheck(comm: Any) -> None:
    """The sum of all ranks' results is one function of all ranks' tokens."""
    routing = random_routing(comm.size, 4, tokens=[2, 3], top_k=2, num_experts=3, capacity=4)
    lengths = [len(ids) for ids in routing.ids]
    arguments = given(routing, comm)

    def total(whole: torch.Tensor) -> torch.Tensor:
        x = ops.identity(whole).split(lengths)[comm.rank]
        sent = ops.expert_dispatch(x, **arguments)
        out = ops.expert_combine(sent.rows.sin(), sent.handle)
        loss: torch.Tensor = ops.all_reduce(out.cos().sum(), backward="identity")
        return loss

    every = torch.cat(tokens_of(routing, 2, torch.float64))
    torch.autograd.gradcheck(total, leaf(every, comm))


@runs_on("ranks", deadline=120)
def test_opcheck(comm: Any) -> None:
    routing = random_routing(comm.size, 6, tokens=[4, 2], top_k=2)
    x = tokens_of(routing, WIDTH, torch.float32)[comm.rank].to(comm.device)
    made = given(routing, comm)
    numbers = 0, comm.size, routing.num_experts, routing.capacity
    operators, check = torch.ops.commlib, torch.library.opcheck
    for one in (x, x.clone().requires_grad_()):
        ids = made["expert_ids"], made["weights"], None
        check(operators.expert_dispatch.default, (one, *ids, *numbers, False, False, True))
    handle = ops.expert_dispatch(x, **made).handle
    rest = *handle[:4], None, *numbers, True, True, False
    y = sample(1, (routing.local, routing.capacity, 3), torch.float32).to(comm.device)
    for one in (y, y.clone().requires_grad_()):
        check(operators.expert_combine.default, (one, handle.weights, *rest))
        check(operators.expert_sums.default, (one, *rest))
    for one in (x, x.clone().requires_grad_()):
        check(operators.expert_rows.default, (one, *rest))


@runs_on("ranks")
def test_a_gradient_on_another_ring(comm: Any) -> None:
    ring = commlib.new_ring(90, [1, 0])
    assert ring is not None
    routing = random_routing(2, 8, tokens=[3, 4], num_experts=4, capacity=5)
    made = {**given(routing, ring), "ring_id": ring}
    x = leaf(tokens_of(routing, WIDTH, torch.float32)[ring.rank], comm)
    sent = ops.expert_dispatch(x, **made)
    ops.expert_combine(sent.rows, sent.handle).sum().backward()
    expected = torch.where(sent.handle.positions >= 0, made["weights"], 0.0).sum(1, keepdim=True)
    assert_bits_equal(x.grad, expected.expand(x.shape).contiguous(), "gradient", atol=1e-6)
    commlib.close_ring(90)
