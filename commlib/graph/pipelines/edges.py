"""Edges of a pipeline: one ring per ordered pair of ranks between which tensors pass."""

from collections.abc import Sequence

import torch

from commlib.core.context import CommContext
from commlib.core.rings.opening import new_ring
from commlib.core.work import Work
from commlib.errors import GraphError
from commlib.graph.pipelines.actions import PipelineMove


class Edges:
    """Sends and receives of a pipeline, each edge on its own ring and comm stream.

    Attributes:
        rings: The rings of this rank, by (source, target).
    """

    def __init__(
        self,
        edges: Sequence[tuple[int, int]],
        ranks: Sequence[int],
        ring_id: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        """See ``PipelineSchedule.connect``; all ranks go through the edges in the same order."""
        self._shape, self._dtype = shape, dtype
        self.rings: dict[tuple[int, int], CommContext] = {}
        for number, (source, target) in enumerate(edges, start=ring_id):
            ring = new_ring(number, [ranks[source], ranks[target]])
            if ring is not None:
                ring.connect()
                self.rings[source, target] = ring

    def send(self, x: torch.Tensor, move: PipelineMove) -> Work[None]:
        """Send a tensor; its edge alone waits for the receive.

        Raises:
            GraphError: Its shape or dtype is not that of ``connect``.
        """
        ring = self.rings[move.source, move.target]
        if (tuple(x.shape), x.dtype) != (self._shape, self._dtype):
            raise GraphError(
                f"{ring._describe('send')}: a tensor of shape {tuple(x.shape)} and {x.dtype} for "
                f"the {move.use}; expected {self._shape} and {self._dtype}; pass shape= and dtype= "
                f"of what passes between stages to connect()"
            )
        return ring.send(x, peer=1, use_calc_stream=False, sync_op=False)

    def receive(self, move: PipelineMove) -> Work[torch.Tensor]:
        """Receive a tensor; ``wait()`` before it is used."""
        ring = self.rings[move.source, move.target]
        out = torch.empty(self._shape, dtype=self._dtype, device=ring.device)
        return ring.recv(out, peer=0, use_calc_stream=False, sync_op=False)

    def close(self) -> None:
        """Close the rings; captured functions that use them are released first."""
        for ring in self.rings.values():
            ring.close()
