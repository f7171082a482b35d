"""broadcast: a copy of one rank's tensor on every rank."""

from typing import Unpack, overload

import torch

from commlib.core.calls.call import Call, nothing
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.dispatch import dispatch
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.core.validation import NOT_GIVEN, from_root, new_like
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work

Tensor = torch.Tensor


class Broadcast(Ring):
    """The collective of a ring that copies a tensor from a root to every rank."""

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
            x: As many elements; may be ``out``, which the root then only reads, and None on other
                ranks, where it is not read. Default: the only tensor is the input, and the output
                is a new one.
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
        target = None if out is x and self.rank == root else out  # that root is only read
        call = Call("broadcast", launch, (root,), target, source, 0, plain, entry, out)
        mode = MODES[use_calc_stream, sync_op, fenced]
        if timeout is not None:
            return dispatch_within(self, call, mode, timeout)
        return dispatch(self, call, mode)
