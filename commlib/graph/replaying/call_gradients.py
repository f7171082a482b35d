"""Gradients of a captured call: the interface, and its form without gradients."""

from typing import Protocol

from commlib.errors import GraphError
from commlib.graph.calls.leaves import Tensors
from commlib.graph.calls.outputs import Join, Outputs, flat, leads_back
from commlib.graph.recording.recorded_call import RecordedCall


class Gradients(Protocol):
    """Gradients of a captured call: how they flow back through it."""

    def prepare(self) -> None:
        """Make ready for the recording of the call."""

    def recorded(self, recorded: RecordedCall, outputs: Outputs, *, again: bool) -> None:
        """Record what belongs to a call that was just recorded; ``again`` as in ``record``."""

    def join(self, tensors: Tensors) -> Join | None:
        """Return what ties outputs to the gradients of the caller's tensors."""


class NoGradients:
    """No gradient flows back."""

    def prepare(self) -> None:
        """Do nothing."""

    def recorded(self, recorded: RecordedCall, outputs: Outputs, *, again: bool) -> None:
        """Raise ``GraphError`` for an output that requires grad."""
        if any(map(leads_back, flat(recorded.result)[0])):
            raise GraphError(
                "an output requires grad, but the backward was not run before the capture; pass "
                "warmup=2, or call the function under torch.no_grad()"
            )

    def join(self, tensors: Tensors) -> None:
        """Tie nothing."""
