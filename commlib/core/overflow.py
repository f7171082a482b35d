"""Overflow of experts: what a device reports after a call, and the error that a check raises."""

import torch

from commlib.errors import ArgumentError, CapacityError
from commlib.p2p.channel import ExpertKernels
from commlib.p2p.expert_tables import Overflow, local_experts
from commlib.rendezvous.identity import RingIdentity
from commlib.streams import capturing

Tensor = torch.Tensor


class OverflowReports:
    """The reports of one ring: from its kernels, and from calls that torch operators made.

    An overflow does not break the ring. It is reported once.
    """

    def __init__(self, identity: RingIdentity) -> None:
        self._identity = identity
        self._kernels: ExpertKernels | None = None
        self._record: Record | None = None

    def watch(self, kernels: ExpertKernels) -> None:
        """Ask these kernels too from now on."""
        self._kernels = kernels

    def note(self, every: Tensor, capacity: int) -> None:
        """Report an expert that is chosen more often than it has rows; never blocks on a GPU.

        Called unwatched: a graph neither restores nor compares the memory of reports.

        Args:
            every: int64 [size, num_experts], every rank's choices of each expert.
            capacity: Rows of an expert.

        Raises:
            CapacityError: On a CPU, where the counts are known.
            ArgumentError: The first call is in a capture.
        """
        found = overflow_of(every, capacity)
        if every.device.type == "cpu":
            if found[0]:
                raise self._error("expert_dispatch", _decoded(found[1:].tolist()))
            return
        if self._record is None:
            if capturing():
                raise ArgumentError(
                    f"{self._identity.describe('expert_dispatch')}: the first call of the ring is "
                    f"in a capture; expected memory for reports of overflow; call it once before, "
                    f"or pass on_overflow='drop'"
                )
            self._record = Record(len(found), every.device)
        self._record.note(found)

    def error(self, collective: str) -> CapacityError | None:
        """Return the error of what was reported since the last check; never blocks."""
        found = None if self._kernels is None else self._kernels.overflow()
        if found is None and self._record is not None:
            found = self._record.read()
        return None if found is None else self._error(collective, found)

    def check(self, collective: str) -> None:
        """Raise what was reported since the last check; never blocks.

        Raises:
            CapacityError: An expert got more rows than its capacity.
        """
        if self._kernels is None and self._record is None:
            return
        error = self.error(collective)
        if error is not None:
            raise error

    def _error(self, collective: str, found: Overflow) -> CapacityError:
        senders = [f"{count} from rank {rank}" for rank, count in enumerate(found.by_rank) if count]
        return CapacityError(
            f"{self._identity.describe(collective)}: expert {found.expert} of rank {found.owner} "
            f"got {sum(found.by_rank)} rows ({', '.join(senders)}); capacity={found.capacity}, "
            f"and the rest was dropped; pass a larger capacity=, route fewer tokens to it, or pass "
            f"on_overflow='drop'"
        )


class Record:
    """The last overflow on a GPU, and how many there were; the host reads a copy."""

    def __init__(self, items: int, device: torch.device) -> None:
        self._state = torch.zeros(items, dtype=torch.int64, device=device)
        self._copy = torch.zeros(items, dtype=torch.int64, pin_memory=True)
        self._seen = 0

    def note(self, found: Tensor) -> None:
        """Keep ``overflow_of`` a call on the device; a captured call does it at each replay."""
        number = self._state[:1] + found[:1]
        kept = torch.where(found[:1] > 0, found[1:], self._state[1:])
        self._state.copy_(torch.cat([number, kept]))
        self._copy.copy_(self._state, non_blocking=True)

    def read(self) -> Overflow | None:
        """Return the last overflow if there was one since the last read."""
        number, *numbers = self._copy.tolist()
        if number == self._seen:
            return None
        self._seen = number
        return _decoded(numbers)


def overflow_of(every: Tensor, capacity: int) -> Tensor:
    """Return 1 or 0 for an overflow, its expert, the owner, the capacity and each rank's choices.

    It is the first expert that is chosen more often than it has rows.
    """
    demand = every.sum(0)
    over = (demand > capacity).long()
    expert = over.argmax(0, keepdim=True)
    owner = expert // local_experts(every.shape[1], len(every))
    numbers = over.amax(0, keepdim=True), expert, owner, torch.full_like(expert, capacity)
    return torch.cat([*numbers, every.index_select(1, expert).view(-1)])


def _decoded(numbers: list[int]) -> Overflow:
    expert, owner, capacity, *by_rank = numbers
    return Overflow(expert, owner, capacity, tuple(by_rank))
