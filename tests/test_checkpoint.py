"""Activation checkpointing of regions with collectives: eager code's values, gradients, order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from commlib import ops
from tests.support.checks import assert_bits_equal, assert_equal, sample
from tests.support.operator import calls, compile_whole, generating
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

Tensor = torch.Tensor
REGISTERED = torch.ops.commlib


def layer(x: Tensor, weight: Tensor) -> Tensor:
    """Return a tensor-parallel layer; the sum is saved for the activation after it."""
    x = ops.identity(x) @ weight
    x = torch.relu(ops.all_reduce(x, backward="identity")) * 0.5
    x = ops.concat(torch.relu(ops.split(x)) * 2)
    return x @ weight.t()


def sharded(x: Tensor, weight: Tensor) -> Tensor:
    """Return a sequence-parallel layer, with collectives in between that nobody uses."""
    hidden = torch.relu(ops.all_gather(x * 2))
    ops.barrier()
    ops.all_reduce(x.detach())
    hidden = torch.relu(ops.all_to_all(hidden @ weight))
    return torch.relu(ops.reduce_scatter(hidden)) * 0.25


def from_root(x: Tensor, weight: Tensor) -> Tensor:
    """Return what root has, and what is reduced to it."""
    x = torch.relu(ops.broadcast(x @ weight, root=1))
    reduced, gathered = ops.reduce(x, root=0), ops.gather(x, root=0)
    both: Tensor = x * reduced + gathered.sum()
    return both


REGIONS = {"layer": layer, "sharded": sharded, "from_root": from_root}


def _collectives_are(policy: CheckpointPolicy, ctx: Any, op: Any, *args: Any, **how: Any) -> Any:
    others = CheckpointPolicy.PREFER_RECOMPUTE
    return policy if getattr(op, "namespace", "") == "commlib" else others


def _selective(policy: CheckpointPolicy) -> dict[str, Any]:
    decide = partial(_collectives_are, policy)
    contexts = partial(create_selective_checkpoint_contexts, decide)
    return {"use_reentrant": False, "context_fn": contexts}


FORMS: dict[str, dict[str, Any]] = {
    "plain": {"use_reentrant": False},
    "reentrant": {"use_reentrant": True},
    "saved": _selective(CheckpointPolicy.MUST_SAVE),
    "recomputed": _selective(CheckpointPolicy.MUST_RECOMPUTE),
}


def two_layers(region: Callable[..., Tensor], x: Tensor, weight: Tensor) -> Tensor:
    """Return the region followed by itself, without any checkpoint."""
    return region(region(x, weight), weight)


def checkpointed(region: Callable[..., Tensor], form: str, x: Tensor, weight: Tensor) -> Tensor:
    """Return the same with each region in a checkpoint."""
    between: Tensor = checkpoint(region, x, weight, **FORMS[form])
    after: Tensor = checkpoint(region, between, weight, **FORMS[form])
    return after


def outcome(comm: Any, call: Callable[..., Tensor]) -> tuple[Tensor, Tensor, Tensor, int]:
    """Return result, both gradients and how many collectives ran; numbers are exact in float64."""
    x, weight = (
        (sample(seed, shape, torch.int32) % 8 - 3).double().to(comm.device).requires_grad_()
        for seed, shape in ((comm.rank, (4, 4)), (7, (4, 4)))
    )
    before = calls(comm)
    out = call(x, weight)
    out.backward(torch.ones_like(out))
    assert x.grad is not None and weight.grad is not None
    return out.detach(), x.grad, weight.grad, calls(comm) - before


def equal_to_eager(comm: Any, backend: str, forms: tuple[str, ...]) -> None:
    """Compiled and eager checkpoints give what no checkpoint gives."""
    for name, region in REGIONS.items():
        want = outcome(comm, partial(two_layers, region))
        for form in forms:
            call: Callable[..., Tensor] = partial(checkpointed, region, form)
            if backend != "eager":
                call = compile_whole(call, backend=backend)
            for turn in range(2):
                *got, count = outcome(comm, call)
                whats = ("result", "gradient", "gradient of the weight")
                for one, other, part in zip(got, want, whats, strict=False):
                    assert_bits_equal(one, other, f"{name}, {form}, {backend}, call {turn}: {part}")
                if backend != "eager":
                    assert_equal(count, want[3], f"{name}, {form}, {backend}: collectives")


def test_eager_checkpoints(ranks: Ranks) -> None:
    ranks(equal_to_eager, "eager", tuple(FORMS))


def test_compiled_checkpoints(ranks: Ranks) -> None:
    ranks(equal_to_eager, "aot_eager", tuple(FORMS), deadline=240)


@pytest.mark.parametrize("form", FORMS)
def test_checkpoints_with_generated_code(unified_ranks: Ranks, form: str) -> None:
    generating(unified_ranks)(equal_to_eager, "inductor", (form,), deadline=240)


def uneven(x: Tensor, weight: Tensor) -> Tensor:
    """Return a chain of collectives each of which has another size than its neighbours."""
    x = torch.relu(ops.all_gather(x @ weight))
    x = torch.relu(ops.all_gather(x) * 2)
    x = torch.relu(ops.reduce_scatter(torch.cat([x, x])))
    x = torch.relu(ops.broadcast(x[:12], root=1))
    return torch.relu(ops.all_reduce(x)[:4])


@runs_on("ranks", deadline=120)
def test_order_of_saved_collectives(comm: Any) -> None:
    """One rank runs compiled code, the other eager code: all calls are in the same order.

    The eager rank saves its collectives, as compiled code always does.
    """
    eager = partial(checkpointed, uneven, "saved")
    compiled = compile_whole(eager, backend="aot_eager")
    want = outcome(comm, partial(two_layers, uneven))
    for ways in ((compiled, eager), (eager, compiled)):
        got = outcome(comm, ways[comm.rank])
        for one, other in zip(got[:3], want, strict=False):
            assert_bits_equal(one, other, "aot_eager")
