"""A slot: one forward graph, its backward graphs, and the memory between them."""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from commlib.errors import GraphError
from commlib.graph.backends.side_stream import SideStream
from commlib.graph.calls.cache_key import Arguments, any_autocast, modes
from commlib.graph.calls.leaves import Tensors, gradients, plain_gradients
from commlib.graph.calls.outputs import Join, Outputs, leads_back
from commlib.graph.operators.program_line import ProgramLine
from commlib.graph.recording.record import record
from commlib.graph.recording.recorded_call import Recipe, RecordedCall
from commlib.graph.recording.segments import Segments
from commlib.graph.replaying.autograd_node import Grads, Lease, apply_node
from commlib.graph.replaying.backward import Backward
from commlib.graph.replaying.captured_call import CapturedCall
from commlib.graph.replaying.grad_sums import NO_SUMS, GradSums
from commlib.graph.replaying.gradient_forms import Form, GradientForms, zeros_of
from commlib.graph.replaying.nodes import used_up
from commlib.graph.replaying.outcome import Unequal
from commlib.graph.replaying.schedule import Schedule
from commlib.graph.replaying.verification_log import VerificationLog
from commlib.graph.watching.runs import DonePart


class Slot:
    """A captured forward, and the backwards from its outputs.

    Attributes:
        forward: The captured call. This slot is how gradients flow back through it.
        parameters: The leaves that gradients flow to, but for arguments.
        is_last: No other backward can follow the one that ran last.
    """

    def __init__(
        self, recipe: Recipe, log: VerificationLog, differs: Callable[[Unequal], None]
    ) -> None:
        """``differs`` gets a backward that differs from the function's; it may raise."""
        # What is between forward and backward is in its own pool. A backward leaves nothing.
        self._recipe = recipe._replace(pool=recipe.backend.own_pool())
        self.forward = CapturedCall(self._recipe, log, Schedule(False))
        self.parameters = recipe.findings.parameters
        self._differs, self._side = differs, recipe.backend.side()
        self._borrows = recipe.gradients == "borrow"
        self._sums = NO_SUMS
        self.is_last = False
        self._lease: weakref.ref[Lease] | None = None
        # By how the gradients of outputs come, and the autocast that the backward is called under.
        self._backwards: dict[Any, Backward] = {}

    @property
    def free(self) -> bool:
        """Return True if no node waits for its backward."""
        return self._lease is None or self._lease() is None

    # -- capturing ---------------------------------------------------------------------------------

    def capture(
        self, call: Arguments, *, later: bool, done: Sequence[DonePart] | None = None
    ) -> None:
        """Capture the forward and the backward; ``later`` and ``done`` as for any call."""
        self.forward.capture(call, self, later=later, done=done)

    def prepare(self) -> None:
        """Hold the nodes of leaves, which then have these and no others in the capture."""
        if self._backwards:  # the capture uses the memory of an earlier one again
            self._outs.clear()
            self._release_backwards()
        with self._recipe.backend.waiting():
            self._ends = [get_gradient_edge(leaf) for leaf in self.parameters]
        if self._recipe.gradients == "accumulate":
            self._sums = GradSums(self.parameters, [edge.node for edge in self._ends], self._side)

    def recorded(self, recorded: RecordedCall, outputs: Outputs, *, again: bool) -> None:
        """Capture the backward from all outputs of a forward that was just recorded."""
        made, inputs = outputs.made(recorded.result), recorded.given
        self._leads = [leads_back(tensor) for tensor in made]
        self._all_lead = all(self._leads)
        self._outs = [tensor for tensor in made if leads_back(tensor)]
        self._tensors = (*inputs, *self.parameters)
        self._wanted = [tensor for tensor in self._tensors if tensor.requires_grad]
        self._forms = GradientForms(self._outs)
        every = self._forms.every
        backward = self._capture_backward(recorded.segments, every, plain_gradients, again=again)
        self._add((every, None), backward)
        # A capture that runs is one more call of each collective, and other ranks may make none.
        self._dense = self._recipe.backend.captures_run and bool(backward.segments.collectives)
        self._note_reads(recorded, backward, made)

    def _add(self, key: Any, backward: Backward) -> None:
        self._backwards[key] = backward
        self.forward.go_back_by([each.segments for each in self._backwards.values()])

    def _capture_backward(
        self,
        forward: Segments,
        comes: tuple[Form | None, ...],
        go_back: Callable[..., Any],
        *,
        again: bool,
    ) -> Backward:
        """Capture the backward from those outputs whose gradients come, in the forms ``comes``.

        An eager backward can't go over what a capture has saved: some kernels keep numbers on the
        GPU then that they read on the host.
        """
        forms = zip(self._outs, comes, strict=True)
        coming = [(out, form) for out, form in forms if form is not None]
        outs = [out for out, _ in coming]
        buffers = [zeros_of(out, form) for out, form in coming]
        times = self._recipe.times
        segments, grads = record(
            self._recipe.backend,
            self._recipe.findings,
            lambda _: go_back(outs, self._wanted, buffers, quiet=self.parameters),
            part=f"backward from {comes}",
            again=again,
            pool=self._recipe.pool if self._borrows else None,
            before=forward,
            times=times.of("backward", self._recipe.backend.device) if times else None,
        )
        places = [i for i, tensor in enumerate(self._tensors) if tensor.requires_grad]
        pairs = zip(places, grads, strict=True)
        forms = zip(self._outs, comes, strict=True)
        others = [out for out, form in forms if form is None]
        defined = {i: grad for i, grad in pairs if grad is not None}
        last = used_up(outs, others)
        return Backward(segments, buffers, defined, last=last, borrow=self._borrows)

    def _note_reads(self, recorded: RecordedCall, whole: Backward, made: Tensors) -> None:
        """Record the tensors that forward saves for backward. Writes in between are an error.

        Other inputs of a hook must be as they are then.
        """
        forward = [each.memory for each in recorded.segments.recorders]
        back = [each.memory for each in whole.segments.recorders]
        written = {key for memory in (*forward, *back) for key in memory.written}
        read = {
            key: tensor
            for memory in back
            for key, tensor in memory.externals.items()
            if key in recorded.saved and key not in written
        }
        places = [x.untyped_storage()._cdata for x in recorded.given]
        copies = self.forward.inputs.copies
        self._reads_inputs = [i for i, key in enumerate(places) if key in read and i not in copies]
        borrowed = [x.untyped_storage()._cdata for x in made] if not self._recipe.copy else []
        self._reads_outputs = [i for i, key in enumerate(borrowed) if key in read]
        for memory in forward:  # the program's own tensors, whose versions count
            read |= {key: x for key, x in memory.externals.items() if key in read}
        of_graph = {*places, *borrowed, *(x.untyped_storage()._cdata for x in whole.given)}
        self._reads = [
            tensor
            for key, tensor in read.items()
            if key not in of_graph and not recorded.segments.has_made(tensor)
        ]

    # -- replaying ---------------------------------------------------------------------------------

    def first(self, call: Arguments, caller: FrameType) -> Any:
        """Run what the capture has not run, and return the outputs."""
        return self.forward.first(call, caller, self)

    def replay(
        self, call: Arguments, caller: FrameType, done: Sequence[DonePart] | None = None
    ) -> Any:
        """Replay the forward; the gradients of its outputs lead to the backward."""
        if self._borrows:  # the graphs share one memory
            self._expire("the call at", ProgramLine.of(caller))
        return self.forward.replay(call, caller, self, done)

    def join(self, tensors: Tensors) -> Join:
        """Return a function that makes outputs results of the autograd node of this forward."""
        lease = Lease(self._side if self._side is not None and self._side.serves() else None)
        self._lease = weakref.ref(lease)

        def join(borrowed: list[torch.Tensor]) -> Any:
            with nullcontext() if lease.side is None else lease.side.current():
                *outs, _ = apply_node(self, lease, borrowed, *tensors, *self.parameters)
            inputs = [tensors[i] for i in self._reads_inputs]
            lease.note(self._reads + inputs + self.forward.outputs.lent(self._reads_outputs))
            return outs

        return join

    def not_differentiable(self, borrowed: Sequence[torch.Tensor]) -> Tensors:
        """Return the outputs without a gradient."""
        if self._all_lead:
            return []
        return [tensor for tensor, leads in zip(borrowed, self._leads, strict=True) if not leads]

    # -- going back --------------------------------------------------------------------------------

    def check(self, lease: Lease) -> None:
        """Raise ``GraphError`` where something was written to that the backward is to read."""
        if lease.is_written:
            raise GraphError(
                "a tensor that this backward needs was modified in place since its forward; "
                "run the backward before modifying the tensor, or clone the tensor"
            )

    def backward(
        self, grads: Grads, side: SideStream | None, edges: Sequence[tuple[Any, int]] = ()
    ) -> list[torch.Tensor | None]:
        """Replay the backward with the gradients of the outputs; returns fresh tensors.

        Args:
            grads: The gradients of the outputs.
            side: The current stream, if that is not the caller's.
            edges: To the nodes of the gradients that may be added to ``.grad`` here.
        """
        wanted = self._of_leading(grads)
        backward = self._backward_of(wanted)
        self.is_last = backward.last
        if self._borrows:  # all of them share one memory
            self._expire("the next backward")
        sums = self._sums.at(edges, side)
        fresh = backward.run([grad for grad in wanted if grad is not None], side, sums)
        return [*map(fresh.get, range(len(self._tensors)))]

    def expect(self, outs: Tensors, wanted: Tensors, *, uncaptured: bool) -> None:
        """Verify the backward of the forward that was just replayed, with that of ``outs``."""
        lease = None if self._lease is None else self._lease()
        if lease is not None:
            lease.expected, lease.uncaptured = (outs, wanted), uncaptured

    def verified_backward(self, lease: Lease, grads: Grads) -> list[torch.Tensor | None]:
        """Run the backward of the function's own outputs, then replay the captured one."""
        assert lease.expected is not None
        outs, wanted = lease.expected
        leading = self._of_leading(grads)
        coming = [(out, grad) for out, grad in zip(outs, leading, strict=True) if grad is not None]
        of_outs, come = [out for out, _ in coming], [grad for _, grad in coming]
        segments = self._backward_of(leading).segments
        wants = [tensor.requires_grad for tensor in self._tensors]
        back = functools.partial(self.backward, grads, lease.side)
        log = self.forward.log
        try:
            verification = self.forward.verification("gradient", segments, None)
            verified = verification._replace(uncaptured=lease.uncaptured).run(
                lambda: list(gradients(of_outs, wanted, come, quiet=self.parameters)),
                lambda _: [x for x, each in zip(back(), wants, strict=True) if each],
            )
            in_grads, forward = verified.found, log.eager_seconds or 0
            log.note(verified.seconds, forward + verified.eager_seconds)
        except Unequal as error:
            self._differs(error)
            in_grads = error.result
        each_found = iter(in_grads)
        return [next(each_found) if each else None for each in wants]

    def _of_leading(self, grads: Grads) -> list[torch.Tensor | None]:
        """Return the gradients of those outputs that have one."""
        if self._all_lead:
            return list(grads)
        return [grad for grad, leads in zip(grads, self._leads, strict=True) if leads]

    def _backward_of(self, grads: Grads) -> Backward:
        """Return the backward from those outputs whose gradients come; the first time, capture it.

        Raises ``GraphError`` if the graphs were released.
        """
        if not self._backwards:
            raise GraphError("the graph of this backward was released before it ran")
        comes = self._forms.of(grads, dense=self._dense)
        key = comes, modes() if any_autocast() else None
        if key not in self._backwards:
            go_back = gradients if any_autocast() else plain_gradients
            segments = self.forward.segments
            self._add(key, self._capture_backward(segments, comes, go_back, again=True))
        return self._backwards[key]

    def release(self) -> None:
        """Release all graphs."""
        self.forward.release()
        self._release_backwards()

    def _expire(self, event: str, line: ProgramLine | None = None) -> None:
        """Make gradients that the program still holds raise when they are read."""
        for backward in self._backwards.values():
            backward.guards.expire(event, line)

    def _release_backwards(self) -> None:
        self._expire("the release of the graph")
        for backward in self._backwards.values():
            backward.segments.release()
        self._backwards.clear()
        self.forward.go_back_by([])
