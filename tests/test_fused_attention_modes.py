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
    given = case.tensors()
    names = list(given)

    def body(*tensors: torch.Tensor) -> Any:
        return attention(**dict(zip(names, tensors, strict=True)), **how)

    return body, given, case.on_device(case.grad)


def both_ways(call: Any, given: Torches, grad: torch.Tensor) -> list[torch.Tensor]:
    """Return the result and the gradients of one forward and backward."""
    y = call(*given.values())
    return [y.detach().clone(), *torch.autograd.grad(y, list(given.values()), grad)]


@runs_on("ranks", deadline=240)
def test_compiled(comm: Any) -> None:
    """Compiled code gives eager's values and gradients with as many collectives; one graph."""
    for how in ({"is_causal": True}, {"pre_layer_norm": True}):
        body, given, grad = small(comm, **how)
        call = compile_whole(body)
        both_ways(call, given, grad)
        before = calls(comm)
        found = both_ways(call, given, grad)
        assert_equal(calls(comm) - before, 2, "collectives")
        for one, other in zip(found, both_ways(body, given, grad), strict=True):
            assert_bits_equal(one, other, f"{how}", atol=2e-5)


def generated(comm: Any) -> None:
    """Inductor's dropout: a mask for all ranks after the sum, different ones inside."""
    for name in ("dropout_rate", "attn_dropout_rate"):
        body, given, _ = small(comm, pre_layer_norm=True, add_residual=False, **{name: 0.5})
        call = compile_whole(body, backend="inductor")
        torch.manual_seed(5)
        y = call(*given.values()).detach()
        torch.manual_seed(5)
        assert_bits_equal(call(*given.values()).detach(), y, f"{name}: the same seed")
        assert_equal(bool((call(*given.values()) == y).all()), False, f"{name}: another draw")
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
    body, given, grad = small(comm, pre_layer_norm=True)
    fast = graph.capture(body, verify=False)
    for _ in range(3):
        before = calls(comm)
        found = both_ways(fast, given, grad)
    # The host launches those of a CPU's replay again; on a GPU the graph has them.
    assert_equal(calls(comm) - before, 0 if on_gpu(comm) else 2, "calls from the host in a replay")
    (row,) = graph.report(fast)
    assert_equal(len(row["collectives"]), 2, "collectives of the graphs")
    for one, other in zip(found, both_ways(body, given, grad), strict=True):
        assert_bits_equal(one, other, "captured")
    body, given, grad = small(comm, dropout_rate=0.5, attn_dropout_rate=0.5)
    torch.manual_seed(9)
    want = [both_ways(body, given, grad) for _ in range(4)]
    fast = graph.capture(body)
    torch.manual_seed(9)
    for number, expected in enumerate(want):
        for one, other in zip(both_ways(fast, given, grad), expected, strict=True):
            assert_bits_equal(one, other, f"captured with dropout, call {number}")


@runs_on("ranks")
def test_cache(comm: Any) -> None:
    """Tokens one by one and in parts over a cache give what all tokens give at once."""
    case = Case(comm)
    given = case.tensors()
    x, heads = given.pop("x").detach(), HEADS // comm.size
    with torch.no_grad():
        whole = attention(x, **given, is_causal=True)
        cache = torch.full((2, BATCH, heads, TOKENS + 2, DIM), torch.nan, dtype=x.dtype).to(
            x.device
        )
        for first, end in ((0, 2), (2, 3), (3, TOKENS)):
            part = attention(
                x[:, first:end], **given, is_causal=True, cache_kv=cache, position=first
            )
            assert_bits_equal(part, whole[:, first:end], f"tokens {first} to {end}", atol=1e-12)
    assert_equal(bool(cache[:, :, :, :TOKENS].isfinite().all()), True, "positions that are filled")
    assert_equal(bool(cache[:, :, :, TOKENS:].isnan().all()), True, "positions that are free")


@runs_on("cpu_ranks")
def test_inference(comm: Any) -> None:
    """The operator with a norm after the sum does the last step of inference in one call."""
    case = Case(comm, torch.float32)
    given = case.tensors()
    trained = attention(**given)
    before = calls(comm)
    with torch.no_grad():
        found = attention(**given)
    assert_equal((calls(comm) - before, comm.report()["last"]), (1, "all_reduce"), "collectives")
    assert_bits_equal(found, trained.detach(), "inference", atol=1e-5)


@runs_on("ranks")
def test_mixed_precision(comm: Any) -> None:
    """Under autocast matmuls and the sum have 16 bits, parameters and the residual 32."""
    case = Case(comm, torch.float32)
    given = case.tensors()
    with torch.autocast(comm.device.type, torch.bfloat16):
        y = attention(**given, pre_layer_norm=True)
    y.backward(case.on_device(case.grad))
    wide, case.dtype = case.dtype, torch.bfloat16  # the tolerance
    grads = {name: case.gradient(name, t) for name, t in given.items()}
    assert_equal({g.dtype for g in (y, *grads.values())}, {wide}, "dtypes")
    case.check(y.detach().to(case.dtype), grads, "autocast", before=True)
    sixteen = {n: t.detach().bfloat16() for n, t in given.items()}
    wide_norm = {name: given[name].detach() for name in ("ln_weight", "ln_bias")}
    found = attention(**(sixteen | wide_norm))
    assert_bits_equal(found, attention(**sixteen), "float32 parameters of the norm", atol=0.05)
    assert_equal(found.dtype, torch.bfloat16, "dtype with a wide norm")


@runs_on("ranks")
def test_streams(comm: Any) -> None:
    """Reducing on the ring's stream gives the same bits."""
    case = Case(comm)
    here = case.run(case.tensors())
    there = case.run(case.tensors(), use_calc_stream=False)
    assert_bits_equal(there[0], here[0], "result")
    for name, grad in here[1].items():
        assert_bits_equal(there[1][name], grad, name)


@pytest.mark.parametrize("rate", [0.0, 0.5])
@runs_on("ranks")
def test_checkpoint(comm: Any, rate: float) -> None:
    """A checkpoint recomputes the forward with its masks: the gradients are the same."""
    body, given, grad = small(comm, dropout_rate=rate, attn_dropout_rate=rate)

    def again(*tensors: torch.Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(body, *tensors, use_reentrant=False)

    torch.manual_seed(2)
    want = both_ways(body, given, grad)
    torch.manual_seed(2)
    for one, other in zip(both_ways(again, given, grad), want, strict=True):
        assert_bits_equal(one, other, f"rate {rate}")


@runs_on("ranks")
def test_queries_that_see_nothing(comm: Any) -> None:
    """Padding on the left hides all keys from the first queries, which have zeros as in torch."""
    mask = torch.ones(BATCH, 1, 1, TOKENS, dtype=torch.bool, device=comm.device)
    mask[0, ..., :2] = False
    for rate in (0.0, 0.5):
        how = {"attn_mask": mask, "is_causal": True, "attn_dropout_rate": rate}
        body, given, grad = small(comm, **how)
        for number, found in enumerate(both_ways(body, given, grad)):
            assert_equal(bool(found.isfinite().all()), True, f"rate {rate}, tensor {number}")
    probabilities = probabilities_of(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), None, False)
    hidden = torch.zeros(2, 3, dtype=torch.bool)
    hidden[1] = True
    found = probabilities_of(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 3, 4), hidden, False)
    assert_bits_equal(found[0, 0, 0], torch.zeros(3), "a query that sees nothing")
    assert_bits_equal(found[0, 0, 1], probabilities[0, 0, 1], "one that sees all")
