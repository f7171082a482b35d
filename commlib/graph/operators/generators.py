"""Generators of random numbers, and whether a run draws from them or sets them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from commlib.graph.operators.schema import Described, OpCall


class RngTracker:
    """A generator in a run, and the states that draws have left it in."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.begun = generator, generator.get_state()
        self._seed, self._last = generator.initial_seed(), self.begun.numpy().tobytes()
        self._states = {self._last}

    def record_state(self) -> None:
        """Record the state after a draw."""
        self._last = self._state()
        self._states.add(self._last)

    def was_set(self) -> bool:
        """Return True if the generator was re-seeded: no random draw explains the new state."""
        state = self._state()
        if state == self._last:
            return False
        if state in self._states or self.generator.initial_seed() != self._seed:
            return True
        fresh = torch.Generator(self.generator.device).manual_seed(self._seed)
        return state == fresh.get_state().numpy().tobytes()

    def _state(self) -> bytes:
        return self.generator.get_state().numpy().tobytes()


@contextmanager
def advanced(generators: Sequence[torch.Generator]) -> Iterator[None]:
    """Draw from them once more inside a ``with`` block, so that a second setting of them shows."""
    before = [(generator, generator.get_state()) for generator in generators]
    for generator in generators:
        torch.rand((), generator=generator, device=generator.device)
    try:
        yield
    finally:
        for generator, state in before:
            put_state(generator, state)


def put_state(generator: torch.Generator, state: torch.Tensor) -> None:
    """Give a generator a state that it had.

    Where a GPU's generator is set, cuDNN restarts its dropout. One over the same state has its
    own sign of that, which nobody reads.
    """
    if generator.device.type == "cuda" and hasattr(generator, "graphsafe_get_state"):
        generator = generator.graphsafe_get_state()
    generator.set_state(state)


def default_generator(device: Any) -> torch.Generator:
    """Return torch's own generator of a device."""
    device = torch.device(device)
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


def generators_of(call: OpCall, device: torch.device) -> list[torch.Generator]:
    """Return the generators that an operator draws from; ``device``: where it runs.

    An operator of torch draws from the one that it is given, or from torch's own. Compiled code may
    draw from both.
    """
    if not (call.known.draws or call.known.generator):
        return []
    generators = call.generators
    if call.known.draws and (not generators or isinstance(call.func, Described)):
        op_device = call.kwargs.get("device") or next((x.device for x in call.tensors), device)
        generators.append(default_generator(op_device))
    return generators
