"""barrier, on streams and on hosts."""

from typing import Unpack, overload

from commlib.core.calls.call import Call
from commlib.core.collectives.options import Either, Unwaited, Waited
from commlib.core.dispatch import dispatch
from commlib.core.failures import named
from commlib.core.ring import Ring
from commlib.core.stream_mode import MODES
from commlib.core.within import Seconds, dispatch_within
from commlib.core.work import Work
from commlib.deadlines import Deadline
from commlib.errors import CommTimeout


class Barrier(Ring):
    """The collectives of a ring that only wait for every rank."""

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
            prefix = self._describe("monitored_barrier")
            self._health.log_late(CommTimeout, prefix)
            raise CommTimeout(
                f"{prefix}: timed out after {deadline.seconds:g} s "
                f"waiting for {named(late, self.ranks)}. Call it again on every rank, or see why "
                f"they are late"
            )
