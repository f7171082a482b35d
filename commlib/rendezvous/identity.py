"""The identity of one rank in one ring, and the health that the parts of a ring share."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from commlib.deadlines import Deadline, bounded
from commlib.errors import CommError, RingError


@dataclass
class Remedy:
    """The calls that repair a failed ring, for error texts; the maker of the ring gives them.

    Attributes:
        end: The call that ends the ring.
        create: The call that makes it again, and on which ranks.
        after: What else holds the ring and must be made again; may be empty.
    """

    end: str
    create: str
    after: str = ""

    def __str__(self) -> str:
        after = f"; {self.after}" if self.after else ""
        return f"call {self.end}, then {self.create}{after}"


def program_remedy(ring_id: int, ranks: Sequence[int]) -> Remedy:
    """Return the remedy of a ring that the program made by ``init`` or ``new_ring``."""
    if ring_id == 0:
        return Remedy("commlib.shutdown()", "commlib.init(), on every rank")
    create = f"commlib.new_ring({ring_id}, {list(ranks)}), on every member"
    return Remedy(f"commlib.close_ring({ring_id})", create)


@dataclass(frozen=True, eq=False)
class RingIdentity:
    """One rank's place in a ring.

    Attributes:
        ring_id: The ring.
        rank: This process's position in the ring.
        ranks: The global rank of every position.
        device: Where this rank's tensors are.
        timeout: Seconds of every wait.
        engine: Name of the engine: nccl, gloo or c10d.
        remedy: How the program repairs the ring, for error texts.
        name: The program's own name of the ring, for messages; may be empty.
    """

    ring_id: int
    rank: int
    ranks: tuple[int, ...]
    device: torch.device
    timeout: float
    engine: str
    remedy: Remedy
    name: str = ""
    size: int = field(init=False)
    device_number: int = field(init=False)  # as Tensor.get_device() returns it

    def __post_init__(self) -> None:
        """Compute what every call reads."""
        object.__setattr__(self, "size", len(self.ranks))
        number = -1 if self.device.index is None else self.device.index
        object.__setattr__(self, "device_number", number)

    def describe(self, collective: str) -> str:
        """Return the start of an error text: the collective, the ring and the rank."""
        name = f" '{self.name}'" if self.name else ""
        member = f"rank {self.rank} of {self.size}, {self.engine}"
        return f"{collective} on ring {self.ring_id}{name} ({member})"

    def bounded(self, step: Callable[[], Any], deadline: Deadline, what: str) -> Any:
        """Run a step that may block, at most until ``deadline``, on this rank's device.

        The step runs in another thread, whose current device would be GPU 0. An engine would
        create a context there.
        """

        def on_device() -> Any:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)
            return step()

        return bounded(on_device, deadline, self.describe(what))


class Health(Protocol):
    """The health of a ring, as its engine, kernels and host exchange use it."""

    fault: str | None  # why the ring can't be used; None while it can
    ended: bool  # closed or aborted

    def failed(self, collective: str, error: Exception, args: tuple[Any, ...] = ()) -> CommError:
        """Mark the ring as failed by ``error`` and return the exception to raise."""

    def interrupted(self, collective: str) -> None:
        """Mark the ring as failed: a signal ended a call whose outcome is unknown."""

    def unusable(self, collective: str) -> RingError:
        """Return the error of a call on a ring that has failed or is closed."""

    def note(self, text: str) -> None:
        """Add a line to the errors that ``report()`` shows."""

    def attempt(self, step: Callable[[], Any], deadline: Deadline, what: str) -> bool:
        """Run one step of the ring's end; note an error instead of raising it."""
