"""all_gather, into one tensor and into a tensor per rank, whose sizes may differ."""

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, Unpack, overload

import torch

from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.collectives.parts import (
    check_parts,
    check_size,
    fill,
    is_even,
    is_list,
    unshared,
)
from commlib.core.dispatch import dispatch, is_plain, launched
from commlib.core.group import group
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, StreamMode
from commlib.core.validation import check_pair, new_like, shape_mismatch
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work

Tensor = torch.Tensor


class AllGather(Ring):
    """The collectives of a ring that copy every rank's tensor to all ranks."""

    @overload
    def all_gather(
        self, out: Tensor, x: Tensor | None = None, **options: "Unpack[Waited]"
    ) -> Tensor: ...
    @overload
    def all_gather(
        self, out: Tensor, x: Tensor | None = None, **options: "Unpack[Unwaited]"
    ) -> Work[Tensor]: ...
    @overload
    def all_gather(
        self, out: Tensor, x: Tensor | None = None, **options: "Unpack[Either]"
    ) -> Tensor | Work[Tensor]: ...
    @overload
    def all_gather(
        self, out: list[Tensor], x: Tensor, **options: "Unpack[Waited]"
    ) -> list[Tensor]: ...
    @overload
    def all_gather(
        self, out: list[Tensor], x: Tensor, **options: "Unpack[Unwaited]"
    ) -> Work[list[Tensor]]: ...
    @overload
    def all_gather(
        self, out: list[Tensor], x: Tensor, **options: "Unpack[Either]"
    ) -> list[Tensor] | Work[list[Tensor]]: ...

    def all_gather(
        self,
        out: Any,
        x: Tensor | None = None,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | list[Tensor] | Work:
        """Fill ``out`` on every rank with the ``x`` of rank 0, 1, … along dim 0.

        Args:
            out: ``size`` times the elements of ``x``, or a list with a tensor per rank, as
                ``all_gather_v`` takes it. As the only tensor it is the input.
            x: Any shape, the same on every rank. Default: the only tensor is the input, and the
                output is a new one with ``size`` times the rows.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            The output, or a ``Work`` with ``sync_op=False``.

        Raises:
            ArgumentError, DeviceError, DtypeError, ShapeError: Before any launch.
            RingError: The ring has failed or is closed.
            CommTimeout, EngineError: The call failed; the ring can't be used any more.
        """
        if x is None:
            x, out = out, new_like(self, "all_gather", out, self.size)
        mode, plain = MODES[use_calc_stream, sync_op, fenced], is_plain(self, x, out, part=True)
        if not plain and is_list(out):
            return self._all_gather_parts("all_gather", out, x, mode, timeout)
        return self._all_gather(out, x, mode, plain, timeout)

    def _all_gather(
        self,
        out: Tensor,
        x: Tensor,
        mode: StreamMode,
        plain: bool,
        timeout: Seconds | None = None,
    ) -> Tensor | Work:
        """Make an all_gather; ``plain``: the tensors need no check."""
        if not plain:
            check_pair(self, "all_gather", out, x)
        count = x.numel()
        if out.numel() != count * self.size:
            raise shape_mismatch(self, "all_gather", out, count * self.size, "size * x.numel()")
        offset = self.rank * count if self._engine.parts_in_place else None
        launch = self._engine.all_gather if count else nothing
        entry = ("all_gather", count, x.dtype, None, None)
        quick = timeout is None and plain and out is not x
        if quick and launched(self, mode, "all_gather", launch, (), out, x, entry):
            return out
        call = Call("all_gather", launch, (), out, x, offset, plain, entry, out)
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

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

        Adjacent outputs of one size, such as those of ``chunk``, are written without a copy.

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
        mode = MODES[use_calc_stream, sync_op, True]
        return self._all_gather_parts("all_gather_v", outs, x, mode, timeout)

    def _all_gather_parts(
        self, collective: str, outs: Any, x: Tensor, mode: StreamMode, timeout: Seconds | None
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Make one all_gather of equal parts, else a group of broadcasts; all ranks alike."""
        check_parts(self, collective, "outs", outs, x, mode, written=True)
        check_size(self, collective, "outs", self.rank, outs[self.rank], x)
        if is_even(outs):

            def launch(flat: Tensor) -> Any:
                return partial(self.all_gather, flat, x)

            return fill(self, collective, outs, launch, mode, timeout)
        x = unshared(x, (out for root, out in enumerate(outs) if root != self.rank))
        with group(self, mode.use_calc_stream, mode.sync_op, timeout) as work:
            for root, out in enumerate(outs):
                self.broadcast(out, x if root == self.rank else None, root=root)
        return list(outs) if mode.sync_op else work
