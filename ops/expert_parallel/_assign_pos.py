"""assign_pos: the tokens in the order of their experts."""

import torch

from commlib.errors import ArgumentError
from commlib.ops.expert_parallel._number_count import number_count
from commlib.ops.expert_parallel.ids import check_ids, check_number
from commlib.ops.registered.library import needs_op, register
from commlib.streams import sees_capture


def assign_pos(
    x: torch.Tensor, cum_count: torch.Tensor, *, total: int | None = None
) -> torch.Tensor:
    """Return the positions of tokens grouped by expert. There is no communication.

    The positions of an expert are in descending order, as in upstream's example: [[0, 2], [0, 2]]
    gives 2, 0, 3, 1. Upstream's GPU kernel leaves that order open. Source: operator ``assign_pos``.

    Args:
        x: Expert ids of any shape, int32 or int64. Ids below 0 or without a count (dropped tokens)
            are skipped.
        cum_count: Inclusive sums of ``number_count``, on the CPU or on the device of ``x``.
        total: ``cum_count[-1]``, if the program has it. Without it the host waits for the number
            and compares ``cum_count`` with ``x``. A capture on a GPU then needs ``cum_count`` on
            the CPU and does not compare it; a capture on a CPU needs ``total``.

    Returns:
        int64 [cum_count[-1]], positions in the flattened ``x``.

    Raises:
        ArgumentError: The counts do not belong to ``x``, or a capture can't read them.
        DtypeError, ShapeError: An argument has another dtype or shape.
        DeviceError: An argument has no memory that can be read; a LayoutError if it is sparse.
    """
    check_ids("assign_pos", "x", x, None)
    check_ids("assign_pos", "cum_count", cum_count)
    if total is not None:
        check_number("assign_pos", "total", total, 0)
        return _ordered(x, cum_count.shape[0])[:total]
    if needs_op(x, cum_count):
        positions: torch.Tensor = _registered_op(x, cum_count)
        return positions
    return _positions(x, cum_count)


def _positions(x: torch.Tensor, cum_count: torch.Tensor) -> torch.Tensor:
    return _ordered(x, cum_count.shape[0])[: _counted(x, cum_count)]


def _ordered(x: torch.Tensor, experts: int) -> torch.Tensor:
    """Return all positions by expert, the last one first; dropped tokens are at the end."""
    flat = x.reshape(-1).flip(0)
    dropped = (flat < 0) | (flat >= experts)
    order = torch.where(dropped, experts, flat).argsort(stable=True)
    return flat.shape[0] - 1 - order


def _counted(x: torch.Tensor, cum_count: torch.Tensor) -> int:
    """Return cum_count[-1] after comparing the counts with ``x``."""
    if not len(cum_count):
        return 0
    if sees_capture(x):
        if cum_count.device == x.device:
            raise ArgumentError(
                "assign_pos: a capture can't read cum_count[-1]; pass total=, the number of tokens "
                "that have an expert"
            )
        return int(cum_count[-1])
    expected = number_count(x, len(cum_count)).cumsum(0).to(cum_count.device)
    differing = (expected != cum_count).sum()
    total, wrong = (int(each) for each in torch.stack([cum_count[-1].long(), differing]).cpu())
    if wrong:
        at = int((expected != cum_count).nonzero()[0])
        raise ArgumentError(
            f"assign_pos: cum_count[{at}] is {int(cum_count[at])}; {int(expected[at])} ids of x "
            f"are 0 to {at}; set cum_count = ops.number_count(x, {len(cum_count)}).cumsum(0)"
        )
    return total


def _fake(x: torch.Tensor, cum_count: torch.Tensor) -> torch.Tensor:
    total = torch.library.get_ctx().new_dynamic_size()
    return x.new_empty(total, dtype=torch.int64)


_registered_op = register(
    "assign_pos(Tensor x, Tensor cum_count) -> Tensor", _positions, _fake, ordered=False
)
