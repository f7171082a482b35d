"""Collectives between pairs of ranks: all_to_all, the exchange of rows, send, recv."""

from collections.abc import Iterable
from functools import partial
from typing import Any, TypeVar, Unpack, overload

import torch

from commlib.core.calls.call import Call, Launch, nothing
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.collectives.parts import check_parts, fill, is_list, joined
from commlib.core.dispatch import dispatch, is_plain
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES, StreamMode
from commlib.core.validation import (
    NOT_GIVEN,
    check_out,
    check_pair,
    check_peer,
    check_tensor,
    counts,
    engine_tag,
    new_like,
)
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work
from commlib.errors import ArgumentError, ShapeError
from commlib.p2p.routes import Routes

Tensor = torch.Tensor
Splits = Iterable[int] | None
Outs = TypeVar("Outs", Tensor, list[Tensor])


class Exchanges(Ring):
    """The collectives of a ring in which pairs of ranks exchange parts or tensors."""

    @overload
    def all_to_all(
        self,
        out: Outs,
        x: Outs = ...,
        *,
        out_splits: Splits = None,
        in_splits: Splits = None,
        **options: "Unpack[Waited]",
    ) -> Outs: ...
    @overload
    def all_to_all(
        self,
        out: Outs,
        x: Outs = ...,
        *,
        out_splits: Splits = None,
        in_splits: Splits = None,
        **options: "Unpack[Unwaited]",
    ) -> Work[Outs]: ...
    @overload
    def all_to_all(
        self,
        out: Outs,
        x: Outs = ...,
        *,
        out_splits: Splits = None,
        in_splits: Splits = None,
        **options: "Unpack[Either]",
    ) -> Outs | Work[Outs]: ...

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
            out_splits = None if out_splits is None else list(out_splits)
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

    def _received(self, x: Tensor, out_splits: list[int] | None) -> Tensor:
        """Return a new output of an all_to_all."""
        out = new_like(self, "all_to_all", x)
        return out if out_splits is None else out.new_empty((sum(out_splits), *x.shape[1:]))

    def _all_to_all_parts(
        self, outs: Any, xs: Any, splits: Any, mode: StreamMode, timeout: Seconds | None
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Send tensor j of ``xs`` to rank j, and fill tensor j of ``outs`` with what it sends."""
        if splits != (None, None):
            raise ArgumentError(
                f"{self._describe('all_to_all')}: out_splits or in_splits with lists of tensors, "
                f"which have their own sizes; leave them away"
            )
        for role, parts in (("xs", xs), ("outs", outs)):
            own = parts[0] if is_list(parts) and len(parts) else parts
            check_parts(self, "all_to_all", role, parts, own, mode, written=role == "outs")
        check_pair(self, "all_to_all", outs[0], xs[0])

        def launch(flat: Tensor) -> Any:
            sizes = {
                "out_splits": [out.numel() for out in outs],
                "in_splits": [x.numel() for x in xs],
            }
            return partial(self.all_to_all, flat, joined(xs), **sizes)

        return fill(self, "all_to_all", outs, launch, mode, timeout)

    def _exchange_rows(
        self,
        out: Tensor,
        x: Tensor,
        routes: Routes,
        *,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        by_all: bool = True,
    ) -> Any:
        """Fill the 2-D ``out`` with rows of every rank's 2-D ``x``, each where ``routes`` says.

        Every member calls it with the routes that belong together; nothing checks that here. On
        GPUs of one host the first call sets a channel up and blocks the host for it.
        ``by_all=False``: ranks without rows need not make the call, so it is in no log of calls.
        """
        plain = is_plain(self, x, out)
        if not plain:
            check_pair(self, "exchange_rows", out, x)
        # Every rank takes part in what any rank does.
        elements = routes.most * x.shape[1]
        launch = self._engine.own_rows
        if elements:
            launch = self._engine.exchange_rows
            self._engine.prepare_rows()
        entry = ("exchange_rows", elements, x.dtype, None, None) if by_all else None
        call = Call("exchange_rows", launch, (routes,), out, x, None, plain, entry, out)
        return dispatch(self, call, MODES[use_calc_stream, sync_op, fenced])

    @overload
    def send(
        self, x: Tensor, *, peer: int, tag: int = ..., **options: "Unpack[Waited]"
    ) -> None: ...
    @overload
    def send(
        self, x: Tensor, *, peer: int, tag: int = ..., **options: "Unpack[Unwaited]"
    ) -> Work[None]: ...
    @overload
    def send(
        self, x: Tensor, *, peer: int, tag: int = ..., **options: "Unpack[Either]"
    ) -> Work[None] | None: ...

    def send(
        self,
        x: Tensor,
        *,
        peer: int,
        tag: int = 0,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Work[None] | None:
        """Send ``x`` to rank ``peer``, which must call ``recv`` with as many bytes.

        Args:
            x: Any shape.
            peer: Position of the rank that receives.
            tag: The receive with this tag takes it. On a CPU only; NCCL has no tags.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            None, or a ``Work`` with ``sync_op=False``.

        Raises:
            PeerError: ``peer`` is not another position in the ring.
            ArgumentError: The tag is negative, or not 0 on a GPU.
            Otherwise as ``all_to_all``.
        """
        check_peer(self, "send", peer)
        plain = is_plain(self, x, x)
        if not plain:
            check_tensor(self, "send", "x", x)
        launch = self._engine.send if x.numel() else nothing
        args = (peer, engine_tag(self, "send", tag)) if tag else (peer,)
        call = Call("send", launch, args, None, x, None, plain, None, None)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)

    @overload
    def recv(
        self, out: Tensor, *, peer: int, tag: int = ..., **options: "Unpack[Waited]"
    ) -> Tensor: ...
    @overload
    def recv(
        self, out: Tensor, *, peer: int, tag: int = ..., **options: "Unpack[Unwaited]"
    ) -> Work[Tensor]: ...
    @overload
    def recv(
        self, out: Tensor, *, peer: int, tag: int = ..., **options: "Unpack[Either]"
    ) -> Tensor | Work[Tensor]: ...

    def recv(
        self,
        out: Tensor,
        *,
        peer: int,
        tag: int = 0,
        use_calc_stream: bool = True,
        sync_op: bool = True,
        fenced: bool = True,
        timeout: Seconds | None = None,
    ) -> Tensor | Work[Tensor]:
        """Fill ``out`` with what rank ``peer`` sends.

        Args:
            out: Any shape, with as many bytes as the peer sends.
            peer: Position of the rank that sends.
            tag: Takes the send with this tag. On a CPU only; NCCL has no tags.
            use_calc_stream, sync_op, fenced, timeout: See ``CommContext``.

        Returns:
            ``out``, or a ``Work`` with ``sync_op=False``.

        Raises:
            PeerError: ``peer`` is not another position in the ring.
            ArgumentError: The tag is negative, or not 0 on a GPU.
            Otherwise as ``all_to_all``.
        """
        check_peer(self, "recv", peer)
        plain = is_plain(self, out, out)
        if not plain:
            check_out(self, "recv", out)
        launch = self._engine.recv if out.numel() else nothing
        args = (peer, engine_tag(self, "recv", tag)) if tag else (peer,)
        call = Call("recv", launch, args, out, None, None, plain, None, out)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)
