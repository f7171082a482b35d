"""Collectives over tensors whose sizes differ between ranks."""

from collections.abc import Sequence
from typing import Literal, overload

import torch

from commlib.core.collectives.copies import Copies
from commlib.core.collectives.reductions import Reductions
from commlib.core.group import group
from commlib.core.ring import Ring
from commlib.core.validation import check_pair
from commlib.core.within import Seconds
from commlib.core.work import Work
from commlib.errors import ShapeError

Tensor = torch.Tensor


class Uneven(Reductions, Copies):
    """The collectives of a ring in which the sizes of parts may differ between ranks."""

    @overload
    def all_gather_v(
        self,
        outs: Sequence[Tensor],
        x: Tensor,
        *,
        use_calc_stream: bool = ...,
        sync_op: Literal[True] = ...,
        timeout: Seconds | None = ...,
    ) -> list[Tensor]: ...
    @overload
    def all_gather_v(
        self,
        outs: Sequence[Tensor],
        x: Tensor,
        *,
        use_calc_stream: bool = ...,
        sync_op: Literal[False],
        timeout: Seconds | None = ...,
    ) -> Work[list[Tensor]]: ...
    @overload
    def all_gather_v(
        self,
        outs: Sequence[Tensor],
        x: Tensor,
        *,
        use_calc_stream: bool = ...,
        sync_op: bool,
        timeout: Seconds | None = ...,
    ) -> list[Tensor] | Work[list[Tensor]]: ...

    def all_gather_v(
        self,
        outs: Sequence[Tensor],
        x: Tensor,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        timeout: Seconds | None = None,
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Fill ``outs[r]`` on every rank with the ``x`` of rank r, as one operation.

        Args:
            outs: A tensor per rank, with as many elements as that rank's ``x``.
            x: Any shape; sizes may differ between ranks.
            use_calc_stream, sync_op, timeout: See ``CommContext``.

        Returns:
            The outputs, or a ``Work`` with ``sync_op=False``.

        Raises:
            ArgumentError, DeviceError, DtypeError, ShapeError: Before any launch; also inside
                ``with ring.group()``, for the call is a group.
            RingError: The ring has failed or is closed.
            CommTimeout, EngineError: The call failed; the ring can't be used any more.
        """
        _check_parts(self, "all_gather_v", "outs", outs, x)
        with group(self, use_calc_stream, sync_op, timeout) as work:
            for root, out in enumerate(outs):
                self.broadcast(out, x if root == self.rank else None, root=root)
        return list(outs) if sync_op else work

    @overload
    def reduce_scatter_v(
        self,
        out: Tensor,
        xs: Sequence[Tensor],
        *,
        op: str = ...,
        factor: float | None = ...,
        use_calc_stream: bool = ...,
        sync_op: Literal[True] = ...,
        timeout: Seconds | None = ...,
    ) -> Tensor: ...
    @overload
    def reduce_scatter_v(
        self,
        out: Tensor,
        xs: Sequence[Tensor],
        *,
        op: str = ...,
        factor: float | None = ...,
        use_calc_stream: bool = ...,
        sync_op: Literal[False],
        timeout: Seconds | None = ...,
    ) -> Work[Tensor]: ...
    @overload
    def reduce_scatter_v(
        self,
        out: Tensor,
        xs: Sequence[Tensor],
        *,
        op: str = ...,
        factor: float | None = ...,
        use_calc_stream: bool = ...,
        sync_op: bool,
        timeout: Seconds | None = ...,
    ) -> Tensor | Work[Tensor]: ...

    def reduce_scatter_v(
        self,
        out: Tensor,
        xs: Sequence[Tensor],
        *,
        op: str = "sum",
        factor: float | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | Work[Tensor]:
        """Fill ``out`` of rank r with the reduction of ``xs[r]`` of all ranks, as one operation.

        Args:
            out: As many elements as ``xs[r]``.
            xs: A tensor per rank; sizes may differ between ranks.
            op, factor: As in ``all_reduce``.
            use_calc_stream, sync_op, timeout: See ``CommContext``.

        Returns:
            The output, or a ``Work`` with ``sync_op=False``.

        Raises:
            As ``all_gather_v``.
        """
        _check_parts(self, "reduce_scatter_v", "xs", xs, out)
        with group(self, use_calc_stream, sync_op, timeout) as work:
            for root, x in enumerate(xs):
                self.reduce(out if root == self.rank else None, x, root=root, op=op, factor=factor)
        return out if sync_op else Work(out, work._pending, work._limit)


def _check_parts(
    ring: Ring, collective: str, role: str, parts: Sequence[Tensor], own: Tensor
) -> None:
    """Refuse anything but a part per rank, of which this rank's fits its own tensor."""
    if len(parts) != ring.size:
        raise ShapeError(
            f"{ring._describe(collective)}: {role} has {len(parts)} tensors; expected one per "
            f"rank, {ring.size}"
        )
    mine = parts[ring.rank]
    check_pair(ring, collective, mine, own)
    if mine.numel() != own.numel():
        raise ShapeError(
            f"{ring._describe(collective)}: {role}[{ring.rank}] of shape {tuple(mine.shape)} has "
            f"{mine.numel()} elements; expected {own.numel()}, as this rank's own tensor"
        )
