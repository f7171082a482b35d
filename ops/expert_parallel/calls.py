"""One call of the expert exchange: by a kernel where the ring has one, else in the plain form."""

from functools import partial
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.tensors import dense_copy, is_dense
from commlib.ops.expert_parallel import plain_experts
from commlib.ops.expert_parallel.agreement import check_spec
from commlib.ops.expert_parallel.memory import enough_memory, result_needed, rows_needed
from commlib.p2p.experts.tables import (
    FLOAT8,
    GROUP,
    Choices,
    ExpertCounts,
    ExpertSpec,
    ExpertTables,
    local_experts,
)

Tensor = torch.Tensor


def dispatch(
    ring: CommContext, x: Tensor, choices: Choices, spec: ExpertSpec, use_calc_stream: bool
) -> plain_experts.Result:
    """Return rows, scales (of width 0 unless rows are quantized), tables and counts."""
    kernels = ring._expert_kernels(spec)
    with ring._device_reports.raised_after():
        if kernels is None:
            return plain_experts.dispatch(ring, x, choices, spec, use_calc_stream)
        _check_all(ring, "expert_dispatch", spec, choices.active)
        choices = Choices(*map(_dense, choices))
        with enough_memory(ring, partial(rows_needed, ring, spec, 1)):
            rows, scales, tables, counts = outputs(x, choices.ids, spec, ring.size)
        args = (scales if spec.quantize else None, choices, tables, counts, spec)
        ring._expert_call("expert_dispatch", kernels.dispatch, rows, x, args, use_calc_stream)
    return rows, scales, tables, counts


def outputs(x: Tensor, ids: Tensor, spec: ExpertSpec, size: int) -> plain_experts.Result:
    """Return the tensors that a dispatch fills, also of a trace."""
    local, groups = local_experts(spec.num_experts, size), spec.width // GROUP
    rows = local * spec.capacity

    def numbers(*shape: int) -> Tensor:
        return ids.new_empty(shape, dtype=torch.int32)

    def floats(*shape: int) -> Tensor:
        return x.new_empty(shape, dtype=torch.float32)

    dtype = FLOAT8 if spec.quantize else x.dtype
    tables = ExpertTables(numbers(*ids.shape), numbers(*ids.shape), numbers(rows, 4), floats(rows))
    return (
        x.new_empty((local, spec.capacity, spec.width), dtype=dtype),
        floats(local, spec.capacity, groups if spec.quantize else 0),
        tables,
        ExpertCounts(numbers(local), numbers(spec.num_experts)),
    )


def scatter(
    ring: CommContext,
    x: Tensor,
    tables: ExpertTables,
    active: Tensor | None,
    spec: ExpertSpec,
    use_calc_stream: bool,
) -> Tensor:
    """Return the rows of ``x`` where the tables say: [local experts, capacity, width]."""
    kernels = ring._expert_kernels(spec)
    with ring._device_reports.raised_after():
        if kernels is None:
            return plain_experts.scatter(ring, x, tables, active, spec, use_calc_stream)
        _check_all(ring, "expert_scatter", spec, active)
        local = local_experts(spec.num_experts, ring.size)
        with enough_memory(ring, partial(rows_needed, ring, spec, 1)):
            rows = x.new_empty((local, spec.capacity, spec.width))
        args = ExpertTables(*map(_dense, tables)), _dense(active), spec
        ring._expert_call("expert_scatter", kernels.scatter, rows, x, args, use_calc_stream)
    return rows


def combine(
    ring: CommContext,
    y: Tensor,
    tables: ExpertTables,
    active: Tensor | None,
    spec: ExpertSpec,
    use_calc_stream: bool,
) -> Tensor:
    """Return the sum of each token's rows: [tokens, width]."""
    kernels = ring._expert_kernels(spec)
    with ring._device_reports.raised_after():
        if kernels is None:
            return plain_experts.combine(ring, y, tables, active, spec, use_calc_stream)
        _check_all(ring, "expert_combine", spec, active)
        tokens = len(tables.positions)
        with enough_memory(ring, partial(result_needed, ring, spec, tokens)):
            out = y.new_empty((tokens, spec.width))
        args = ExpertTables(*map(_dense, tables)), _dense(active), spec
        ring._expert_call("expert_combine", kernels.combine, out, y, args, use_calc_stream)
    return out


def _check_all(ring: CommContext, collective: str, spec: ExpertSpec, active: Tensor | None) -> None:
    """Compare the numbers of a call of kernels, unless a mask may leave out ranks.

    Such ranks need not make the call, and only the device knows the mask.
    """
    if active is None:
        check_spec(ring, collective, spec)


def _dense(x: Tensor | None) -> Any:
    return x if x is None or is_dense(x) else dense_copy(x)
