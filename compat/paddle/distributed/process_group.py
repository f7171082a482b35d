"""A group's ring with the methods that legacy pipelines call: slices of tensors."""

from typing import TYPE_CHECKING, Any

import torch

from commlib import ops
from commlib.compat.paddle import streams
from commlib.compat.paddle.checks import detached, ring_of_rank
from commlib.compat.paddle.distributed.tasks import Task
from commlib.core.context import CommContext

Tensor = torch.Tensor
_ON_CALC_STREAM = "_on_calc_stream"
# Methods of upstream's process groups, and the functions of ``paddle.distributed`` for them.
_FUNCTIONS = {
    **{name: name for name in ("all_gather", "all_reduce", "alltoall", "alltoall_single")},
    **{name: name for name in ("broadcast", "gather", "recv", "reduce", "reduce_scatter")},
    **{name: name for name in ("scatter", "send")},
    "all_gather_into_tensor": "all_gather",
    "all_to_all": "alltoall",
    "all_to_all_single": "alltoall_single",
    "all_to_all_tensor": "alltoall",
    "allgather": "all_gather",
    "allreduce": "all_reduce",
    "gather_tensor": "gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "scatter_tensor": "scatter",
}


class ProcessGroup:
    """A group's ring as ``group.process_group``: peers are positions, not global ranks.

    A method with ``sync_op`` runs on the group's comm stream; ``sync_op=False`` leaves the wait to
    the returned ``Task``. A method ``…_on_calc_stream`` runs on the current stream.
    """

    def __init__(self, ring: CommContext) -> None:
        self.ring = ring

    def name(self) -> str:
        """Return "NCCL" for a ring on GPUs, "GLOO" on CPUs."""
        return "NCCL" if self.ring.device.type == "cuda" else "GLOO"

    def rank(self) -> int:
        """Return this process's position."""
        return self.ring.rank

    def size(self) -> int:
        """Return the number of members."""
        return self.ring.size

    def barrier(self) -> Task:
        """Hold the host until every member has called it; return a task that is done."""
        streams.barrier(ring_id=self.ring.ring_id)
        return Task(None)

    def send_partial(
        self, tensor: Tensor, dst: int, num: int, id: int, sync_op: bool = True
    ) -> Task:
        """Send slice ``id`` of ``num`` of the flattened ``tensor`` to position ``dst``."""
        return self._send(tensor, dst, num, id, use_calc_stream=False, sync_op=sync_op)

    def send_partial_on_calc_stream(self, tensor: Tensor, dst: int, num: int, id: int) -> Task:
        """Send slice ``id`` of ``num`` of the flattened ``tensor`` to position ``dst``."""
        return self._send(tensor, dst, num, id, use_calc_stream=True, sync_op=True)

    def recv_partial(
        self, tensor: Tensor, src: int, num: int, id: int, sync_op: bool = True
    ) -> Task:
        """Fill slice ``id`` of ``num`` of the flattened ``tensor`` from position ``src``."""
        return self._recv(tensor, src, num, id, use_calc_stream=False, sync_op=sync_op)

    def recv_partial_on_calc_stream(self, tensor: Tensor, src: int, num: int, id: int) -> Task:
        """Fill slice ``id`` of ``num`` of the flattened ``tensor`` from position ``src``."""
        return self._recv(tensor, src, num, id, use_calc_stream=True, sync_op=True)

    def all_gather_partial(
        self, out_tensor: Tensor, in_tensor: Tensor, num: int, id: int, sync_op: bool = True
    ) -> Task:
        """Fill slice r of ``out_tensor`` from slice r of position r; the tensors may be one.

        Args:
            out_tensor: The output.
            in_tensor: As many elements; this process sends its own slice.
            num: The number of members.
            id: This process's position.
            sync_op: See the class.

        Raises:
            ArgumentError: ``num`` or ``id`` differs from the group's.
        """
        return self._gather(out_tensor, in_tensor, num, id, use_calc_stream=False, sync_op=sync_op)

    def all_gather_partial_on_calc_stream(
        self, out_tensor: Tensor, in_tensor: Tensor, num: int, id: int
    ) -> Task:
        """Fill slice r of ``out_tensor`` from slice r of position r; see above."""
        return self._gather(out_tensor, in_tensor, num, id, use_calc_stream=True, sync_op=True)

    def _send(self, tensor: Tensor, dst: int, num: int, id: int, **mode: Any) -> Task:
        return Task(ops.partial_send(detached(tensor), self.ring, peer=dst, num=num, id=id, **mode))

    def _recv(self, tensor: Tensor, src: int, num: int, id: int, **mode: Any) -> Task:
        return Task(ops.partial_recv(detached(tensor), self.ring, peer=src, num=num, id=id, **mode))

    def _gather(self, out: Tensor, x: Tensor, num: int, id: int, **mode: Any) -> Task:
        ring_of_rank("all_gather_partial", self.ring.ring_id, num, id)
        return Task(ops.partial_all_gather(detached(x), self.ring, out=detached(out), **mode))

    if not TYPE_CHECKING:  # a checker would take any name for one that is there

        def __getattr__(self, name: str) -> Any:
            """Refuse an unknown name, with the function of ``paddle.distributed`` for it."""
            function = _FUNCTIONS.get(name.removesuffix(_ON_CALC_STREAM))
            reason = "its methods move slices; the functions of paddle.distributed take group=group"
            if function is not None:
                call = f"{function}(..., group=group)"
                if name.endswith(_ON_CALC_STREAM):
                    call = f"stream.{function}(..., group=group, use_calc_stream=True)"
                reason = (
                    f"call {call} of paddle.distributed; roots and peers there are global ranks"
                )
            raise AttributeError(
                f"group.process_group has no attribute {name!r}; {reason}", name=name, obj=self
            )
