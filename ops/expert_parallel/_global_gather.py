"""global_gather: return the rows of ``global_scatter`` from the experts."""

import torch

from commlib.ops.arguments import Ring, ring_number
from commlib.ops.expert_parallel.counted_rows import counted
from commlib.ops.expert_parallel.row_counts import move, register_move, row_table
from commlib.ops.registered.library import needs_op


def global_gather(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: Ring = 0,
    *,
    capacity: int | None = None,
    use_calc_stream: bool = True,
) -> torch.Tensor:
    """Return rows from the experts to their ranks: the reverse of ``global_scatter``.

    The gradient is ``global_scatter``. Blocking and capture are as in ``global_scatter``. Source:
    operator ``global_gather``.

    Args:
        x: [sum(global_count), width] of any dtype, ordered by this rank's experts, then by the
            rank that sent the rows: the order of ``global_scatter``'s result.
        local_count: The counts that were given to ``global_scatter``.
        global_count: The counts that were given to ``global_scatter``.
        ring_id: The ring, its id or its name.
        capacity: Rows of the result, at least ``sum(local_count)``. The counts are then on the
            ring's device, and ``x`` is the result of ``global_scatter`` with a capacity. Default:
            as many rows as are returned.
        use_calc_stream: Communicate on the caller's current stream. False: on the ring's stream.

    Returns:
        [sum(local_count), width], this rank's rows by rank, then expert: the order before
        ``global_scatter``. With ``capacity``, [capacity, width]; rows that are not used are 0.

    Raises:
        ArgumentError: On every rank, if counts do not match; the text names the two ranks. With
            ``capacity`` it is raised as in ``global_scatter``, which has the same limit.
        RingError, DtypeError, ShapeError, DeviceError: Before any launch.
    """
    ring_id = ring_number("global_gather", ring_id)
    if capacity is not None:
        return counted(x, local_count, global_count, ring_id, capacity, use_calc_stream, back=True)
    counts = row_table(x, local_count, global_count, ring_id, back=True)
    if needs_op(x) or x.requires_grad:
        returned: torch.Tensor = _registered_op(x, counts, ring_id, use_calc_stream, None)
        return returned
    return move(x, counts, ring_id, use_calc_stream, back=True)


_registered_op = register_move(back=True)
