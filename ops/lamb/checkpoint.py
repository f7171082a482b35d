"""The state of a sharded optimizer as one dictionary per parameter, without traces of shards."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commlib.ops.lamb.lamb_rings import LambRings
from commlib.ops.lamb.part import Part

Tensor = torch.Tensor
State = dict[int, dict[str, Tensor]]

STEP = "step"


def names(part: Part) -> dict[str, Tensor]:
    """Return the shards that a checkpoint holds, by their names in it."""
    named = {"exp_avg": part.exp_avg, "exp_avg_sq": part.exp_avg_sq}
    return named if part.copy is None else {**named, "master": part.weights}


def gathered(parts: Sequence[Part], rings: LambRings, order: Sequence[int], step: Tensor) -> State:
    """Return the whole state of every parameter, in CPU memory.

    Args:
        parts: Buffers.
        rings: The rings; every member of the shard ring calls this.
        order: Position among the parameters of the program, per parameter of all parts.
        step: [1] number of updates.
    """
    state: State = {number: {STEP: step[0].cpu().clone()} for number in sorted(order)}
    for part in parts:
        for name, shard in names(part).items():
            flat = shard.new_empty(part.layout.numel)
            span = part.layout.shard(part.rank)
            flat[span] = shard
            for index, view in enumerate(part.views(rings.gather(flat, span))):
                state[order[part.first + index]][name] = view.to("cpu", copy=True)
    return state


def load(parts: Sequence[Part], order: Sequence[int], state: Mapping[int, Any]) -> None:
    """Fill the shards of this rank from the whole state of every parameter."""
    for part in parts:
        for name, shard in names(part).items():
            flat = torch.zeros(part.layout.numel, dtype=shard.dtype)
            for index, view in enumerate(part.views(flat)):
                view.copy_(state[order[part.first + index]][name])
            shard.copy_(flat[part.layout.shard(part.rank)])
