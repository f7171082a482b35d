"""Named states of the random number generator: one that all ranks share, one per rank."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from commlib.compat.paddle.checks import ring_of
from commlib.compat.paddle.distributed.groups import at_end
from commlib.compat.paddle.distributed.hybrid_group import hybrid_group
from commlib.errors import ArgumentError

__all__ = [
    "MODEL_PARALLEL_RNG",
    "RNGStatesTracker",
    "get_rng_state_tracker",
    "model_parallel_random_seed",
]

MODEL_PARALLEL_RNG = "model_parallel_rng"
_LARGEST_SEED = 10000

State = tuple[torch.Tensor, torch.Tensor | None]


class RNGStatesTracker:
    """Keeps states of the default generators, of the CPU and of ring 0's GPU, by name."""

    def __init__(self) -> None:
        self._states: dict[str, State] = {}
        self._seeds: set[int] = set()

    def reset(self) -> None:
        """Forget all states."""
        self._states, self._seeds = {}, set()

    def add(self, name: str, seed: int) -> None:
        """Add the state that follows ``torch.manual_seed(seed)``.

        Args:
            name: A new name.
            seed: A seed that no other state began with.

        Raises:
            ArgumentError: The name or the seed is in use.
            RingError: Ring 0 does not exist, which decides on the device.
        """
        if name in self._states or seed in self._seeds:
            raise ArgumentError(
                f"RNGStatesTracker.add({name!r}, {seed}): the name or the seed is in use; names: "
                f"{list(self._states)}, seeds: {sorted(self._seeds)}; pass others, or call reset()"
            )
        before = _state()
        torch.manual_seed(seed)
        self._states[name] = _state()
        self._seeds.add(seed)
        _set_state(before)

    def get_states_tracker(self) -> dict[str, State]:
        """Return the states by their names, for a checkpoint."""
        return dict(self._states)

    def set_states_tracker(self, states: dict[str, State]) -> None:
        """Replace the states by those of ``get_states_tracker``."""
        self._states = dict(states)

    @contextmanager
    def rng_state(self, name: str = MODEL_PARALLEL_RNG) -> Iterator[None]:
        """Draw from a named state in a ``with`` block; draws after it go on as before it.

        Args:
            name: A name that was added.

        Raises:
            ArgumentError: There is no such state.
        """
        if name not in self._states:
            raise ArgumentError(
                f"rng_state({name!r}): no such state; call fleet.init(is_collective=True, "
                f"strategy=strategy) with an mp_degree above 1, or "
                f"get_rng_state_tracker().add({name!r}, seed)"
            )
        before = _state()
        _set_state(self._states[name])
        try:
            yield
        finally:
            self._states[name] = _state()
            _set_state(before)


_tracker = RNGStatesTracker()
at_end(_tracker.reset)


def get_rng_state_tracker() -> RNGStatesTracker:
    """Return the tracker of this process."""
    return _tracker


def model_parallel_random_seed(seed: int | None = None) -> None:
    """Seed the default generator alike on all ranks, and the tracked one differently per rank.

    Args:
        seed: Default: a number that global rank 0 draws. Upstream draws one on each rank.

    Raises:
        ArgumentError: There is no hybrid group.
    """
    hybrid = hybrid_group()
    if not seed:
        drawn = int(torch.randint(_LARGEST_SEED, ()))
        seed = ring_of("model_parallel_random_seed", 0).exchange([drawn])[0][0]
    stages = hybrid.get_pipe_parallel_world_size()
    offset = hybrid.get_model_parallel_rank() * stages + hybrid.get_stage_id()
    _tracker.reset()
    _tracker.add(MODEL_PARALLEL_RNG, seed + 1 + offset)
    torch.manual_seed(seed)


def _state() -> State:
    device = ring_of("RNGStatesTracker", 0).device
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    return torch.get_rng_state(), on_gpu


def _set_state(state: State) -> None:
    on_cpu, on_gpu = state
    torch.set_rng_state(on_cpu)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu, ring_of("RNGStatesTracker", 0).device)
