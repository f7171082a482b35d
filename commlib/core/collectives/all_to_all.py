"""all_to_all: every rank's parts, each on its rank."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Unpack, overload

import torch

from commlib.core.calls.call import Call, Launch, nothing
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.collectives.parts import check_parts, fill, is_list, joined
from commlib.core.dispatch import dispatch, is_plain
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, StreamMode
from commlib.core.validation import (
    NOT_GIVEN,
    check_only,
    check_pair,
    counts,
    new_like,
    split_rows,
)
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work
from commlib.errors import ArgumentError, ShapeError

Tensor = torch.Tensor
Splits = Iterable[int] | None


class AllToAll(Ring):
    """The collective of a ring in which every rank sends a part to every rank."""

    @overload
    def all_to_all(
        self,
        out: Tensor,
        x: Tensor = ...,
        *,
        out_splits: Splits = None,
        in_splits: Splits = None,
        **options: "Unpack[Waited]",
    ) -> Tensor: ...
    @overload
    def all_to_all(
        self,
        out: Tensor,
        x: Tensor = ...,
        *,
        out_splits: Splits = None,
        in_splits: Splits = None,
        **options: "Unpack[Unwaited]",
    ) -> Work[Tensor]: ...
    @overload
    def all_to_all(
        self,
        out: Tensor,
        x: Tensor = ...,
        *,
        out_splits: Splits = None,
        in_splits: Splits = None,
        **options: "Unpack[Either]",
    ) -> Tensor | Work[Tensor]: ...
    @overload
    def all_to_all(
        self, out: list[Tensor], x: Sequence[Tensor], **options: "Unpack[Waited]"
    ) -> list[Tensor]: ...
    @overload
    def all_to_all(
        self, out: list[Tensor], x: Sequence[Tensor], **options: "Unpack[Unwaited]"
    ) -> Work[list[Tensor]]: ...
    @overload
    def all_to_all(
        self, out: list[Tensor], x: Sequence[Tensor], **options: "Unpack[Either]"
    ) -> list[Tensor] | Work[list[Tensor]]: ...

    def all_to_all(
        self,
        out: Any,
        x: Any = NOT_GIVEN,
        *,
        out_splits: Splits = None,
        in_splits: Splits = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | list[Tensor] | Work:
        """Send part j of ``x`` to rank j; fill ``out`` with the received parts in rank order.

        Args:
            out: The received parts, rows along dim 0; or a list with a tensor per rank. As the only
                tensor it is the input.
            x: The parts to send, rows along dim 0; or a list with a tensor per rank. All members
                pass lists or splits, or none does. Default: the only tensor is the input, and the
                output is a new one with the rows of ``out_splits``.
            out_splits: Rows from each rank. Default: equal parts. Lists have their own sizes.
            in_splits: Rows to each rank.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            ``out``, or a ``Work`` with ``sync_op=False``.

        Raises:
            ArgumentError, DeviceError, DtypeError, ShapeError: Before any launch.
            RingError: The ring has failed or is closed.
            CommTimeout, EngineError: The call failed; the ring can't be used any more.
        """
        if x is NOT_GIVEN:
            if out_splits is not None:
                out_splits = split_rows(self, "all_to_all", "out_splits", out_splits)
            x, out = out, self._received(out, out_splits)
        plain = is_plain(self, x, out)  # not for a list
        if not plain and (is_list(out) or is_list(x)):
            mode = MODES[use_calc_stream, sync_op, fenced]
            return self._all_to_all_parts(out, x, (out_splits, in_splits), mode, timeout)
        if not plain:
            check_pair(self, "all_to_all", out, x)
        sends = counts(self, "all_to_all", "in_splits", x, in_splits)
        takes = counts(self, "all_to_all", "out_splits", out, out_splits)
        if sends[self.rank] != takes[self.rank]:
            raise ShapeError(
                f"{self._describe('all_to_all')}: this rank sends itself {sends[self.rank]} "
                f"elements but expects {takes[self.rank]}; make in_splits[{self.rank}] and "
                f"out_splits[{self.rank}] name the same rows"
            )
        # With splits every rank takes part, however few rows are its own: others may have some.
        launch: Launch = self._engine.all_to_all
        elements = None
        if in_splits is None and out_splits is None:
            elements = x.numel()
            launch = self._engine.equal_parts if elements else nothing
        entry = ("all_to_all", elements, x.dtype, None, None)
        call = Call("all_to_all", launch, (takes, sends), out, x, None, plain, entry, out)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

    def _received(self, x: Tensor, rows: Iterable[int] | None) -> Tensor:
        """Return a new output with so many rows from each rank; by default as ``x``."""
        if rows is None:
            return new_like(self, "all_to_all", x)
        check_only(self, "all_to_all", x)
        return x.new_empty((sum(rows), *x.shape[1:]))

    def _all_to_all_parts(
        self, outs: Any, xs: Any, splits: Any, mode: StreamMode, timeout: Seconds | None
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Send tensor j of ``xs`` to rank j, and fill tensor j of ``outs`` with what it sends."""
        if any(each is not None for each in splits):
            raise ArgumentError(
                f"{self._describe('all_to_all')}: out_splits or in_splits with lists of tensors, "
                f"which have their own sizes; leave them away"
            )
        for role, parts in (("xs", xs), ("outs", outs)):
            first = parts[0] if is_list(parts) and len(parts) else parts
            check_parts(self, "all_to_all", role, parts, first, mode, written=role == "outs")
        check_pair(self, "all_to_all", outs[0], xs[0])

        def launch(flat: Tensor) -> Any:
            sizes = {
                "out_splits": [out.numel() for out in outs],
                "in_splits": [x.numel() for x in xs],
            }
            return partial(self.all_to_all, flat, joined(xs), **sizes)

        return fill(self, "all_to_all", outs, launch, mode, timeout)
