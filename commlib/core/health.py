"""The health of one ring: its first fault, all errors so far, and the errors of later calls."""

import threading
from collections.abc import Callable
from typing import Any

from commlib.core import failures
from commlib.core.calls.log import PAIRED
from commlib.core.calls.reports import CallReports
from commlib.deadlines import Deadline
from commlib.errors import (
    ArgumentError,
    CommError,
    CommTimeout,
    EngineError,
    MismatchError,
    PeerTimeout,
    RingError,
    StreamError,
)
from commlib.log import log
from commlib.rendezvous.identity import RingIdentity
from commlib.waits import OVER


class RingHealth:
    """Turns failures of an engine into errors of commlib, and remembers the first one.

    Attributes:
        fault: Why the ring can't be used; None while it can.
        ended: Closed or aborted: everything is freed, and the id may be used again.
        forgotten: A forked child's copy of a ring of its parent.
        repairable: ``reset()`` may clear the fault.
        suspended: ``suspend()`` has freed memory, and ``resume()`` has not been called.
        mismatch: The text of the error, once the calls of two members have differed.
        find_dead: Returns the positions of members whose process has ended.
    """

    def __init__(self, identity: RingIdentity, reports: CallReports | None) -> None:
        self.fault: str | None = None
        self.ended = self.forgotten = self.repairable = self.suspended = False
        self.mismatch: str | None = None
        self._finding = threading.RLock()  # held while the text is made; a handler may look too
        self.find_dead: Callable[[], list[int]] = list
        self._identity, self._reports = identity, reports
        self._errors: list[str] = []
        self._verdict: str | None = None  # what the members' logs showed at the first failure

    # -- state -------------------------------------------------------------------------------------

    @property
    def has_failed(self) -> bool:
        """Return True if a call has failed and the ring was not closed since."""
        return self.fault is not None and not self.ended and not self.suspended

    def errors(self) -> list[str]:
        """Return what went wrong so far, oldest first."""
        return self._errors + ([] if self._reports is None else self._reports.found)

    def note(self, text: str) -> None:
        """Add a line to ``errors()``."""
        self._errors.append(text)

    def end(self, how: str) -> None:
        """Mark the ring as closed or aborted."""
        self.fault, self.ended = f"{how}; {self._identity.remedy}", True

    def recover(self) -> None:
        """Clear the fault at the start of ``reset()``."""
        self.fault = self._verdict = None
        if self._reports is not None:
            self._reports.resume()

    def forget(self, why: str) -> None:
        """Mark the copy of a forked child, which can't be used."""
        self.fault, self.ended, self.forgotten = f"it {why}", True, True
        self.repairable = self.suspended = False
        self._finding = threading.RLock()  # another thread of the parent may have held it

    # -- failures ----------------------------------------------------------------------------------

    def unusable(self, collective: str) -> RingError:
        """Return the error of a call on a ring that has failed or is closed."""
        prefix = self._identity.describe(collective)
        return RingError(f"{prefix}: the ring can't be used: {self.fault}")

    def interrupted(self, collective: str) -> None:
        """Mark the ring as failed: a signal ended a call whose outcome is unknown."""
        self.note(f"{self._identity.describe(collective)}: a signal interrupted the call")
        self.repairable = False
        self.fault = self.fault or (
            f"a signal interrupted {collective}, which this rank has never finished; "
            f"{self._identity.remedy}"
        )

    def late(self, collective: str, args: tuple[Any, ...], seconds: float) -> CommError:
        """Return the error of a call whose own deadline has passed; the ring has failed then.

        The arguments are those of ``failed``.
        """
        return self.failed(collective, RuntimeError(OVER), args, seconds)

    def begin_mismatch(self, collective: str) -> None:
        """Mark the ring as failed: calls of its members differ."""
        self.repairable = False
        self.fault = self.fault or f"failed in {collective}; {self._identity.remedy}"

    def differs(self, collective: str, pair: tuple[int, int]) -> MismatchError:
        """Return the error of two members whose calls differ; the first one's text is kept.

        Args:
            collective: What the program has called.
            pair: The positions of the members.
        """
        me = self._identity
        with self._finding:
            if self.mismatch is None:
                shown = [at for at in pair if at != me.rank]
                if self._reports is not None:
                    self._verdict = self._reports.verdict(collective, shown)
                whose = [f"rank {me.ranks[at]}" for at in shown]
                names = " and ".join(whose if len(whose) > 1 else ["this rank", *whose])
                text = (
                    f"{me.describe(collective)}: detected mismatch between the calls of {names}: "
                    f"{self._verdict or 'no calls are logged'}"
                )
                self.note(text)
                self.mismatch = f"{text}; {me.remedy}; make the same calls on all ranks"
        return MismatchError(self.mismatch)

    def failed(
        self,
        collective: str,
        error: Exception,
        args: tuple[Any, ...] = (),
        seconds: float | None = None,
    ) -> CommError:
        """Mark the ring as failed by ``error`` and return the exception to raise.

        Args:
            collective: What the program has called.
            error: The failure.
            args: Those of the launch: the first one of a send or a receive is the peer.
            seconds: The call's own deadline. Default: the ring's.
        """
        if isinstance(error, ArgumentError):
            return error  # nothing was launched, or it is that of ``differs``
        remedy = str(self._identity.remedy)
        if isinstance(error, CommError) and str(error).endswith(remedy):  # of a step of the call
            self.repairable = False
            self.fault = self.fault or f"failed in {collective}; {remedy}"
            return type(error)(str(error))
        if self._verdict is None and not isinstance(error, StreamError):
            self._verdict = "" if self._reports is None else self._reports.verdict(collective)
        logs = f"; {self._verdict}" if self._verdict else ""
        prefix = self._identity.describe(collective)
        if isinstance(error, PeerTimeout | StreamError):
            self.log_late(type(error), prefix)
            text = f"{prefix}: {error}{logs}"
            self.note(text)
            self.repairable = self.repairable or self.fault is None
            self.fault = self.fault or (
                f"a kernel gave up in {collective}; call ring.reset() on every member"
            )
            return type(error)(text)
        verdict = self._verdict or ""
        kind, reason = self.reason(collective, error, args, seconds, verdict)
        self.log_late(kind, prefix)
        text = f"{prefix}{reason}{logs}"
        self.note(text)
        self.repairable = False
        self.fault = self.fault or f"failed in {collective}; {remedy}"
        return kind(f"{text}; {remedy}")

    def log_late(self, kind: type[CommError], prefix: str) -> None:
        """Log a timeout, but only the first one: calls in flight all end with the ring."""
        if self.fault is None and issubclass(kind, CommTimeout | PeerTimeout):
            log.info("%s: timed out", prefix)

    def reason(
        self,
        collective: str,
        error: Exception,
        args: tuple[Any, ...],
        seconds: float | None,
        verdict: str,
    ) -> tuple[type[CommError], str]:
        """Return the class and the text that a failure becomes: ours, not the library's.

        ``verdict``: what the members' logs show. The other arguments are those of ``failed``.
        """
        me = self._identity
        if isinstance(error, CommTimeout):  # it names the members that are late
            return CommTimeout, f": {type(error).__name__}: {error}"
        if isinstance(error, RuntimeError) and not isinstance(error, CommError):
            others = [at for at in range(me.size) if at != me.rank]
            pair = list(args[:1]) if collective in PAIRED else []
            peers = pair or (others if me.size == 2 else [])
            if failures.is_late(error):
                text = failures.late(peers, me.ranks, me.rank, seconds or me.timeout, verdict)
                return CommTimeout, f" {text}"
            if failures.is_gone(error):
                dead = peers or self.find_dead()
                return EngineError, f": {failures.gone(dead, me.ranks, me.rank)}"
        return EngineError, f": {failures.other(error, me.engine)}"

    def attempt(self, step: Callable[[], Any], deadline: Deadline, what: str) -> bool:
        """Run one step of the ring's end; note an error instead of raising it."""
        try:
            self._identity.bounded(step, deadline, what)
        except Exception as error:
            self.note(str(error))
            return False
        return True
