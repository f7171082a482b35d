"""Who is in a ring, which streams it has, and how it fails and ends."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

import torch

from commlib._deadline import Deadline
from commlib._rollcall import Meeting
from commlib._streams import Fences, issue_lock
from commlib.errors import CommTimeout, EngineError

if TYPE_CHECKING:
    from commlib._gate import Call, Group


class Ring(ABC):
    """The part of a context that has nothing to do with any collective."""

    engine: ClassVar[str]

    def __init__(
        self,
        ring_id: int,
        rank: int,
        ranks: tuple[int, ...],
        device: torch.device,
        deadline: Deadline,
        meeting: Meeting | None,
    ) -> None:
        """Set the engine up with the other members of ``meeting``, at most until ``deadline``.

        ``meeting`` is None for a ring of one rank, which needs no communicator. The length of the
        deadline is also that of every later wait on a CPU.
        """
        self.ring_id, self.rank, self.size, self.ranks = ring_id, rank, len(ranks), ranks
        self.device, self.timeout = device, deadline.seconds
        self.fences = Fences(device) if device.type == "cuda" else None
        self.lock = issue_lock(device)
        self.calls = 0
        self.last_verb: str | None = None
        self.fault: str | None = None
        self.open_group: Group | None = None
        self.communicator_bytes = 0
        self._errors: list[str] = []
        self._unfenced: deque[tuple[torch.cuda.Event, list[Call]]] = deque()
        self._token = torch.zeros(1, dtype=torch.int32, device=device)
        if meeting is not None:
            self._connect(meeting, deadline)

    @staticmethod
    def credentials() -> bytes:
        """What the first member hands to the others when they meet."""
        return b""

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} ring {self.ring_id}: rank {self.rank} of {self.size} "
            f"{list(self.ranks)} on {self.device}, engine {self.engine}, {self.state}>"
        )

    # -- who and where ---------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """``ready``, or why the ring can't be used."""
        return "ready" if self.fault is None else self.fault

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The ring's own high-priority comm stream; None on a CPU."""
        return None if self.fences is None else self.fences.comm

    @property
    def has_communicator(self) -> bool:
        """Whether the engine holds a communicator; a ring of one rank never has one."""
        return self.size > 1 and self.fault is None

    def stream_for(self, use_calc_stream: bool) -> torch.cuda.Stream | None:
        """Return the stream a verb runs on: the caller's current one, or the ring's own."""
        if self.fences is None:
            return None
        return torch.cuda.current_stream(self.device) if use_calc_stream else self.fences.comm

    def where(self, verb: str) -> str:
        """Begin an error text: which verb on which ring and rank."""
        return f"{verb} on ring {self.ring_id} (rank {self.rank} of {self.size}, {self.engine})"

    # -- failure ---------------------------------------------------------------------------------

    def errors(self) -> list[str]:
        """Return what went wrong on this ring so far, oldest first; empty if nothing did."""
        return list(self._errors)

    def failed(self, verb: str, error: Exception) -> EngineError | CommTimeout:
        """Mark the ring as failed by ``error`` of the library below and return what to raise."""
        text = f"{self.where(verb)}: {type(error).__name__}: {error}"
        late = "timed out" in str(error).lower() or "timeout" in str(error).lower()
        self._errors.append(text)
        self.fault = self.fault or f"failed in {verb}; close it and create it again"
        if late:
            return CommTimeout(f"{text}. The deadline was {self.timeout:g} s; ranks {self.ranks}")
        return EngineError(text)

    def abort(self) -> None:
        """Give the communicator up at once, with whatever is under way; the ring is closed then."""
        with self.lock:
            self.fault = "aborted; create it again"
            self._abort()  # first: until then the collectives may still use the tensors
            self._unfenced.clear()

    def close(self, deadline: Deadline) -> None:
        """Finish what is under way and free the communicator, at most until ``deadline``."""
        if self.fault is not None:
            self.abort()
            return
        self.fault = "closed; create it again"
        if self.fences is not None:
            event = torch.cuda.Event()
            self.fences.comm_waits(torch.cuda.current_stream(self.device))
            event.record(self.fences.comm)
            if not deadline.poll(event.query):
                self._errors.append(f"{self.where('close')}: calls were still running; aborted")
                self.abort()
                return
        self._unfenced.clear()
        self._close(deadline)

    # -- raw legacy form -------------------------------------------------------------------------

    def keep_unfenced(self, event: torch.cuda.Event, calls: "list[Call]") -> None:
        """Hold the tensors of an unfenced call until it has finished or the program has synced."""
        while self._unfenced and self._unfenced[0][0].query():
            self._unfenced.popleft()
        self._unfenced.append((event, calls))

    def release_unfenced(self) -> None:
        """Let go of the tensors of unfenced calls; for a program that has just synced them."""
        with self.lock:
            self._unfenced.clear()

    # -- what an engine implements -----------------------------------------------------------------

    @abstractmethod
    def _connect(self, meeting: Meeting, deadline: Deadline) -> None: ...

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Bracket several launches so that the engine starts them as one."""
        yield

    @abstractmethod
    def _close(self, deadline: Deadline) -> None: ...

    @abstractmethod
    def _abort(self) -> None: ...
