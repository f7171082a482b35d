"""send and recv, between two ranks."""

from typing import Unpack, overload

import torch

from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.dispatch import dispatch, is_plain
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.core.validation import check_out, check_peer, check_tensor, engine_tag
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work

Tensor = torch.Tensor


class SendRecv(Ring):
    """The calls of a ring between this rank and one other."""

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
