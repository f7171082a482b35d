"""reduce_scatter, of one tensor and of a tensor per rank, whose sizes may differ."""

from collections.abc import Sequence
from typing import Any, Literal, Unpack, overload

import torch

from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import ReducingEither, ReducingUnwaited, ReducingWaited
from commlib.core.collectives.parts import (
    check_parts,
    check_size,
    is_even,
    is_list,
    joined,
    unshared,
)
from commlib.core.collectives.reduction import reduction_of
from commlib.core.dispatch import dispatch, is_plain, launched
from commlib.core.group import group
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, StreamMode
from commlib.core.validation import check_pair, new_like, shape_mismatch
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work
from commlib.engines.reduction_names import RingReduction

Tensor = torch.Tensor
Given = Tensor | Sequence[Tensor] | None


class ReduceScatter(Ring):
    """The collective of a ring that reduces, a part on each rank."""

    @overload
    def reduce_scatter(
        self,
        out: Tensor,
        x: Given = None,
        **options: "Unpack[ReducingWaited]",
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self,
        out: Tensor,
        x: Given = None,
        **options: "Unpack[ReducingUnwaited]",
    ) -> Work[Tensor]: ...
    @overload
    def reduce_scatter(
        self,
        out: Tensor,
        x: Given = None,
        **options: "Unpack[ReducingEither]",
    ) -> Tensor | Work[Tensor]: ...

    def reduce_scatter(
        self,
        out: Tensor,
        x: Any = None,
        *,
        op: RingReduction = "sum",
        factor: float | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | Work[Tensor]:
        """Fill ``out`` of rank r with the r-th part of the reduction of ``x`` over all ranks.

        Args:
            out: Any shape. As the only tensor it is the input.
            x: ``size`` times the elements of ``out``, or a list with a tensor per rank, as
                ``reduce_scatter_v`` takes it. Default: the only tensor is the input, and the output
                is a new one with this rank's rows along dim 0.
            op, factor: As in ``all_reduce``.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            The output, or a ``Work`` with ``sync_op=False``.

        Raises:
            As ``all_reduce``.
        """
        if x is None:
            x, out = out, new_like(self, "reduce_scatter", out, 1, self.size)
        mode = MODES[use_calc_stream, sync_op, fenced]
        plain = is_plain(self, x, out, part=True)  # not for a list
        if not plain and is_list(x):
            name = "reduce_scatter"
            return self._reduce_scatter_parts(name, out, x, op, factor, mode, timeout)
        return self._reduce_scatter(out, x, op, factor, mode, plain, timeout)

    def _reduce_scatter(
        self,
        out: Tensor,
        x: Tensor,
        op: RingReduction,
        factor: float | None,
        mode: StreamMode,
        plain: bool,
        timeout: Seconds | None = None,
    ) -> Tensor | Work:
        """Make a reduce_scatter; ``plain``: the tensors need no check."""
        if not plain:
            check_pair(self, "reduce_scatter", out, x)
        count, total = out.numel(), x.numel()
        if count * self.size != total:
            raise shape_mismatch(self, "reduce_scatter", out, total / self.size, "x.numel() / size")
        named = factor is None and type(op) is str
        cached = self._engine.reductions.get((x.dtype, op)) if named else None
        reduction = cached or reduction_of(self, "reduce_scatter", x, op, factor)
        offset = -self.rank * count if self._engine.parts_in_place else None
        launch = self._engine.reduce_scatter if count else nothing
        entry = ("reduce_scatter", total, x.dtype, reduction, None)
        args, quick = (reduction,), timeout is None and plain and out is not x
        if quick and launched(self, mode, "reduce_scatter", launch, args, out, x, entry):
            return out
        call = Call("reduce_scatter", launch, args, out, x, offset, plain, entry, out)
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

    @overload
    def reduce_scatter_v(
        self,
        out: Tensor,
        xs: Sequence[Tensor],
        *,
        op: RingReduction = ...,
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
        op: RingReduction = ...,
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
        op: RingReduction = ...,
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
        op: RingReduction = "sum",
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
        mode = MODES[use_calc_stream, sync_op, True]
        return self._reduce_scatter_parts("reduce_scatter_v", out, xs, op, factor, mode, timeout)

    def _reduce_scatter_parts(
        self,
        collective: str,
        out: Tensor,
        xs: Any,
        op: RingReduction,
        factor: float | None,
        mode: StreamMode,
        timeout: Seconds | None,
        *,
        each: bool = False,
    ) -> Tensor | Work[Tensor]:
        """Make one reduce_scatter of equal parts, else a group of reduces; all ranks alike.

        ``each``: a reduce per part always, for the order of its sums.
        """
        check_parts(self, collective, "xs", xs, out, mode)
        check_size(self, collective, "xs", self.rank, xs[self.rank], out)
        if is_even(xs) and not each:
            flat = joined(xs)
            plain = is_plain(self, flat, out)
            return self._reduce_scatter(out, flat, op, factor, mode, plain, timeout)
        xs = [x if root == self.rank else unshared(x, [out]) for root, x in enumerate(xs)]
        with group(self, mode.use_calc_stream, mode.sync_op, timeout) as work:
            for root, x in enumerate(xs):
                target = out if root == self.rank else None
                self.reduce(target, x, root=root, op=op, factor=factor)
        return out if mode.sync_op else Work(out, work._pending, work._limit)
