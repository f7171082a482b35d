"""reduce: the reduction over all ranks, on one rank."""

from typing import Any, TypeVar, Unpack, overload

import torch

from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import ReducingEither, ReducingUnwaited, ReducingWaited
from commlib.core.collectives.reduction import reduction_of
from commlib.core.dispatch import dispatch
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.core.validation import NOT_GIVEN, at_root, new_at_root, shape_mismatch
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work
from commlib.engines.reduction_names import RingReduction

Tensor = torch.Tensor
AtRoot = TypeVar("AtRoot", bound=Tensor | None)


class Reduce(Ring):
    """The collective of a ring that reduces to a root."""

    @overload
    def reduce(self, out: Tensor, *, root: int, **options: "Unpack[ReducingWaited]") -> Tensor: ...
    @overload
    def reduce(
        self, out: Tensor, *, root: int, **options: "Unpack[ReducingUnwaited]"
    ) -> Work[Tensor]: ...
    @overload
    def reduce(
        self, out: Tensor, *, root: int, **options: "Unpack[ReducingEither]"
    ) -> Tensor | Work[Tensor]: ...
    @overload
    def reduce(
        self, out: AtRoot, x: Tensor, *, root: int, **options: "Unpack[ReducingWaited]"
    ) -> AtRoot: ...
    @overload
    def reduce(
        self, out: AtRoot, x: Tensor, *, root: int, **options: "Unpack[ReducingUnwaited]"
    ) -> Work[AtRoot]: ...
    @overload
    def reduce(
        self, out: AtRoot, x: Tensor, *, root: int, **options: "Unpack[ReducingEither]"
    ) -> AtRoot | Work[AtRoot]: ...

    def reduce(
        self,
        out: Any,
        x: Tensor = NOT_GIVEN,
        *,
        root: int,
        op: RingReduction = "sum",
        factor: float | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | Work | None:
        """Fill ``out`` of ``root`` with the reduction of ``x``; elsewhere it is not touched.

        Args:
            out: As many elements as ``x``; may be None on other ranks. As the only tensor it is the
                input.
            x: Any shape. Default: the only tensor is the input, and the output is a new one: the
                reduction on the root, a copy of the input elsewhere.
            root: Position of the rank that gets the result.
            op, factor: As in ``all_reduce``.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            ``out``, or a ``Work`` with ``sync_op=False``.

        Raises:
            PeerError: ``root`` is not a position in the ring.
            Otherwise as ``all_reduce``.
        """
        if x is NOT_GIVEN:
            x, out = out, new_at_root(self, "reduce", root, out)
        target, plain = at_root(self, "reduce", root, out, x)
        count = x.numel()
        if target is not None and target.numel() != count:
            raise shape_mismatch(self, "reduce", target, count, "as many elements as x")
        reduction = reduction_of(self, "reduce", x, op, factor)
        launch = self._engine.reduce if count else nothing
        entry = ("reduce", count, x.dtype, reduction, root)
        call = Call("reduce", launch, (root, reduction), target, x, 0, plain, entry, out)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)
