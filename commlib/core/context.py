"""A ring of ranks as its caller sees it: one verb a collective."""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from commlib import flags
from commlib.core import dispatch, group
from commlib.core.compiler import leave_to_eager, untraced
from commlib.core.validation import (
    check_dtype,
    check_out,
    check_pair,
    check_peer,
    check_tensor,
    counts,
    misfit,
)
from commlib.core.work import Work
from commlib.engines.base import EngineRing
from commlib.engines.reductions import wire
from commlib.errors import ArgumentError, ShapeError
from commlib.p2p.routes import Routes

if TYPE_CHECKING:
    from commlib.p2p.fused_norm import Norm

Tensor = torch.Tensor

_GROUP = (
    "ring.group() can't be traced. Call the functions of commlib.ops without a group: compiled "
    "code keeps their order. Where a send and a receive would wait for each other, call "
    "ops.all_to_all with splits, or receive first on one side"
)


class CommContext(EngineRing):
    """One ring: rank, size, ranks, device and streams, and the collectives over it.

    Verbs take the output first, then the input, and positions in the ring as peers and roots.
    With ``use_calc_stream=True`` a verb runs on the caller's current stream. With False it runs on
    the ring's comm stream, which first waits for the current stream; with ``sync_op=True`` the
    current stream then waits for it, with ``sync_op=False`` a ``Work`` is returned. The host never
    blocks on a GPU; on a CPU a verb blocks, at most ``timeout`` seconds, unless ``sync_op=False``.
    ``fenced=False`` leaves both waits to the program (the legacy comm-stream form).
    Strided tensors are staged, so that nothing outside a view is read or written.
    """

    def all_reduce(
        self,
        out: Tensor,
        x: Tensor,
        *,
        op: str = "sum",
        factor: float | None = None,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        max_blocks: int | None = None,
    ) -> Any:
        """Fill ``out`` on every rank with the reduction of ``x`` over all ranks (any shape).

        ``max_blocks`` bounds the blocks of a push kernel, which wait on the GPU for the peers. By
        default an asynchronous call takes at most FLAGS_comm_async_blocks, so that the program's
        own kernels keep the rest of the GPU; any other call takes what is fastest.
        """
        dense = check_pair(self, "all_reduce", out, x)
        count = x.numel()
        if out is not x and out.numel() != count:
            raise misfit(self, "all_reduce", out, count, "as many elements as x")
        known = self._reductions.get((x.dtype, op)) if factor is None else None
        args = (known or self._reduction("all_reduce", x, op, factor),)
        launch = self._pick(self._all_reduce, count)
        how = use_calc_stream, sync_op, fenced, 0 if max_blocks is None else self._most(max_blocks)
        return dispatch.run(self, "all_reduce", launch, args, out, x, 0, dense, out, how)

    def all_reduce_begin(
        self, out: Tensor, x: Tensor, *, op: str = "sum", max_blocks: int | None = None
    ) -> Work:
        """Begin an ``all_reduce`` on the caller's current stream; ``wait()`` of the Work ends it.

        Kernels that the program launches between the two run while the data is under way. ``x``
        must not change before ``wait()``, which fills ``out`` and does not block the host. No other
        collective of this ring may be called between the two. With the push kernels both halves are
        launches of their own, in a capture too; anything else runs on the ring's comm stream.
        ``max_blocks`` is as in ``all_reduce``.
        """
        blocks = flags.get(flags.ASYNC_BLOCKS) if max_blocks is None else self._most(max_blocks)
        dense = check_pair(self, "all_reduce", out, x)
        if out.numel() != x.numel():
            raise misfit(self, "all_reduce", out, x.numel(), "as many elements as x")
        reduction = self._reduction("all_reduce", x, op)
        if dense and self.size > 1 and x.numel() and self.open_group is None:
            begin = dispatch.begin(self, "all_reduce", self._begin, out, x, reduction, blocks)
            if begin is not None:
                return begin
        how = {"use_calc_stream": False, "sync_op": False}
        work = self.all_reduce(out, x, op=op, max_blocks=blocks, **how)
        assert isinstance(work, Work)
        return work

    def _most(self, max_blocks: int) -> int:
        """Return ``max_blocks`` once it is known to be a number of blocks."""
        if isinstance(max_blocks, bool) or not isinstance(max_blocks, int) or max_blocks < 1:
            raise ArgumentError(
                f"{self.where('all_reduce')}: max_blocks={max_blocks!r}; expected a whole number "
                f"above 0, or None for FLAGS_comm_async_blocks"
            )
        return max_blocks

    def all_reduce_norm(
        self, x: Tensor, norm: "Norm", *, use_calc_stream: bool = True
    ) -> tuple[Tensor, Tensor] | None:
        """Return what ``ops.all_reduce_residual_norm`` does, by one kernel over all ranks.

        None, and nothing launched, where this ring has no kernel for such rows; all ranks decide
        alike. ``x`` and what ``norm`` holds are dense, checked, and want no gradient.
        """
        fused = self._fused(x, norm) if self.size > 1 and x.numel() else None
        if fused is None:
            return None
        y, total = norm.outputs(x)
        (launch, steps), how = fused, (use_calc_stream, True, True, 0)
        args, verb = (total, norm, steps), "all_reduce_residual_norm"
        dispatch.run(self, verb, launch, args, y, x, None, True, y, how)
        return y, total

    def all_gather(
        self,
        out: Tensor,
        x: Tensor,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` on every rank with the ``x`` of rank 0, 1, … one after the other."""
        dense = check_pair(self, "all_gather", out, x)
        count = x.numel()
        if out.numel() != count * self.size:
            raise misfit(self, "all_gather", out, count * self.size, "size * x.numel()")
        place = self.rank * count if self.parts_in_place else None
        launch = self._pick(self._all_gather, count)
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "all_gather", launch, (), out, x, place, dense, out, how)

    def reduce_scatter(
        self,
        out: Tensor,
        x: Tensor,
        *,
        op: str = "sum",
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
    ) -> Any:
        """Fill ``out`` of rank r with the r-th part of the reduction of ``x`` over all ranks."""
        dense = check_pair(self, "reduce_scatter", out, x)
        count = out.numel()
        if count * self.size != x.numel():
            raise misfit(self, "reduce_scatter", out, x.numel() / self.size, "x.numel() / size")
        args = (self._reduction("reduce_scatter", x, op),)
        place = -self.rank * count if self.parts_in_place else None
        launch = self._pick(self._reduce_scatter, count)
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "reduce_scatter", launch, args, out, x, place, dense, out, how)

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
        source = self._from_root("broadcast", root, out, x, 1)
        launch = self._pick(self._broadcast, out.numel())
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "broadcast", launch, (root,), out, source, 0, False, out, how)

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
        target = self._at_root("reduce", root, out, x)
        if target is not None and target.numel() != x.numel():
            raise misfit(self, "reduce", target, x.numel(), "as many elements as x")
        args = (root, self._reduction("reduce", x, op))
        launch = self._pick(self._reduce, x.numel())
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "reduce", launch, args, target, x, 0, False, out, how)

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
        target = self._at_root("gather", root, out, x)
        if target is not None and target.numel() != x.numel() * self.size:
            raise misfit(self, "gather", target, x.numel() * self.size, "size * x.numel()")
        launch = self._pick(self._gather, x.numel())
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "gather", launch, (root,), target, x, None, False, out, how)

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
        source = self._from_root("scatter", root, out, x, self.size)
        launch = self._pick(self._scatter, out.numel())
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "scatter", launch, (root,), out, source, None, False, out, how)

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
        """Send the j-th part of ``x`` to rank j and fill ``out`` with what comes, in rank order.

        Parts are rows along dim 0: equal ones, or ``in_splits`` / ``out_splits`` rows a rank. All
        members give splits or none does.
        """
        dense = check_pair(self, "all_to_all", out, x)
        sends = counts(self, "all_to_all", "in_splits", x, in_splits)
        takes = counts(self, "all_to_all", "out_splits", out, out_splits)
        if sends[self.rank] != takes[self.rank]:
            raise ShapeError(
                f"{self.where('all_to_all')}: this rank sends itself {sends[self.rank]} elements "
                f"but expects {takes[self.rank]}; make in_splits[{self.rank}] and "
                f"out_splits[{self.rank}] name the same rows"
            )
        # With splits every rank takes part, however few rows are its own: others may have some.
        equal = in_splits is None and out_splits is None
        launch = self._pick(
            self._equal_parts if equal else self._all_to_all, x.numel() if equal else 1
        )
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(
            self, "all_to_all", launch, (takes, sends), out, x, None, dense, out, how
        )

    def exchange_rows(
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
        launch = self._own_rows
        if routes.most * x.shape[1]:
            launch = self._exchange_rows
            self._prepare_rows()
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "exchange_rows", launch, (routes,), out, x, None, dense, out, how)

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
        launch = self._pick(self._send, x.numel())
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "send", launch, (peer,), None, x, None, False, None, how)

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
        launch = self._pick(self._recv, out.numel())
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "recv", launch, (peer,), out, None, None, False, out, how)

    def barrier(
        self, *, use_calc_stream: bool = True, sync_op: bool = True, fenced: bool = True
    ) -> Any:
        """Hold this rank's stream (GPU) or host (CPU) until every rank has come here."""
        launch = self._pick(self._barrier, 1)
        how = use_calc_stream, sync_op, fenced, 0
        return dispatch.run(self, "barrier", launch, (), None, None, None, False, None, how)

    def group(
        self, *, use_calc_stream: bool = True, sync_op: bool = True
    ) -> AbstractContextManager[Work]:
        """Collect the calls of a ``with`` block and launch them as one operation at its end.

        Sends and receives in one group can't wait for each other in a circle. Results are valid
        after the block (with ``sync_op=False``: after ``wait()`` of the yielded ``Work``). An
        exception inside the block launches nothing. torch.compile leaves a function with a group
        to eager code.

        Only the calls that the block itself makes on this ring are collected. Those of other
        threads, of other rings, and of a backward inside the block are launched at once, before
        the group. An operator that computes with its collective's result, and an ``x`` that
        requires grad, are an ``ArgumentError`` inside the block.
        """
        if torch.compiler.is_compiling():
            leave_to_eager(_GROUP)
        return untraced(group.group(self, use_calc_stream, sync_op))

    def explain(self, nbytes: int, dtype: torch.dtype, op: str = "sum") -> str:
        """Say what carries an ``all_reduce`` of ``nbytes`` bytes of ``dtype`` here, and why.

        Raises ``DtypeError`` for what is refused, ``ArgumentError`` for part of an element.
        """
        check_dtype(self, "explain", dtype)
        if not hasattr(nbytes, "__index__"):
            raise ArgumentError(
                f"{self.where('explain')}: nbytes={nbytes!r}; expected a number of bytes; pass "
                f"x.nbytes"
            )
        reduction = wire(dtype, op, self.reducer, 1.0 if op == "premul_sum" else None)
        if nbytes < 0 or nbytes % dtype.itemsize:
            raise ArgumentError(
                f"{self.where('explain')}: nbytes={nbytes}: expected a multiple of "
                f"{dtype.itemsize}, the bytes of one {dtype}"
            )
        if self.fault is not None:
            return f"nothing: the ring can't be used: {self.fault}"
        if nbytes == 0 or self.size == 1:
            return f"nothing is sent: {'a ring of one rank' if nbytes else 'no bytes'}"
        return self._carrier(nbytes, reduction)
