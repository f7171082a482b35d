"""The collectives of a process group, each as calls of its ring."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from commlib.compat.c10d.gloo_order import all_reduce_flat, is_flat, reduce_scatter_each
from commlib.compat.c10d.launching import Step
from commlib.compat.c10d.options import check_rows, distinct, listed, options, parts, single
from commlib.compat.c10d.reductions import BY_HASH, arguments_of
from commlib.compat.c10d.work import DONE
from commlib.core.calls.order import CallOrder
from commlib.core.compiler import untraced_methods
from commlib.core.context import CommContext
from commlib.core.stream_mode import MODES

Tensor = torch.Tensor
Given = Tensor | Sequence[Any]
AllgatherOptions, AllreduceOptions = c10d.AllgatherOptions, c10d.AllreduceOptions
ReduceScatterOptions = c10d.ReduceScatterOptions
SYNC = MODES[True, True, True]  # in the order of the caller's stream


@untraced_methods
class Collectives:
    """The collectives of ``torch.distributed.ProcessGroup``, under their old and new names.

    A method takes an option object, or the shorter arguments of torch's own overloads. With
    ``asyncOp`` (the default) the call runs on the ring's own stream, and on a CPU while the host
    goes on; without it the call is in the order of the caller's stream.
    """

    _main_order: CallOrder | None

    def _ring_for(self, tensors: Given) -> CommContext:
        raise NotImplementedError

    def _plain_ring(self, out: Tensor, x: Tensor, opts: Any) -> CommContext | None:
        """Return the ring of a synchronous call that can go to it as it is, else None."""
        raise NotImplementedError

    def _plain_call(self, call: Callable[..., Any], *args: Any) -> dist.Work:
        """Make a call that ``_plain_ring`` allows: frequent ones, in few steps."""
        order = self._main_order
        if order is None:
            call(*args)
        else:
            order.run(call, *args)
        return DONE

    def _issue(self, ring: CommContext, step: Step, opts: Any) -> dist.Work:
        raise NotImplementedError

    def _is_coalescing(self) -> bool:
        """Return True if this thread's calls are kept for the end of coalescing."""
        raise NotImplementedError

    # -- reductions --------------------------------------------------------------------------------

    def allreduce(
        self, tensors: Given, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce each tensor over all ranks, in place."""
        single_list = isinstance(tensors, list) and len(tensors) == 1
        if type(opts) is AllreduceOptions and not opts.asyncOp and single_list:
            x, op = tensors[0], BY_HASH.get(hash(opts.reduceOp))
            if op is not None and (ring := self._plain_ring(x, x, opts)) is not None:
                return self._plain_call(ring._all_reduce, x, x, op, None, SYNC, True)
        if not hasattr(opts, "asyncOp"):
            opts = options(AllreduceOptions, opts, timeout, reduceOp=opts)
        reduced, reduction = listed(tensors), arguments_of(opts.reduceOp)
        ring = self._ring_for(reduced)
        calls = [partial(ring.all_reduce, x, x, **reduction) for x in reduced]
        return self._issue(ring, Step(calls, reduced), opts)

    def allreduce_coalesced(
        self, tensors: Given, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce several tensors as one operation, in place.

        On a CPU tensors of one dtype are reduced as one flat tensor. gloo does so too, and an
        element's position decides about the order of its sum.
        """
        opts = options(c10d.AllreduceCoalescedOptions, opts, timeout, reduceOp=opts)
        reduced, reduction = listed(tensors), arguments_of(opts.reduceOp)
        ring = self._ring_for(reduced)
        if ring.stream is not None or self._is_coalescing() or not is_flat(ring, reduced):
            return self.allreduce(reduced, opts)
        call = partial(all_reduce_flat, ring, reduced, **reduction)
        return self._issue(ring, Step([call], reduced, lists=True), opts)

    def reduce(
        self, tensors: Given, root: Any = None, op: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Reduce a tensor over all ranks, in place on the root."""
        opts = options(c10d.ReduceOptions, root, timeout, rootRank=root, reduceOp=op)
        out = single(tensors)
        ring = self._ring_for([out])
        reduction = arguments_of(opts.reduceOp)
        call = partial(ring.reduce, out, out, root=opts.rootRank, **reduction)
        return self._issue(ring, Step([call], [out]), opts)

    def reduce_scatter(
        self, out: Given, inputs: Sequence[Any], op: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Fill ``out`` of rank r with the reduction of tensor r of all ranks.

        On a CPU each part is reduced by itself from three ranks on, for the bits of gloo.
        """
        opts = options(ReduceScatterOptions, op, timeout, reduceOp=op)
        target = single(out)
        ring = self._ring_for([target])
        reduction = arguments_of(opts.reduceOp)
        call: partial[Any] = partial(ring.reduce_scatter, target, parts(inputs), **reduction)
        if ring.stream is None and ring.size > 2:
            call = partial(reduce_scatter_each, ring, target, parts(inputs), **reduction)
        return self._issue(ring, Step([call], [target], lists=True), opts)

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        """Fill ``out`` of rank r with the reduction of part r of all ranks."""
        if type(opts) is ReduceScatterOptions and not opts.asyncOp:
            op = BY_HASH.get(hash(opts.reduceOp))
            if op is not None and (ring := self._plain_ring(out, x, opts)) is not None:
                return self._plain_call(ring._reduce_scatter, out, x, op, None, SYNC, True)
        return self.reduce_scatter_single_coalesced([out], [x], opts)

    def reduce_scatter_single_coalesced(
        self, outs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Make several ``reduce_scatter_single`` as one operation."""
        opts = options(ReduceScatterOptions, opts)
        targets = listed(outs)
        ring = self._ring_for(targets)
        reduction = arguments_of(opts.reduceOp)
        pairs = zip(targets, listed(inputs), strict=True)
        calls = [partial(ring.reduce_scatter, out, x, **reduction) for out, x in pairs]
        return self._issue(ring, Step(calls, targets), opts)

    # -- copies ------------------------------------------------------------------------------------

    def broadcast(
        self, tensors: Given, root: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Fill the tensors of every rank with those of the root."""
        opts = options(c10d.BroadcastOptions, root, timeout, rootRank=root)
        copied = listed(tensors)
        ring = self._ring_for(copied)
        calls = [partial(ring.broadcast, x, x, root=opts.rootRank) for x in copied]
        return self._issue(ring, Step(calls, copied), opts)

    def allgather(self, outs: Sequence[Any], x: Given, opts: Any = None) -> dist.Work:
        """Fill tensor r of ``outs`` on every rank with ``x`` of rank r; sizes may differ."""
        opts = options(AllgatherOptions, opts)
        targets, source = parts(outs), single(x)
        ring = self._ring_for([source])
        call = partial(ring.all_gather, distinct(ring, "all_gather", targets), source)
        return self._issue(ring, Step([call], targets, lists=True), opts)

    def allgather_coalesced(
        self, outs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Gather several tensors: ``outs[r][i]`` is tensor i of rank r."""
        opts = options(AllgatherOptions, opts)
        sources, rows = listed(inputs), [listed(row) for row in outs]
        ring = self._ring_for(sources)
        check_rows(ring, rows, sources)
        calls = [
            partial(ring.all_gather, [row[i] for row in rows], x) for i, x in enumerate(sources)
        ]
        return self._issue(ring, Step(calls, [x for row in rows for x in row], lists=True), opts)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> dist.Work:
        """Fill ``out`` on every rank with ``x`` of all ranks in their order."""
        if type(opts) is AllgatherOptions and not opts.asyncOp:
            ring = self._plain_ring(out, x, opts)
            if ring is not None:
                return self._plain_call(ring._all_gather, out, x, SYNC, True)
        return self.all_gather_single_coalesced([out], [x], opts)

    def all_gather_single_coalesced(
        self, outs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Make several ``all_gather_single`` as one operation."""
        opts = options(AllgatherOptions, opts)
        targets, sources = listed(outs), listed(inputs)
        ring = self._ring_for(targets)
        pairs = zip(targets, sources, strict=True)
        calls = [partial(ring.all_gather, out, x) for out, x in pairs]
        return self._issue(ring, Step(calls, targets), opts)

    def gather(
        self, outs: Sequence[Any], x: Given, root: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Fill tensor r of ``outs`` on the root with ``x`` of rank r."""
        opts = options(c10d.GatherOptions, root, timeout, rootRank=root)
        source, targets = single(x), parts(outs)
        ring = self._ring_for([source])
        out = distinct(ring, "gather", targets) if ring.rank == opts.rootRank else None
        call = partial(ring.gather, out, source, root=opts.rootRank)
        return self._issue(ring, Step([call], targets, lists=True), opts)

    def scatter(
        self, out: Given, inputs: Sequence[Any], root: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Fill ``out`` of rank r with tensor r of the root."""
        opts = options(c10d.ScatterOptions, root, timeout, rootRank=root)
        target = single(out)
        ring = self._ring_for([target])
        chunks = parts(inputs) if ring.rank == opts.rootRank else None
        call = partial(ring.scatter, target, chunks, root=opts.rootRank)
        return self._issue(ring, Step([call], [target], lists=True), opts)

    # -- exchanges ---------------------------------------------------------------------------------

    def all_to_all_single(
        self,
        out: Tensor,
        x: Tensor,
        out_splits: Sequence[int],
        in_splits: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Send part j of ``x`` to rank j; empty splits stand for equal parts."""
        opts = options(c10d.AllToAllOptions, opts)
        target, source = single(out), single(x)
        ring = self._ring_for([target])
        takes, sends = _splits(ring, target, out_splits), _splits(ring, source, in_splits)
        call = partial(ring.all_to_all, target, source, out_splits=takes, in_splits=sends)
        return self._issue(ring, Step([call], [target]), opts)

    def alltoall(
        self, outs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Send tensor j of ``inputs`` to rank j; fill tensor j of ``outs`` with what it sends."""
        opts = options(c10d.AllToAllOptions, opts)
        targets, sources = listed(outs), listed(inputs)
        ring = self._ring_for(targets)
        call = partial(ring.all_to_all, distinct(ring, "all_to_all", targets), sources)
        return self._issue(ring, Step([call], targets, lists=True), opts)

    # -- the names before torch 2.13 ---------------------------------------------------------------

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _splits(ring: CommContext, tensor: Tensor, splits: Sequence[int]) -> list[int] | None:
    """Return the rows of each part, on a CPU also of equal parts: another rank may pass splits."""
    rows = 0 if splits or ring.stream is not None or not tensor.dim() else tensor.shape[0]
    equal = [rows // ring.size] * ring.size if rows and rows % ring.size == 0 else None
    return list(splits) or equal
