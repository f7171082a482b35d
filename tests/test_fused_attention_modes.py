"""ops.fused_attention compiled, captured, cached, mixed, on streams and in checkpoints."""

from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from commlib import graph
from commlib.ops.tensor_parallel.attention import _probabilities as probabilities_of
from tests.support.attention_block import BATCH, DIM, HEADS, TOKENS, Case, Torches, attention
from tests.support.checks import assert_bits_equal, assert_equal, on_gpu
from tests.support.operator import calls, compile_whole, generating
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on


def small(comm: Any, **how: Any) -> tuple[Any, Torches, torch.Tensor]:
    """Return a block as a function of its tensors, these, and the gradient of its result."""
    case = Case(comm, torch.float32)
    inputs = case.tensors()
    names = list(inputs)

    def body(*tensors: torch.Tensor) -> Any:
        return attention(**dict(zip(names, tensors, strict=True)), **how)

    return body, inputs, case.on_device(case.grad)


def both_ways(call: Any, given: Torches, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of one forward and backward."""
    y = call(*given.values())
    return [y.detach().clone(), *torch.autograd.grad(y, list(given.values()), grad)]


@runs_on("ranks", deadline=240)
def test_compiled(comm: Any) -> None:
    """Compiled code gives eager's values and gradients with as many collectives; one graph."""
    for kwargs in ({"is_causal": True}, {"pre_layer_norm": True}):
        body, inputs, grad = small(comm, **kwargs)
        call = compile_whole(body)
        both_ways(call, inputs, grad)
        before = calls(comm)
        actual = both_ways(call, inputs, grad)
        assert_equal(calls(comm) - before, 2, "collectives")
        for one, other in zip(actual, both_ways(body, inputs, grad), strict=True):
            assert_bits_equal(one, other, f"{kwargs}", atol=2e-5)


def generated(comm: Any) -> None:
    """Inductor's dropout: a mask for all ranks after the sum, different ones inside."""
    for name in ("dropout_rate", "attn_dropout_rate"):
        body, inputs, _ = small(comm, pre_layer_norm=True, add_residual=False, **{name: 0.5})
        call = compile_whole(body, backend="inductor")
        torch.manual_seed(5)
        y = call(*inputs.values()).detach()
        torch.manual_seed(5)
        assert_bits_equal(call(*inputs.values()).detach(), y, f"{name}: the same seed")
        assert_equal(bool((call(*inputs.values()) == y).all()), False, f"{name}: another draw")
        share = float((y == 0).double().mean())
        assert_equal(
            0.3 < share < 0.7 if name == "dropout_rate" else share == 0, True, f"{name}: {share}"
        )
        rows = comm.exchange([int(y.view(torch.int32).long().sum())])
        assert_equal(len({row[0] for row in rows}), 1, f"{name}: results over the ranks")


def test_generated_code(unified_ranks: Ranks) -> None:
    generating(unified_ranks)(generated, deadline=300)


@runs_on("ranks", deadline=120)
def test_captured(comm: Any) -> None:
    """A captured forward and backward: eager's bits, fresh masks at each replay."""
    body, inputs, grad = small(comm, pre_layer_norm=True)
    fast = graph.capture(body, verify=False)
    for _ in range(3):
        before = calls(comm)
        actual = both_ways(fast, inputs, grad)
    # The host launches those of a CPU's replay again; on a GPU the graph has them.
    assert_equal(calls(comm) - before, 0 if on_gpu(comm) else 2, "calls from the host in a replay")
    (row,) = graph.report(fast)
    assert_equal(len(row["collectives"]), 2, "collectives of the graphs")
    for one, other in zip(actual, both_ways(body, inputs, grad), strict=True):
        assert_bits_equal(one, other, "captured")
    body, inputs, grad = small(comm, dropout_rate=0.5, attn_dropout_rate=0.5)
    torch.manual_seed(9)
    want = [both_ways(body, inputs, grad) for _ in range(4)]
    fast = graph.capture(body)
    torch.manual_seed(9)
    for number, expected in enumerate(want):
        for one, other in zip(both_ways(fast, inputs, grad), expected, strict=True):
            assert_bits_equal(one, other, f"captured with dropout, call {number}")


@runs_on("ranks")
def test_cache(comm: Any) -> None:
    """Tokens one by one and in parts over a cache give what all tokens give at once."""
    case = Case(comm)
    inputs = case.tensors()
    x, heads = inputs.pop("x").detach(), HEADS // comm.size
    with torch.no_grad():
        full = attention(x, **inputs, is_causal=True)
        cache = torch.full((2, BATCH, heads, TOKENS + 2, DIM), torch.nan, dtype=x.dtype).to(
            x.device
        )
        for first, end in ((0, 2), (2, 3), (3, TOKENS)):
            part = attention(
                x[:, first:end], **inputs, is_causal=True, cache_kv=cache, position=first
            )
            assert_bits_equal(part, full[:, first:end], f"tokens {first} to {end}", atol=1e-12)
    assert_equal(bool(cache[:, :, :, :TOKENS].isfinite().all()), True, "positions that are filled")
    assert_equal(bool(cache[:, :, :, TOKENS:].isnan().all()), True, "positions that are free")


@runs_on("cpu_ranks")
def test_inference(comm: Any) -> None:
    """The operator with a norm after the sum does the last step of inference in one call."""
    case = Case(comm, torch.float32)
    inputs = case.tensors()
    trained = attention(**inputs)
    before = calls(comm)
    with torch.no_grad():
        actual = attention(**inputs)
    assert_equal((calls(comm) - before, comm.report()["last"]), (1, "all_reduce"), "collectives")
    assert_bits_equal(actual, trained.detach(), "inference", atol=1e-5)


@runs_on("ranks")
def test_mixed_precision(comm: Any) -> None:
    """Under autocast matmuls and the sum have 16 bits, parameters and the residual 32."""
    case = Case(comm, torch.float32)
    inputs = case.tensors()
    with torch.autocast(comm.device.type, torch.bfloat16):
        y = attention(**inputs, pre_layer_norm=True)
    y.backward(case.on_device(case.grad))
    wide, case.dtype = case.dtype, torch.bfloat16  # the tolerance
    grads = {name: case.gradient(name, t) for name, t in inputs.items()}
    assert_equal({g.dtype for g in (y, *grads.values())}, {wide}, "dtypes")
    case.check(y.detach().to(case.dtype), grads, "autocast", before=True)
    sixteen = {n: t.detach().bfloat16() for n, t in inputs.items()}
    wide_norm = {name: inputs[name].detach() for name in ("ln_weight", "ln_bias")}
    actual = attention(**(sixteen | wide_norm))
    assert_bits_equal(actual, attention(**sixteen), "float32 parameters of the norm", atol=0.05)
    assert_equal(actual.dtype, torch.bfloat16, "dtype with a wide norm")


@runs_on("ranks")
def test_streams(comm: Any) -> None:
    """Reducing on the ring's stream gives the same bits."""
    case = Case(comm)
    on_calc = case.run(case.tensors())
    on_comm = case.run(case.tensors(), use_calc_stream=False)
    assert_bits_equal(on_comm[0], on_calc[0], "result")
    for name, grad in on_calc[1].items():
        assert_bits_equal(on_comm[1][name], grad, name)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@runs_on("ranks")
def test_checkpoint(comm: Any, rate: float) -> None:
    """A checkpoint recomputes the forward with its masks: the gradients are the same."""
    body, inputs, grad = small(comm, dropout_rate=rate, attn_dropout_rate=rate)

    def again(*tensors: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(body, *tensors, use_reentrant=False)

    torch.manual_seed(2)
    want = both_ways(body, inputs, grad)
    torch.manual_seed(2)
    for one, other in zip(both_ways(again, inputs, grad), want, strict=True):
        assert_bits_equal(one, other, f"rate {rate}")


@runs_on("ranks")
def test_queries_that_see_nothing(comm: Any) -> None:
    """Padding on the left hides all keys from the first queries, which have zeros as in torch."""
    mask = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool, device=comm.device)
    mask[0, ..., :2] = False
    for rate in (0.0, 0.5):
        kwargs = {"attn_mask": mask, "is_causal": True, "attn_dropout_rate": rate}
        body, inputs, grad = small(comm, **kwargs)
        for number, actual in enumerate(both_ways(body, inputs, grad)):
            assert_equal(bool(actual.isfinite().all()), True, f"rate {rate}, tensor {number}")
    probabilities = probabilities_of(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), None, False)
    hidden = torch.zeros(2, 3, dtype=torch.bool)
    hidden[1] = True
    actual = probabilities_of(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), hidden, False)
    assert_bits_equal(actual[0, 0, 0], torch.zeros(3), "a query that sees nothing")
    assert_bits_equal(actual[0, 0, 1], probabilities[0, 0, 1], "one that sees all")
