"""One training step of a pipeline: run a schedule's forwards and backwards on this rank."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from commlib.core.work import Work
from commlib.errors import GraphError
from commlib.graph.pipelines.actions import Action, PipelineMove, following

Loss = Callable[[torch.Tensor, int], torch.Tensor]


class Transport(Protocol):
    """A transport of activations and gradients between ranks."""

    def send(self, x: torch.Tensor, move: PipelineMove) -> Work[None] | None:
        """Send a tensor; a ``Work`` is waited for after the next send to that stage."""

    def receive(self, move: PipelineMove) -> Work[torch.Tensor] | torch.Tensor:
        """Return the tensor; a ``Work`` is waited for where the tensor is used."""


class PipelineStep:
    """The state of one step: tensors by the action that uses them."""

    def __init__(
        self,
        stages: Mapping[int, Callable[..., torch.Tensor]],
        inputs: Sequence[torch.Tensor],
        loss: Loss,
        last: int,
    ) -> None:
        """``last``: the number of the last stage."""
        self._stages, self._inputs, self._loss, self._last = stages, inputs, loss, last
        self._arrived: dict[Action, Any] = {}
        self._waiting: dict[Action, tuple[torch.Tensor, torch.Tensor]] = {}  # for their backward
        self._sent: dict[tuple[str, int], Work[None]] = {}  # the last one to each stage
        self._losses: list[torch.Tensor | None] = [None] * len(inputs)

    def run(self, action: Action) -> None:
        """Run a forward or backward, and keep its result for the action that follows."""
        result = self._forward(action) if action.kind == "forward" else self._backward(action)
        if result is not None:
            self._arrived[following(action)] = result

    def _take(self, action: Action) -> torch.Tensor:
        arrived: torch.Tensor | Work[torch.Tensor] = self._arrived.pop(action)
        return arrived.wait() if isinstance(arrived, Work) else arrived

    def _forward(self, action: Action) -> torch.Tensor | None:
        number = action.microbatch
        x = self._take(action).requires_grad_() if action.stage else self._inputs[number]
        y = self._stages[action.stage](x)
        if action.stage == self._last:
            y = _checked_loss(self._loss(y, number), number)
            self._losses[number] = y.detach()
        else:
            _check_activation(y, action)
        self._waiting[action._replace(kind="backward")] = x, y
        return None if action.stage == self._last else y.detach()

    def _backward(self, action: Action) -> torch.Tensor | None:
        x, y = self._waiting.pop(action)
        gradient = None if action.stage == self._last else self._take(action)
        if y.requires_grad:
            torch.autograd.backward(y, gradient)
        if not action.stage:
            return None
        return torch.zeros_like(x) if x.grad is None else x.grad

    def send(self, move: PipelineMove, transport: Transport) -> None:
        """Send the tensor that another rank uses, after the last one to that stage has left.

        So the tensors that are kept for sends do not add up with the number of microbatches.
        """
        work = transport.send(self._take(move.use), move)
        to = move.use.kind, move.use.stage
        if to in self._sent:
            self._sent.pop(to).wait()
        if work is not None:
            self._sent[to] = work

    def receive(self, move: PipelineMove, transport: Transport) -> None:
        """Receive a tensor that this rank uses."""
        self._arrived[move.use] = transport.receive(move)

    def finish(self) -> list[torch.Tensor]:
        """Wait for what was sent; returns the losses that this rank has."""
        for work in self._sent.values():
            work.wait()
        return [each for each in self._losses if each is not None]


def _check_activation(y: Any, action: Action) -> None:
    """Raise ``GraphError`` for a result that no later stage can send a gradient back to."""
    if not isinstance(y, torch.Tensor):
        actual = type(y).__name__
    elif not (y.is_floating_point() or y.is_complex()):
        actual = f"a tensor of {y.dtype}"
    else:
        return
    raise GraphError(
        f"the {action} gave {actual}; expected one tensor of floating point numbers; pass further "
        f"values to later stages outside the schedule, or pack them in one tensor"
    )


def _checked_loss(loss: Any, number: int) -> torch.Tensor:
    """Return a loss. Raises ``GraphError`` for what no backward can begin with."""
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    is_tensor = isinstance(loss, torch.Tensor)
    actual = f"a tensor of shape {tuple(loss.shape)}" if is_tensor else type(loss).__name__
    raise GraphError(
        f"loss(output, {number}) returned {actual}; expected one number in a tensor, for example "
        f"loss.mean()"
    )
