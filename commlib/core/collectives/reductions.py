"""Collectives that reduce: all_reduce, reduce_scatter, reduce."""

from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch

from commlib import flags
from commlib.core.call import Call, nothing
from commlib.core.dispatch import begin, dispatch, is_plain
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, Either, StreamMode, Unwaited, Waited
from commlib.core.validation import at_root, check_blocks, check_pair, new_like, shape_mismatch
from commlib.core.work import Work
from commlib.errors import ArgumentError
from commlib.p2p.fused_norm import Norm

if TYPE_CHECKING:
    from typing_extensions import Unpack  # in typing from Python 3.11 on

Tensor = torch.Tensor
AtRoot = TypeVar("AtRoot", bound=Tensor | None)


class Reductions(Ring):
    """The collectives of a ring that reduce."""

    def _reduction(self, collective: str, x: Tensor, op: str, factor: float | None = None) -> Any:
        """Return the reduction in the engine's own terms."""
        try:
            return self._engine.reduction(x.dtype, op, factor)
        except ArgumentError as error:
            raise type(error)(f"{self._describe(collective)}: {error}") from None

    @overload
    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        op: str = ...,
        factor: float | None = ...,
        max_blocks: int | None = ...,
        **options: "Unpack[Waited]",
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        op: str = ...,
        factor: float | None = ...,
        max_blocks: int | None = ...,
        **options: "Unpack[Unwaited]",
    ) -> Work[Tensor]: ...
    @overload
    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        op: str = ...,
        factor: float | None = ...,
        max_blocks: int | None = ...,
        **options: "Unpack[Either]",
    ) -> Tensor | Work[Tensor]: ...

    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        op: str = "sum",
        factor: float | None = None,
        max_blocks: int | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Tensor | Work[Tensor]:
        """Fill ``out`` on every rank with the reduction of ``x`` over all ranks.

        Args:
            out: As many elements as ``x``; may be ``x``. As the only tensor it is the input.
            x: Any shape. Default: the only tensor is the input, and the output is a new one.
            op: "sum", "prod", "min", "max", "avg" or "premul_sum".
            factor: The factor of "premul_sum".
            max_blocks: Most blocks of a push kernel, which wait on the GPU for the peers. By
                default an asynchronous call takes at most FLAGS_comm_async_blocks, so that the
                program's own kernels keep the rest of the GPU; any other call takes the fastest
                grid.
            use_calc_stream, sync_op, fenced: See ``CommContext``.

        Returns:
            The output, or a ``Work`` with ``sync_op=False``.

        Raises:
            ArgumentError, DeviceError, DtypeError, ShapeError: Before any launch.
            RingError: The ring has failed or is closed.
            CommTimeout, EngineError: The call failed; the ring can't be used any more.
        """
        if x is None:
            x, out = out, new_like(self, "all_reduce", out)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if max_blocks is not None:
            mode = mode._replace(blocks=check_blocks(self, max_blocks))
        return self._all_reduce(out, x, op, factor, mode, is_plain(self, x, out))

    def _all_reduce(
        self, out: Tensor, x: Tensor, op: str, factor: float | None, mode: StreamMode, plain: bool
    ) -> Tensor | Work:
        """Make an all_reduce; ``plain``: the tensors need no check."""
        if not plain:
            check_pair(self, "all_reduce", out, x)
        count = x.numel()
        if out is not x and out.numel() != count:
            raise shape_mismatch(self, "all_reduce", out, count, "as many elements as x")
        known = self._engine.reductions.get((x.dtype, op)) if factor is None else None
        reduction = known or self._reduction("all_reduce", x, op, factor)
        launch = self._engine.all_reduce if count else nothing
        entry = ("all_reduce", count, x.dtype, reduction, None)
        call = Call("all_reduce", launch, (reduction,), out, x, 0, plain, entry, out)
        return dispatch(self, call, mode)

    def all_reduce_begin(
        self, out: Tensor, x: Tensor, *, op: str = "sum", max_blocks: int | None = None
    ) -> Work[Tensor]:
        """Begin an ``all_reduce`` on the caller's current stream; ``wait()`` of the Work ends it.

        Kernels that the program launches in between run while the data is in flight. No other
        collective of this ring may be called between the two. The push kernels launch both halves
        separately, in a capture too. Any other engine runs the call on the ring's comm stream.

        Args:
            out: As many elements as ``x``; filled by ``wait()``.
            x: Any shape. It must not change before ``wait()``.
            op: As in ``all_reduce``, without "premul_sum".
            max_blocks: As in ``all_reduce``.

        Returns:
            The Work. Its ``wait()`` does not block the host on a GPU.

        Raises:
            ArgumentError, DeviceError, DtypeError, ShapeError: Before any launch.
            RingError: The ring has failed or is closed.
        """
        blocks = (
            flags.get(flags.ASYNC_BLOCKS) if max_blocks is None else check_blocks(self, max_blocks)
        )
        check_pair(self, "all_reduce", out, x)
        if out.numel() != x.numel():
            raise shape_mismatch(self, "all_reduce", out, x.numel(), "as many elements as x")
        reduction = self._reduction("all_reduce", x, op)
        if self.size > 1 and x.numel() and self._open_group is None:
            launch = self._engine.begin_all_reduce
            entry = ("all_reduce", x.numel(), x.dtype, reduction, None)
            call = Call("all_reduce", launch, (reduction,), out, x, 0, True, entry, out)
            begun = begin(self, call, blocks)
            if begun is not None:
                return begun
        mode = MODES[False, False, True]._replace(blocks=blocks)
        work = self._all_reduce(out, x, op, None, mode, is_plain(self, x, out))
        assert isinstance(work, Work)
        return work

    def _all_reduce_norm(
        self, x: Tensor, norm: Norm, *, use_calc_stream: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return what ``ops.all_reduce_residual_norm`` does, by one kernel over all ranks.

        None, and nothing launched, where this ring has no kernel for such rows; all ranks decide
        alike. ``x`` and what ``norm`` holds are dense, checked, and want no gradient.
        """
        fused = self._engine.fused_norm(x, norm) if self.size > 1 and x.numel() else None
        if fused is None:
            return None
        y, total = norm.outputs(x)
        launch, steps = fused
        args, collective = (total, norm, steps), "all_reduce_residual_norm"
        entry = (collective, x.numel(), x.dtype, None, None)
        call = Call(collective, launch, args, y, x, None, is_plain(self, x, x), entry, y)
        dispatch(self, call, MODES[use_calc_stream, True, True])
        return y, total

    @overload
    def reduce_scatter(
        self, out: Tensor, x: Tensor | None = None, *, op: str = ..., **options: "Unpack[Waited]"
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self, out: Tensor, x: Tensor | None = None, *, op: str = ..., **options: "Unpack[Unwaited]"
    ) -> Work[Tensor]: ...
    @overload
    def reduce_scatter(
        self, out: Tensor, x: Tensor | None = None, *, op: str = ..., **options: "Unpack[Either]"
    ) -> Tensor | Work[Tensor]: ...

    def reduce_scatter(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        op: str = "sum",
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Tensor | Work[Tensor]:
        """Fill ``out`` of rank r with the r-th part of the reduction of ``x`` over all ranks.

        Args:
            out: Any shape. As the only tensor it is the input.
            x: ``size`` times the elements of ``out``. Default: the only tensor is the input, and
                the output is a new one with this rank's rows along dim 0.
            op: As in ``all_reduce``, without "premul_sum".
            use_calc_stream, sync_op, fenced: See ``CommContext``.

        Returns:
            The output, or a ``Work`` with ``sync_op=False``.

        Raises:
            As ``all_reduce``.
        """
        if x is None:
            x, out = out, new_like(self, "reduce_scatter", out, 1, self.size)
        mode = MODES[use_calc_stream, sync_op, fenced]
        return self._reduce_scatter(out, x, op, mode, is_plain(self, x, out))

    def _reduce_scatter(
        self, out: Tensor, x: Tensor, op: str, mode: StreamMode, plain: bool
    ) -> Tensor | Work:
        """Make a reduce_scatter; ``plain``: the tensors need no check."""
        if not plain:
            check_pair(self, "reduce_scatter", out, x)
        count, total = out.numel(), x.numel()
        if count * self.size != total:
            raise shape_mismatch(self, "reduce_scatter", out, total / self.size, "x.numel() / size")
        reduction = self._engine.reductions.get((x.dtype, op)) or self._reduction(
            "reduce_scatter", x, op
        )
        place = -self.rank * count if self._engine.parts_in_place else None
        launch = self._engine.reduce_scatter if count else nothing
        entry = ("reduce_scatter", total, x.dtype, reduction, None)
        call = Call("reduce_scatter", launch, (reduction,), out, x, place, plain, entry, out)
        return dispatch(self, call, mode)

    @overload
    def reduce(
        self, out: AtRoot, x: Tensor, *, root: int, op: str = ..., **options: "Unpack[Waited]"
    ) -> AtRoot: ...
    @overload
    def reduce(
        self,
        out: Tensor | None,
        x: Tensor,
        *,
        root: int,
        op: str = ...,
        **options: "Unpack[Unwaited]",
    ) -> Work[AtRoot]: ...
    @overload
    def reduce(
        self, out: AtRoot, x: Tensor, *, root: int, op: str = ..., **options: "Unpack[Either]"
    ) -> AtRoot | Work[AtRoot]: ...

    def reduce(
        self,
        out: Tensor | None,
        x: Tensor,
        *,
        root: int,
        op: str = "sum",
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Tensor | Work | None:
        """Fill ``out`` of ``root`` with the reduction of ``x``; elsewhere it is not touched.

        Args:
            out: As many elements as ``x``; may be None on other ranks.
            x: Any shape.
            root: Position of the rank that gets the result.
            op: As in ``all_reduce``, without "premul_sum".
            use_calc_stream, sync_op, fenced: See ``CommContext``.

        Returns:
            ``out``, or a ``Work`` with ``sync_op=False``.

        Raises:
            PeerError: ``root`` is not a position in the ring.
            Otherwise as ``all_reduce``.
        """
        target, plain = at_root(self, "reduce", root, out, x)
        count = x.numel()
        if target is not None and target.numel() != count:
            raise shape_mismatch(self, "reduce", target, count, "as many elements as x")
        reduction = self._reduction("reduce", x, op)
        launch = self._engine.reduce if count else nothing
        entry = ("reduce", count, x.dtype, reduction, root)
        call = Call("reduce", launch, (root, reduction), target, x, 0, plain, entry, out)
        return dispatch(self, call, MODES[use_calc_stream, sync_op, fenced])
