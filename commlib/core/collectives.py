"""The collectives of a ring: each validates its call once, and dispatches it."""

from collections.abc import Iterable
from typing import Any

import torch

from commlib import flags
from commlib.core.call import Call, Launch
from commlib.core.dispatch import begin, dispatch, nothing
from commlib.core.ring import Ring
from commlib.core.stream_mode import stream_mode
from commlib.core.validation import (
    at_root,
    check_blocks,
    check_out,
    check_pair,
    check_peer,
    check_tensor,
    counts,
    from_root,
    new_like,
    shape_mismatch,
)
from commlib.core.work import Work
from commlib.errors import ArgumentError, ShapeError
from commlib.p2p.fused_norm import Norm
from commlib.p2p.routes import Routes

Tensor = torch.Tensor


class Collectives(Ring):
    """The collectives of a ``CommContext``; the ring itself is in ``core/context.py``."""

    def _reduction(self, collective: str, x: Tensor, op: str, factor: float | None = None) -> Any:
        """Return the reduction in the engine's own terms."""
        try:
            return self._engine.reduction(x.dtype, op, factor)
        except ArgumentError as error:
            raise type(error)(f"{self._describe(collective)}: {error}") from None

    def all_reduce(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        op: str = "sum",
        factor: float | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        max_blocks: int | None = None,
    ) -> Any:
        """Fill ``out`` on every rank with the reduction of ``x`` over all ranks (any shape).

        With one tensor, return the reduction in a new one.
        ``max_blocks`` bounds the blocks of a push kernel, which wait on the GPU for the peers. By
        default an asynchronous call takes at most FLAGS_comm_async_blocks, so that the program's
        own kernels keep the rest of the GPU; any other call takes the fastest grid.
        """
        if x is None:
            x, out = out, new_like(self, "all_reduce", out)
        dense = check_pair(self, "all_reduce", out, x)
        count = x.numel()
        if out is not x and out.numel() != count:
            raise shape_mismatch(self, "all_reduce", out, count, "as many elements as x")
        known = self._engine.reductions.get((x.dtype, op)) if factor is None else None
        args = (known or self._reduction("all_reduce", x, op, factor),)
        launch = self._engine.all_reduce if count else nothing
        blocks = 0 if max_blocks is None else check_blocks(self, max_blocks)
        mode = stream_mode(use_calc_stream, sync_op, fenced, blocks)
        return dispatch(self, Call("all_reduce", launch, args, out, x, 0, dense, out), mode)

    def all_reduce_begin(
        self, out: Tensor, x: Tensor, *, op: str = "sum", max_blocks: int | None = None
    ) -> Work:
        """Begin an ``all_reduce`` on the caller's current stream; ``wait()`` of the Work ends it.

        Kernels that the program launches in between run while the data is in flight. ``x``
        must not change before ``wait()``, which fills ``out`` and does not block the host. No other
        collective of this ring may be called between the two. The push kernels launch both halves
        separately, in a capture too. Any other engine runs the call on the ring's comm stream.
        ``max_blocks`` is as in ``all_reduce``.
        """
        blocks = (
            flags.get(flags.ASYNC_BLOCKS) if max_blocks is None else check_blocks(self, max_blocks)
        )
        dense = check_pair(self, "all_reduce", out, x)
        if out.numel() != x.numel():
            raise shape_mismatch(self, "all_reduce", out, x.numel(), "as many elements as x")
        reduction = self._reduction("all_reduce", x, op)
        if dense and self.size > 1 and x.numel() and self._open_group is None:
            launch = self._engine.begin_all_reduce
            begun = begin(
                self, Call("all_reduce", launch, (reduction,), out, x, 0, True, out), blocks
            )
            if begun is not None:
                return begun
        mode = {"use_calc_stream": False, "sync_op": False}
        work = self.all_reduce(out, x, op=op, max_blocks=blocks, **mode)
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
        call = Call(collective, launch, args, y, x, None, True, y)
        dispatch(self, call, stream_mode(use_calc_stream, True))
        return y, total

    def all_gather(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` on every rank with the ``x`` of rank 0, 1, … along dim 0.

        With one tensor, return a new one with ``size`` times the rows.
        """
        if x is None:
            x, out = out, new_like(self, "all_gather", out, self.size)
        dense = check_pair(self, "all_gather", out, x)
        count = x.numel()
        if out.numel() != count * self.size:
            raise shape_mismatch(self, "all_gather", out, count * self.size, "size * x.numel()")
        place = self.rank * count if self._engine.parts_in_place else None
        launch = self._engine.all_gather if count else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("all_gather", launch, (), out, x, place, dense, out), mode)

    def reduce_scatter(
        self,
        out: Tensor,
        x: Tensor | None = None,
        *,
        op: str = "sum",
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` of rank r with the r-th part of the reduction of ``x`` over all ranks.

        With one tensor, return a new one with this rank's rows along dim 0.
        """
        if x is None:
            x, out = out, new_like(self, "reduce_scatter", out, 1, self.size)
        dense = check_pair(self, "reduce_scatter", out, x)
        count = out.numel()
        if count * self.size != x.numel():
            raise shape_mismatch(
                self, "reduce_scatter", out, x.numel() / self.size, "x.numel() / size"
            )
        args = (self._reduction("reduce_scatter", x, op),)
        place = -self.rank * count if self._engine.parts_in_place else None
        launch = self._engine.reduce_scatter if count else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("reduce_scatter", launch, args, out, x, place, dense, out), mode)

    def broadcast(
        self,
        out: Tensor,
        x: Tensor | None,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` on every rank with ``x`` of ``root``; elsewhere ``x`` is not read."""
        source = from_root(self, "broadcast", root, out, x, 1)
        launch = self._engine.broadcast if out.numel() else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("broadcast", launch, (root,), out, source, 0, False, out), mode)

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
    ) -> Any:
        """Fill ``out`` of ``root`` with the reduction of ``x``; elsewhere it is not touched."""
        target = at_root(self, "reduce", root, out, x)
        if target is not None and target.numel() != x.numel():
            raise shape_mismatch(self, "reduce", target, x.numel(), "as many elements as x")
        args = (root, self._reduction("reduce", x, op))
        launch = self._engine.reduce if x.numel() else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("reduce", launch, args, target, x, 0, False, out), mode)

    def gather(
        self,
        out: Tensor | None,
        x: Tensor,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` of ``root`` with every rank's ``x`` in turn; elsewhere it is not touched."""
        target = at_root(self, "gather", root, out, x)
        if target is not None and target.numel() != x.numel() * self.size:
            raise shape_mismatch(self, "gather", target, x.numel() * self.size, "size * x.numel()")
        launch = self._engine.gather if x.numel() else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("gather", launch, (root,), target, x, None, False, out), mode)

    def scatter(
        self,
        out: Tensor,
        x: Tensor | None,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` of rank r with part r of ``x`` of ``root``; elsewhere x is not read."""
        source = from_root(self, "scatter", root, out, x, self.size)
        launch = self._engine.scatter if out.numel() else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("scatter", launch, (root,), out, source, None, False, out), mode)

    def all_to_all(
        self,
        out: Tensor,
        x: Tensor,
        *,
        out_splits: Iterable[int] | None = None,
        in_splits: Iterable[int] | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Send part j of ``x`` to rank j; fill ``out`` with the received parts in rank order.

        Parts are rows along dim 0: equal ones, or ``in_splits`` / ``out_splits`` rows per rank.
        All members pass splits, or none does.
        """
        dense = check_pair(self, "all_to_all", out, x)
        sends = counts(self, "all_to_all", "in_splits", x, in_splits)
        takes = counts(self, "all_to_all", "out_splits", out, out_splits)
        if sends[self.rank] != takes[self.rank]:
            raise ShapeError(
                f"{self._describe('all_to_all')}: this rank sends itself {sends[self.rank]} "
                f"elements but expects {takes[self.rank]}; make in_splits[{self.rank}] and "
                f"out_splits[{self.rank}] name the same rows"
            )
        # With splits every rank takes part, however few rows are its own: others may have some.
        equal = in_splits is None and out_splits is None
        launch: Launch = self._engine.all_to_all
        if equal:
            launch = self._engine.equal_parts if x.numel() else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        call = Call("all_to_all", launch, (takes, sends), out, x, None, dense, out)
        return dispatch(self, call, mode)

    def _exchange_rows(
        self,
        out: Tensor,
        x: Tensor,
        routes: Routes,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill the 2-D ``out`` with rows of every rank's 2-D ``x``, each where ``routes`` says.

        Every member calls it with the routes that belong together; nothing checks that here. On
        GPUs of one host the first call sets a channel up and blocks the host for it.
        """
        dense = check_pair(self, "exchange_rows", out, x)
        # Every rank takes part in what any rank does.
        launch = self._engine.own_rows
        if routes.most * x.shape[1]:
            launch = self._engine.exchange_rows
            self._engine.prepare_rows()
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(
            self, Call("exchange_rows", launch, (routes,), out, x, None, dense, out), mode
        )

    def send(
        self,
        x: Tensor,
        *,
        peer: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Send ``x`` to rank ``peer``, which must call ``recv`` with as many bytes."""
        check_peer(self, "send", peer)
        check_tensor(self, "send", "x", x)
        launch = self._engine.send if x.numel() else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("send", launch, (peer,), None, x, None, False, None), mode)

    def recv(
        self,
        out: Tensor,
        *,
        peer: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` with what rank ``peer`` sends."""
        check_peer(self, "recv", peer)
        check_out(self, "recv", out)
        launch = self._engine.recv if out.numel() else nothing
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("recv", launch, (peer,), out, None, None, False, out), mode)

    def barrier(
        self, *, use_calc_stream: bool = True, sync_op: bool = True, fenced: bool = True
    ) -> Any:
        """Hold this rank's stream (GPU) or host (CPU) until every rank has called it."""
        launch = self._engine.barrier
        mode = stream_mode(use_calc_stream, sync_op, fenced)
        return dispatch(self, Call("barrier", launch, (), None, None, None, False, None), mode)
