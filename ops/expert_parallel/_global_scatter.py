"""global_scatter: send every rank's rows to their experts."""

import torch

from commlib.ops.arguments import Ring, ring_number
from commlib.ops.expert_parallel.counted_rows import counted
from commlib.ops.expert_parallel.row_counts import move, register_move, row_table
from commlib.ops.registered.library import needs_op


def global_scatter(
    x: torch.Tensor,
    local_count: torch.Tensor,
    global_count: torch.Tensor,
    ring_id: Ring = 0,
    *,
    capacity: int | None = None,
    use_calc_stream: bool = True,
) -> torch.Tensor:
    """Send the rows of every rank to their experts.

    The gradient is ``global_gather``. The ranks compare their counts first, which blocks the host;
    counts on a GPU are waited for. A capture on a GPU needs counts on the CPU, which become part of
    the graph; a capture on a CPU needs ``capacity``. With it the counts stay on the device: the
    host waits for nothing, and a graph can be replayed with other counts. Source: operator
    ``global_scatter``.

    Args:
        x: [rows, width] of any dtype, ordered by receiving rank, then expert.
        local_count: int64 [experts * size], on the CPU or the ring's device. This rank sends
            ``local_count[k + j * experts]`` rows to expert k of rank j.
        global_count: int64 [experts * size]. This rank receives ``global_count[k + j * experts]``
            rows from rank j for expert k.
        ring_id: The ring, its id or its name.
        capacity: Rows of the result, the same on every rank. The counts are then on the ring's
            device, and ``x`` may have more rows than they add up to, but at least one. Its dtype
            is bfloat16, float16, float32 or float64. Default: as many rows as are received.
        use_calc_stream: Communicate on the caller's current stream. False: on the ring's stream.

    Returns:
        [sum(global_count), width], the rows for this rank's experts by expert, then by sender.
        With ``capacity``, [capacity, width]; rows that are not used are 0.

    Raises:
        ArgumentError: On every rank, if counts do not match; the text names the two ranks. With
            ``capacity`` on a GPU the ring's next check raises it, such as ``ring.check()``.
            The call itself raises it for a ``capacity`` above 2**30 - 1, or without memory.
        CapacityError: A rank receives more than ``capacity`` rows; raised likewise.
        RingError, DtypeError, ShapeError, DeviceError: Before any launch.
    """
    ring_id = ring_number("global_scatter", ring_id)
    if capacity is not None:
        return counted(x, local_count, global_count, ring_id, capacity, use_calc_stream, back=False)
    counts = row_table(x, local_count, global_count, ring_id, back=False)
    if needs_op(x) or x.requires_grad:
        received: torch.Tensor = _registered_op(x, counts, ring_id, use_calc_stream, None)
        return received
    return move(x, counts, ring_id, use_calc_stream, back=False)


_registered_op = register_move(back=False)
