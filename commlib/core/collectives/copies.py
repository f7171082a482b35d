"""Collectives that copy between a root and all ranks, and the barrier."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar, Unpack, overload

import torch

from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.collectives.parts import (
    check_even,
    check_mode,
    check_parts,
    fill,
    is_list,
    joined,
)
from commlib.core.dispatch import dispatch
from commlib.core.failures import named
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, StreamMode
from commlib.core.validation import (
    NOT_GIVEN,
    at_root,
    check_position,
    from_root,
    new_at_root,
    new_like,
    shape_mismatch,
)
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work
from commlib.deadlines import Deadline
from commlib.errors import CommTimeout

Tensor = torch.Tensor
Given = Tensor | Sequence[Tensor] | None
AtRoot = TypeVar("AtRoot", bound=Tensor | list[Tensor] | None)


class Copies(Ring):
    """The collectives of a ring that copy tensors from a root or to a root, and barriers."""

    @overload
    def broadcast(
        self, out: Tensor, x: Tensor | None = ..., *, root: int, **options: "Unpack[Waited]"
    ) -> Tensor: ...
    @overload
    def broadcast(
        self, out: Tensor, x: Tensor | None = ..., *, root: int, **options: "Unpack[Unwaited]"
    ) -> Work[Tensor]: ...
    @overload
    def broadcast(
        self, out: Tensor, x: Tensor | None = ..., *, root: int, **options: "Unpack[Either]"
    ) -> Tensor | Work[Tensor]: ...

    def broadcast(
        self,
        out: Tensor,
        x: Tensor | None = NOT_GIVEN,
        *,
        root: int,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | Work[Tensor]:
        """Fill ``out`` on every rank with ``x`` of ``root``.

        Args:
            out: Any shape, with as many elements on every rank. As the only tensor it is the input.
            x: As many elements; may be ``out``, and None on other ranks, where it is not read.
                Default: the only tensor is the input, and the output is a new one.
            root: Position of the rank that sends.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            ``out``, or a ``Work`` with ``sync_op=False``.

        Raises:
            PeerError: ``root`` is not a position in the ring.
            Otherwise as ``all_gather``.
        """
        if x is NOT_GIVEN:
            x, out = out, new_like(self, "broadcast", out)
        source, plain = from_root(self, "broadcast", root, out, x, 1)
        count = out.numel()
        launch = self._engine.broadcast if count else nothing
        entry = ("broadcast", count, out.dtype, None, root)
        call = Call("broadcast", launch, (root,), out, source, 0, plain, entry, out)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

    @overload
    def gather(
        self, out: AtRoot, x: Tensor = ..., *, root: int, **options: "Unpack[Waited]"
    ) -> AtRoot: ...
    @overload
    def gather(
        self, out: AtRoot, x: Tensor = ..., *, root: int, **options: "Unpack[Unwaited]"
    ) -> Work[AtRoot]: ...
    @overload
    def gather(
        self, out: AtRoot, x: Tensor = ..., *, root: int, **options: "Unpack[Either]"
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
            how: Any = {"use_calc_stream": mode.use_calc_stream, "sync_op": mode.sync_op}
            done: Any = self.gather(None, x, root=root, timeout=timeout, **how)
            result: list[Tensor] = outs
            return result if mode.sync_op else Work(result, done._pending, done._limit)
        check_parts(self, "gather", "outs", outs, x, mode, written=True)
        check_even(self, "gather", "outs", outs, x)

        def launch(flat: Tensor) -> Any:
            return partial(self.gather, flat, x, root=root)

        return fill(self, "gather", outs, launch, mode, timeout)

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
                every rank, and the output is a new one with this rank's rows along dim 0.
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

    @overload
    def barrier(self, **options: "Unpack[Waited]") -> None: ...
    @overload
    def barrier(self, **options: "Unpack[Unwaited]") -> Work[None]: ...
    @overload
    def barrier(self, **options: "Unpack[Either]") -> Work[None] | None: ...

    def barrier(
        self,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Work[None] | None:
        """Hold this rank's stream (GPU) or host (CPU) until every rank has called it.

        Args:
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            None, or a ``Work`` with ``sync_op=False``.

        Raises:
            RingError: The ring has failed or is closed.
            CommTimeout, EngineError: The call failed; the ring can't be used any more.
        """
        entry = ("barrier", None, None, None, None)
        call = Call("barrier", self._engine.barrier, (), None, None, None, False, entry, None)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

    def monitored_barrier(self, *, timeout: Seconds | None = None) -> None:
        """Hold this rank's host until every rank has called it; the error names late ranks.

        The ranks meet in the ring's store, and no stream waits. It is slower than ``barrier``, and
        the ring stays usable after an error.

        Args:
            timeout: Seconds. Default: the ring's.

        Raises:
            CommTimeout: Ranks are missing.
            RingError: The ring has failed or is closed.
        """
        if self._health.fault is not None:
            raise self._health.unusable("monitored_barrier")
        deadline = Deadline(self.timeout if timeout is None else timeout)
        late = self._hosts.barrier(deadline)
        if late:
            raise CommTimeout(
                f"{self._describe('monitored_barrier')}: timed out after {deadline.seconds:g} s "
                f"waiting for {named(late, self.ranks)}. Call it again on every rank, or see why "
                f"they are late"
            )
