"""gather: every rank's tensor on one rank."""

from functools import partial
from typing import Any, TypeVar, Unpack, overload

import torch

from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.collectives.parts import check_even, check_mode, check_parts, fill, is_list
from commlib.core.dispatch import dispatch
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, StreamMode
from commlib.core.validation import NOT_GIVEN, at_root, check_position, new_at_root, shape_mismatch
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work

Tensor = torch.Tensor
AtRoot = TypeVar("AtRoot", bound=Tensor | list[Tensor] | None)


class Gather(Ring):
    """The collective of a ring that copies every rank's tensor to a root."""

    @overload
    def gather(self, out: Tensor, *, root: int, **options: "Unpack[Waited]") -> Tensor: ...
    @overload
    def gather(self, out: Tensor, *, root: int, **options: "Unpack[Unwaited]") -> Work[Tensor]: ...
    @overload
    def gather(
        self, out: Tensor, *, root: int, **options: "Unpack[Either]"
    ) -> Tensor | Work[Tensor]: ...
    @overload
    def gather(
        self, out: AtRoot, x: Tensor, *, root: int, **options: "Unpack[Waited]"
    ) -> AtRoot: ...
    @overload
    def gather(
        self, out: AtRoot, x: Tensor, *, root: int, **options: "Unpack[Unwaited]"
    ) -> Work[AtRoot]: ...
    @overload
    def gather(
        self, out: AtRoot, x: Tensor, *, root: int, **options: "Unpack[Either]"
    ) -> AtRoot | Work[AtRoot]: ...

    def gather(
        self,
        out: Any,
        x: Tensor = NOT_GIVEN,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | list[Tensor] | Work | None:
        """Fill ``out`` of ``root`` with every rank's ``x`` in turn; elsewhere it is not touched.

        Args:
            out: ``size`` times the elements of ``x``, or a list with a tensor per rank; may be None
                on other ranks. As the only tensor it is the input.
            x: Any shape, the same on every rank. Default: the only tensor is the input, and the
                output is a new one: ``size`` times its rows on the root, no rows elsewhere.
            root: Position of the rank that receives.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            ``out``, or a ``Work`` with ``sync_op=False``.

        Raises:
            PeerError: ``root`` is not a position in the ring.
            Otherwise as ``all_gather``.
        """
        if x is NOT_GIVEN:
            x, out = out, new_at_root(self, "gather", root, out, self.size)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if is_list(out):
            return self._gather_parts(out, x, root, mode, timeout)
        target, plain = at_root(self, "gather", root, out, x)
        count = x.numel()
        if target is not None and target.numel() != count * self.size:
            raise shape_mismatch(self, "gather", target, count * self.size, "size * x.numel()")
        launch = self._engine.gather if count else nothing
        entry = ("gather", count, x.dtype, None, root)
        call = Call("gather", launch, (root,), target, x, None, plain, entry, out)
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

    def _gather_parts(
        self, outs: Any, x: Tensor, root: int, mode: StreamMode, timeout: Seconds | None
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Gather into one tensor per rank on the root; the lists of other ranks do not change."""
        check_position(self, "gather", "root", root)
        check_mode(self, "gather", mode)
        if self.rank != root:
            kwargs: Any = {"use_calc_stream": mode.use_calc_stream, "sync_op": mode.sync_op}
            done: Any = self.gather(None, x, root=root, timeout=timeout, **kwargs)
            result: list[Tensor] = outs
            return result if mode.sync_op else Work(result, done._pending, done._limit)
        check_parts(self, "gather", "outs", outs, x, mode, written=True)
        check_even(self, "gather", "outs", outs, x)

        def launch(flat: Tensor) -> Any:
            return partial(self.gather, flat, x, root=root)

        return fill(self, "gather", outs, launch, mode, timeout)
