"""Reductions of several tensors in the order of sums that gloo has for them."""

from functools import partial
from typing import Any

import torch

from commlib.core.collectives.parts import fill, joined
from commlib.core.context import CommContext
from commlib.core.stream_mode import MODES
from commlib.core.tensors import is_symbolic
from commlib.core.validation import check_pair
from commlib.core.work import Work
from commlib.engines.reduction_names import RingReduction

Tensor = torch.Tensor


def is_flat(ring: CommContext, tensors: list[Tensor]) -> bool:
    """Return True for two tensors or more of one dtype, on the ring's device, with values."""
    first = tensors[0]
    return len(tensors) > 1 and all(
        x.dtype is first.dtype and x.device == ring.device and not is_symbolic(x) for x in tensors
    )


def all_reduce_flat(
    ring: CommContext,
    tensors: list[Tensor],
    *,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    timeout: float | None = None,
    **how: Any,
) -> list[Tensor] | Work[list[Tensor]]:
    """Reduce all tensors in one ``all_reduce``, in place; returns its work if it has one.

    Args:
        ring: The ring, on a CPU.
        tensors: Of one dtype. Where they are not adjacent, they are copied together and back.
        use_calc_stream, sync_op, timeout: As ``ring.all_reduce`` takes them.
        how: Its other options.
    """
    for x in tensors:
        check_pair(ring, "all_reduce", x, x)
    flat, mode = joined(tensors), MODES[use_calc_stream, sync_op, True]

    def launch(out: Tensor) -> Any:
        return partial(ring.all_reduce, out, flat, **how)

    return fill(ring, "all_reduce", tensors, launch, mode, timeout)


def reduce_scatter_each(
    ring: CommContext,
    out: Tensor,
    parts: list[Tensor],
    *,
    op: RingReduction,
    factor: float | None = None,
    use_calc_stream: bool = True,
    sync_op: bool = True,
    timeout: float | None = None,
) -> Tensor | Work[Tensor]:
    """Make the ring's ``reduce_scatter`` of a list, by a reduce per part."""
    mode = MODES[use_calc_stream, sync_op, True]
    name = "reduce_scatter"
    return ring._reduce_scatter_parts(name, out, parts, op, factor, mode, timeout, each=True)
