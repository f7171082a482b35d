"""Rows to the positions of a dispatch, and their sums back: each is the gradient of the other."""

from typing import Any

import torch

from commlib.core.group import needs_result
from commlib.core.manager import _rings
from commlib.ops.expert_parallel import expert_calls
from commlib.ops.expert_parallel.expert_checks import check_combine
from commlib.ops.registered.library import register
from commlib.ops.registered.traced_ring import sized
from commlib.p2p.expert_tables import ExpertSpec, ExpertTables, local_experts

Tensor = torch.Tensor

# What the ops of an exchange take after their tensors of values: tables, mask, ring, numbers, and
# whether rows are multiplied with the weights of the dispatch.
SCHEMA = (
    "Tensor expert_ids, Tensor positions, Tensor sources, Tensor row_weights, Tensor? active,"
    " int ring_id, int size, int num_experts, int capacity, bool use_calc_stream,"
    " bool weighted"
)


def is_on_host(ring_id: int) -> bool:
    """Return True if the ring is on a CPU, where the exchange reads the mask and the demand.

    Its calls always take a registered op there: a capture then repeats what the host reads.
    """
    ring = _rings.get(ring_id)
    return ring is not None and ring.device.type == "cpu"


def scattered(x: Tensor, *rest: Any) -> Tensor:
    """Return ``x`` of each choice at its position; ``rest`` is what ``SCHEMA`` names."""
    *tables, active, ring_id, size, num_experts, capacity, use_calc_stream, weighted = rest
    ring, lines = sized("expert_dispatch", ring_id, size), ExpertTables(*tables)
    needs_result(ring, "expert_dispatch")
    top_k, width = lines.positions.shape[1], x.shape[1]
    spec = ExpertSpec(num_experts, capacity, top_k, x.dtype, width, weighted=weighted)
    return expert_calls.scatter(ring, x, lines, active, spec, use_calc_stream)


def combined(y: Tensor, *rest: Any) -> Tensor:
    """Return the sum of each token's rows; ``rest`` is what ``SCHEMA`` names."""
    *tables, active, ring_id, size, num_experts, capacity, use_calc_stream, weighted = rest
    ring, lines = sized("expert_combine", ring_id, size), ExpertTables(*tables)
    check_combine(ring, "expert_combine", y, local_experts(num_experts, size), capacity)
    needs_result(ring, "expert_combine")
    top_k, width = lines.positions.shape[1], y.shape[2]
    spec = ExpertSpec(num_experts, capacity, top_k, y.dtype, width, weighted=weighted)
    return expert_calls.combine(ring, y, lines, active, spec, use_calc_stream)


def fake_rows(x: Tensor, *rest: Any) -> Tensor:
    """Return a tensor like ``scattered``."""
    size, num_experts, capacity = rest[6:9]
    return x.new_empty((local_experts(num_experts, size), capacity, x.shape[1]))


def _fake_sums(y: Tensor, expert_ids: Tensor, *_: Any) -> Tensor:
    return y.new_empty((expert_ids.shape[0], y.shape[2]))


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:6])
    ctx.saved = inputs[6:]


def _rows_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return sums(grad, *ctx.saved_tensors, *ctx.saved), *[None] * 11


def _sums_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return rows(grad, *ctx.saved_tensors, *ctx.saved), *[None] * 11


rows = register(
    f"expert_rows(Tensor x, {SCHEMA}) -> Tensor",
    scattered,
    fake_rows,
    setup=_setup,
    backward=_rows_backward,
)
sums = register(
    f"expert_sums(Tensor y, {SCHEMA}) -> Tensor",
    combined,
    _fake_sums,
    setup=_setup,
    backward=_sums_backward,
)
