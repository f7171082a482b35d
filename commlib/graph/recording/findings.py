"""Findings of the runs before a capture, with which the captures must agree."""

import weakref
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from commlib.core.ring import Ring
from commlib.core.tensors import has_memory, parts
from commlib.errors import GraphError
from commlib.graph.calls.bindings import Kept
from commlib.graph.calls.lasting import Lasting
from commlib.graph.recording.segments import Segments
from commlib.graph.watching.outside_reads import OutsideReads, first_other, keys_of
from commlib.graph.watching.recorder import Recorder
from commlib.graph.watching.undo import UndoLog


@dataclass
class Findings:
    """Findings about a function from the call that counts and the runs after it.

    Attributes:
        modules: Modules that it can reach.
        stepped: Leaves of optimizers that it can reach.
        reachable: Tensors that it can reach.
        unseen: Tensors that it writes, and no operator says so.
        continued: Positions of tensors of the call whose history it has continued by a write.
        taken: Iterators and queues that the call has taken elements from.
        hands_back: How the call hands out an argument that a replay has another one of.
        draws: Whether it draws from a generator of Python or NumPy that the program holds.
        rings: The rings of its collectives.
        sets: What the call has bound to names, and later runs leave.
        by_parts: Names that eager parts bind.
        broken: Whether it has eager parts.
        binds: Whether it binds tensors to names outside.
        binds_grads: Whether it binds gradients to leaves.
        roots: What leads to the objects that it binds tensors to, if it does.
        leaves: Leaves that it can reach or has read, but for arguments.
        owners: Of these, whose gradients it uses.
        generators: Those that it draws from, but for torch's own.
        differentiable: Whether gradients flow back through its outputs.
        parameters: The leaves that they flow to, but for arguments.
        empty: Memory that each run fills itself, and leaves without a byte.
        outputs: Of each leaf of the result that it makes, the size; else None.
        names: Its operators in the last run.
        calls: Its collectives in words in the last run.
        outside: What its operators have read from outside in the last run, until it is compared.
        arguments: Memory of its arguments, and of the graphs' copies of them.
        made: Memory that the runs after the call have made.
        carried: Of this, what the last run has read.
        compared: Whether a capture has to be as the run before it.
        reads: Whether its graphs fit only certain values that the host reads.
        reports_capture: The answer when it asks whether it is captured.
        undo: Notes what eager parts change in the capture.
        lasting: The objects of the program.
    """

    modules: Iterable[torch.nn.Module]
    stepped: Sequence[torch.Tensor] = ()
    reachable: list[weakref.ref[torch.Tensor]] = field(default_factory=list)
    unseen: list[torch.Tensor] = field(default_factory=list)
    continued: list[int] = field(default_factory=list)
    taken: list[str] = field(default_factory=list)
    draws: bool = False
    hands_back: str = ""
    rings: list[Ring] = field(default_factory=list)
    sets: list[Kept] = field(default_factory=list)
    by_parts: set[tuple[int, str]] = field(default_factory=set)
    broken: bool = False
    binds: bool = False
    binds_grads: bool = False
    roots: Sequence[object] = ()
    leaves: list[torch.Tensor] = field(default_factory=list)
    owners: list[torch.Tensor] = field(default_factory=list)
    generators: list[torch.Generator] = field(default_factory=list)
    differentiable: bool = False
    parameters: list[torch.Tensor] = field(default_factory=list)
    empty: Set[int] = frozenset()
    outputs: list[torch.Tensor | None] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    outside: OutsideReads = field(default_factory=OutsideReads)
    arguments: set[int] = field(default_factory=set)
    made: dict[int, StorageWeakRef] = field(default_factory=dict)
    carried: set[int] = field(default_factory=set)
    compared: bool = False
    reads: bool = False
    reports_capture: bool = False
    undo: UndoLog = field(default_factory=UndoLog)
    lasting: Lasting = field(default_factory=Lasting)
    _texts: dict[str, list[str]] = field(default_factory=dict)  # by part: its collectives in words

    @property
    def irreversible(self) -> bool:
        """Return True if the call has effects that can't be undone."""
        return bool(self.unseen or self.continued or self.taken)

    def report_capture(self) -> None:
        """Begin again, and answer that the function is captured: it reads values otherwise."""
        self.reports_capture = True
        self.made, self.carried, self._texts = {}, set(), {}

    def note_reachable(self, tensors: Iterable[torch.Tensor]) -> None:
        """Record the tensors that the function can reach, and hold none of them."""
        self.reachable = [weakref.ref(x) for x in tensors]

    def unseen_in(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | int]:
        """Return ``unseen``, with the position in ``tensors`` where a tensor has that memory."""
        positions = {x.untyped_storage()._cdata: i for i, x in enumerate(tensors)}
        return [positions.get(x.untyped_storage()._cdata, x) for x in self.unseen]

    def lives(self, key: int) -> bool:
        """Return True if memory is still there that an earlier run has made."""
        return key in self.made and not self.made[key].expired()

    def rooms(self, device: torch.device) -> list[torch.Tensor | None]:
        """Return memory outside the pool for each leaf of the result that the function makes."""
        return [
            None
            if x is None
            else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
            for x in self.outputs
        ]

    # -- what a run must agree with ----------------------------------------------------------------

    def check(self, part: str, segments: Segments, *, again: bool) -> None:
        """Raise ``GraphError`` for a capture of ``part`` that can't be replayed.

        ``again``: it was captured before.
        """
        for recorder in segments.recorders:
            self.check_state(recorder)
        if self.carried and part == "forward" and not again:
            self._check_carried(segments.recorders)
        self._check_same(part, segments)
        if part == "forward" and self.compared and not again:
            self._check_reads(segments)
        for recorder in segments.recorders:
            recorder.memory.reads = OutsideReads()  # nothing asks for them after this

    def check_state(self, recorder: Recorder) -> None:
        """Raise ``GraphError`` for state that a later run has made and the next one has written."""
        written = [x for key, x in recorder.memory.written.items() if self.lives(key)]
        if written:
            sizes = ", ".join(f"{x.nbytes()} bytes" for x in written[:5])
            raise GraphError(
                f"{len(written)} tensors ({sizes}) that the function makes in its second run and "
                f"writes in the next would count a run too many; call the function eagerly until "
                f"its state is made, and capture it then"
            )

    def _check_carried(self, recorders: Sequence[Recorder]) -> None:
        """Raise ``GraphError`` for state that each run rebinds, computed from the last run's.

        A table that one run makes for all others is allowed: the capture reads it too.
        """
        read = {key for each in recorders for key in each.memory.externals}
        lost = self.carried - read
        if lost:
            raise GraphError(
                f"{len(lost)} tensors that the function makes in one run and reads in the next "
                f"(state = state + ...) would be those of the capture at every replay; write into "
                f"their memory instead (state.add_(...))"
            )

    def _check_same(self, part: str, segments: Segments) -> None:
        """Raise ``GraphError`` for a capture that differs from the run before it or the last one.

        An example is a function that asks whether it is being captured.
        """
        texts = list(map(str, segments.collectives))
        if part == "forward" and self.compared:
            message = "the run before the capture and the capture differ"
            check_same(message, self.names, segments.names[: segments.own])
            check_same(message, self.calls, texts)
        recorded = self._texts.setdefault(part, texts)
        check_same("two captures of the function differ", recorded, texts)

    def _check_reads(self, segments: Segments) -> None:
        """Raise ``GraphError`` for a function that read other outside memory in the last run."""
        first, *further = segments.recorders
        after, begin = first.memory.reads, len(first.names)
        for recorder in further:
            after.join(recorder.memory.reads, begin)
            begin += len(recorder.names)
        others = self.arguments | self.empty
        before = self.outside.until(len(self.names), others)
        after, self.outside = after.until(segments.own, others), OutsideReads()
        if not (before.reads or after.reads):
            return
        reachable = [x for ref in self.reachable if (x := ref()) is not None]
        lasting = keys_of(part for x in reachable for part in parts(x) if has_memory(part))
        if self.broken:  # eager parts make other tensors each time, which replays copy
            before, after = before.among(lasting), after.among(lasting)
        other = first_other(before, after, made=self.made, lasting=lasting)
        if other is not None:
            raise GraphError(f"the run before the capture and the capture differ: {other}")


def check_same(what: str, before: list[str], after: list[str]) -> None:
    """Raise ``GraphError`` naming the first of the calls in which two lists differ."""
    if before == after:
        return
    shortest = min(len(before), len(after))
    first = next((i for i in range(shortest) if before[i] != after[i]), shortest)
    was, now = (names[first] if first < len(names) else "nothing" for names in (before, after))
    raise GraphError(
        f"{what}: call number {first} was {was}, then {now}; a graph would repeat one of them. "
        f"More warmup= runs may settle it"
    )
