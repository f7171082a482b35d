"""all_reduce, also in two halves and together with a norm."""

from typing import Unpack, overload

import torch

from commlib import flags
from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import ReducingEither, ReducingUnwaited, ReducingWaited
from commlib.core.collectives.reduction import reduction_of
from commlib.core.dispatch import begin, dispatch, is_plain, launched
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, StreamMode
from commlib.core.validation import check_blocks, check_pair, new_like, shape_mismatch
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work
from commlib.engines.reduction_names import RingReduction
from commlib.p2p.fused_norm import Norm

Tensor = torch.Tensor


class AllReduce(Ring):
    """The collective of a ring that reduces over all ranks, on every rank."""

    @overload
    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        max_blocks: int | None = ...,
        **options: "Unpack[ReducingWaited]",
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        max_blocks: int | None = ...,
        **options: "Unpack[ReducingUnwaited]",
    ) -> Work[Tensor]: ...
    @overload
    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        max_blocks: int | None = ...,
        **options: "Unpack[ReducingEither]",
    ) -> Tensor | Work[Tensor]: ...

    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        op: RingReduction = "sum",
        factor: float | None = None,
        max_blocks: int | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | Work[Tensor]:
        """Fill ``out`` on every rank with the reduction of ``x`` over all ranks.

        Args:
            out: As many elements as ``x``; may be ``x``. As the only tensor it is the input.
            x: Any shape. Default: the only tensor is the input, and the output is a new one.
            op: "sum", "prod", "min", "max", "avg" or "premul_sum" in lower or upper case, or a
                ``torch.distributed.ReduceOp``; on a CPU also "band", "bor" and "bxor" of integers.
            factor: The factor of "premul_sum".
            max_blocks: Most blocks of a push kernel, which wait on the GPU for the peers. By
                default an asynchronous call takes at most FLAGS_comm_async_blocks, so that the
                program's own kernels keep the rest of the GPU; any other call takes the fastest
                grid.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

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
        return self._all_reduce(out, x, op, factor, mode, is_plain(self, x, out), timeout)

    def _all_reduce(
        self,
        out: Tensor,
        x: Tensor,
        op: RingReduction,
        factor: float | None,
        mode: StreamMode,
        plain: bool,
        timeout: Seconds | None = None,
    ) -> Tensor | Work:
        """Make an all_reduce; ``plain``: the tensors need no check."""
        if not plain:
            check_pair(self, "all_reduce", out, x)
        count = x.numel()
        if out is not x and out.numel() != count:
            raise shape_mismatch(self, "all_reduce", out, count, "as many elements as x")
        named = factor is None and type(op) is str
        cached = self._engine.reductions.get((x.dtype, op)) if named else None
        reduction = cached or reduction_of(self, "all_reduce", x, op, factor)
        launch = self._engine.all_reduce if count else nothing
        entry = ("all_reduce", count, x.dtype, reduction, None)
        args, quick = (reduction,), timeout is None and plain
        if quick and launched(self, mode, "all_reduce", launch, args, out, x, entry):
            return out
        call = Call("all_reduce", launch, args, out, x, 0, plain, entry, out)
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

    def all_reduce_begin(
        self, out: Tensor, x: Tensor, *, op: RingReduction = "sum", max_blocks: int | None = None
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
        reduction = reduction_of(self, "all_reduce", x, op)
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
