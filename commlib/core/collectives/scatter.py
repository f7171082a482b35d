"""scatter: parts of one rank's tensor, one on each rank."""

from collections.abc import Sequence
from typing import Any, Unpack, overload

import torch

from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.collectives.parts import check_even, check_mode, check_parts, is_list, joined
from commlib.core.dispatch import dispatch
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.core.validation import NOT_GIVEN, check_position, from_root, new_like
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work

Tensor = torch.Tensor
Given = Tensor | Sequence[Tensor] | None


class Scatter(Ring):
    """The collective of a ring that copies parts of a root's tensor to the ranks."""

    @overload
    def scatter(
        self, out: Tensor, x: Given = ..., *, root: int, **options: "Unpack[Waited]"
    ) -> Tensor: ...
    @overload
    def scatter(
        self, out: Tensor, x: Given = ..., *, root: int, **options: "Unpack[Unwaited]"
    ) -> Work[Tensor]: ...
    @overload
    def scatter(
        self, out: Tensor, x: Given = ..., *, root: int, **options: "Unpack[Either]"
    ) -> Tensor | Work[Tensor]: ...

    def scatter(
        self,
        out: Tensor,
        x: Any = NOT_GIVEN,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | Work[Tensor]:
        """Fill ``out`` of rank r with part r of ``x`` of ``root``.

        Args:
            out: Any shape, with as many elements on every rank. As the only tensor it is the input.
            x: ``size`` times the elements, or a list with a tensor per rank; may be None on other
                ranks, where it is not read. Default: the only tensor is the input, of one shape on
                every rank. The output is then a new tensor with this rank's rows along dim 0.
            root: Position of the rank that sends.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            ``out``, or a ``Work`` with ``sync_op=False``.

        Raises:
            PeerError: ``root`` is not a position in the ring.
            Otherwise as ``all_gather``.
        """
        if x is NOT_GIVEN:
            x, out = out, new_like(self, "scatter", out, 1, self.size)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if is_list(x):
            check_position(self, "scatter", "root", root)
            check_mode(self, "scatter", mode)
            x = self._scattered(out, x) if self.rank == root else None
        source, plain = from_root(self, "scatter", root, out, x, self.size)
        count = out.numel()
        launch = self._engine.scatter if count else nothing
        entry = ("scatter", count, out.dtype, None, root)
        call = Call("scatter", launch, (root,), out, source, None, plain, entry, out)
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

    def _scattered(self, out: Tensor, xs: Any) -> Tensor:
        """Return a list with a tensor per rank as one tensor."""
        check_parts(self, "scatter", "xs", xs, out)
        check_even(self, "scatter", "xs", xs, out)
        return joined(xs)
