"""The slots of one kind of call: one per forward whose backward has not run yet."""

from collections.abc import Callable, Sequence
from operator import attrgetter
from threading import RLock
from types import FrameType
from typing import Any

from commlib.errors import GraphError
from commlib.graph.calls.cache_key import Arguments
from commlib.graph.calls.outputs import leads_back
from commlib.graph.calls.tensor_places import NO_PLACES
from commlib.graph.recording.capture_run import called_unhooked, without_saved_hooks
from commlib.graph.replaying.captured_call import CapturedCall
from commlib.graph.replaying.schedule import Schedule
from commlib.graph.replaying.slot import Slot
from commlib.graph.replaying.stand_ins import StandIns
from commlib.graph.watching.effects import Effects
from commlib.graph.watching.host import OtherValue
from commlib.graph.watching.runs import DonePart
from commlib.log import log

_is_stale, _has_eager_parts = attrgetter("forward.stale"), attrgetter("forward.has_eager_parts")


class Slots:
    """All slots of one kind of call.

    Attributes:
        slots: The slots that are captured.
        replays: How many calls were made of it.
        places: As those of a ``CapturedCall``.
    """

    def __init__(
        self,
        make: Callable[[], Slot],
        fn: Callable[..., Any],
        schedule: Schedule,
        count: int | None = None,
    ) -> None:
        """``make`` returns one more slot, which is not captured yet; ``count``: how many at all."""
        self._make, self._fn, self._schedule = make, fn, schedule
        self._count = count
        # Of the slots. Replays have a lock per device, which a thread that captures does not hold.
        self._lock = RLock()
        self.slots: list[Slot] = []
        self.replays = 0
        self.places = NO_PLACES
        self._failed = False  # whether one more could not be captured

    def capture(self, call: Arguments) -> None:
        """Capture the first slot, or as many as there may be.

        If a further one can't be captured, there are as many as have been. The call was made
        before the captures, so that this must not raise.
        """
        first = self._make()
        first.capture(call, later=False)
        self.slots.append(first)
        for number in range(1, self._count or 1):
            slot = self._make()
            try:
                slot.capture(call, later=True)
            except (GraphError, OtherValue) as error:
                self._count = number
                log.warning("%d of the slots of a call were captured: %s", number, error)
                break
            self.slots.append(slot)

    def run(self, call: Arguments, caller: FrameType, turn: int) -> Any:
        """Replay the forward of a free slot; the gradients of its outputs lead to its backward.

        ``turn``: as that of a ``CapturedCall``.
        """
        self.replays += 1
        if self._is_full:
            return called_unhooked(self._fn, *call.given)
        one = self.slots[0].forward
        number = turn if one.together else self.replays
        if self._schedule.due(number) and one.fits_all:
            return self._verified(call, caller)
        return self._replayed(call, caller)[1]

    @property
    def _is_full(self) -> bool:
        """Return True if no slot is free, and no further one may be captured."""
        return len(self.slots) == self._count and not any(slot.free for slot in self.slots)

    def _verified(self, call: Arguments, caller: FrameType) -> Any:
        """Run the function for real and a forward after that; its backward will be verified too."""
        one = self.slots[0].forward
        one.begin_verified(call)
        forwards = [slot.forward for slot in self.slots]
        writes = {
            key: each
            for forward in forwards
            for key, each in forward.effects.writes(call, forward.graphs).items()
        }
        stand_ins, used = StandIns(call), list[Slot]()

        def replay(done: Sequence[DonePart]) -> Any:
            slot, result = self._replayed(call, caller, done)
            used.append(slot)
            return result

        effects = one.effects.of(call, one.graphs)
        all_slots = Effects(writes.values(), effects.generators, effects.leaves)
        verification = one.verification("output", one.segments, call)._replace(
            effects=all_slots, tied=stand_ins.tied, same_graph=False
        )
        try:
            with without_saved_hooks():
                verified = verification.run(lambda: stand_ins.run(self._fn), replay)
        finally:
            stand_ins.end()
        one.log.note(verified.seconds, verified.eager_seconds)
        if not verified.replayed:  # the graph is of other values than this call, or of noise
            return verified.expected
        slot, expected = used[0], verified.expected
        wanted = [x for x in (*stand_ins.leaves, *slot.parameters) if x.requires_grad]
        outs = [x for x in slot.forward.outputs.made(expected) if leads_back(x)]
        slot.expect(outs, wanted, uncaptured=one.log.uncaptured)
        # What the function has saved stays until its backward, which frees it.
        one.segments.trim_after_backward(slot.forward.outputs.made(verified.found))
        one.log.uncaptured = False
        return verified.found

    def _replayed(
        self, call: Arguments, caller: FrameType, done: Sequence[DonePart] | None = None
    ) -> tuple[Slot, Any]:
        """Return the slot that was used, and the outputs."""
        with self._lock:
            for slot in self.slots:
                if slot.free:
                    return slot, slot.replay(call, caller, done)
            slot = self._make()
            self._failed = True
            try:
                slot.capture(call, later=True, done=done)
            except OtherValue:
                self._failed = False
                raise
            self._failed = False
            self.slots.append(slot)
            return slot, slot.first(call, caller)

    @property
    def stale(self) -> bool:
        """Return True if the program has released a tensor that a slot reads."""
        return any(map(_is_stale, self.slots))

    def uses(self, key: int) -> bool:
        """Return as an entry does."""
        return self.slots[0].forward.uses(key)

    @property
    def has_eager_parts(self) -> bool:
        """Return True if Python runs between its graphs."""
        return any(map(_has_eager_parts, self.slots))

    @property
    def parts(self) -> list[CapturedCall]:
        """Return the forwards, with their backwards, as entries of a report."""
        return [slot.forward for slot in self.slots]

    def drop_lost(self) -> bool:
        """Drop slots that have lost their graphs; return True if one has, or was never made."""
        live = [slot for slot in self.slots if not slot.forward.lost]
        lost, self._failed = self._failed or len(live) < len(self.slots), False
        self.slots = live
        return lost

    def release(self) -> None:
        """Release every graph."""
        self.places = NO_PLACES
        for slot in self.slots:
            slot.release()
