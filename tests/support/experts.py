"""The expert exchange from its definition, in NumPy, and random cases of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.support.checks import Array, sample, wide


class Row(NamedTuple):
    """The origin of a row of an expert."""

    rank: int
    token: int
    choice: int


@dataclass(frozen=True)
class Routing:
    """The choices of all ranks: ``ids[rank][token][choice]``."""

    num_experts: int
    capacity: int
    ids: Sequence[Sequence[Sequence[int]]]
    top_k: int
    active: Sequence[bool] | None = None
    weights: list[Array] = field(default_factory=list)  # float32 [tokens, top_k] per rank

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def local(self) -> int:
        return -(-self.num_experts // self.size)

    def here(self, rank: int) -> bool:
        return self.active is None or bool(self.active[rank])

    def chosen(self, expert: int) -> list[Row]:
        """Return all choices of an expert, by rank, token and choice."""
        if not self.here(expert // self.local):
            return []
        return [
            Row(rank, token, choice)
            for rank in range(self.size)
            if self.here(rank)
            for token, choices in enumerate(self.ids[rank])
            for choice, one in enumerate(choices)
            if one == expert
        ]

    def lines(self, rank: int) -> list[Row | None]:
        """Return the rows of a rank, expert by expert, None for an unused one."""
        padded: list[Row | None] = []
        for expert in range(rank * self.local, (rank + 1) * self.local):
            rows = self.chosen(expert)[: self.capacity] if expert < self.num_experts else []
            padded += [*rows, *[None] * (self.capacity - len(rows))]
        return padded

    def tables(self, rank: int) -> dict[str, Array]:
        """Return positions, sources, counts and demand of a rank's handle."""
        everywhere = [self.lines(owner) for owner in range(self.size)]
        positions = np.full((len(self.ids[rank]), self.top_k), -1, np.int32)
        for lines in everywhere:
            for index, row in enumerate(lines):
                if row is not None and row.rank == rank:
                    positions[row.token, row.choice] = index
        local_rows = everywhere[rank]
        sources = np.full((len(local_rows), 4), -1, np.int32)
        for index, row in enumerate(local_rows):
            if row is not None:
                same = [p for p, r in enumerate(local_rows) if r is not None and r[:2] == row[:2]]
                same.sort(key=lambda p: local_rows[p].choice)  # type: ignore[union-attr]
                at = same.index(index)
                following = same[at + 1] + 1 if at + 1 < len(same) else 0
                sources[index] = (*row, (at == 0) + 2 * following)
        demand = [len(self.chosen(e)) if self.here(rank) else 0 for e in range(self.num_experts)]
        counts = np.array([row is not None for row in local_rows], np.int32)
        return {
            "positions": positions,
            "sources": sources,
            "counts": counts.reshape(self.local, self.capacity).sum(1, dtype=np.int32),
            "demand": np.array(demand, np.int32),
        }

    def dispatched(self, x: list[Array], rank: int) -> Array:
        """Return the rows of a rank: [local, capacity, width]."""
        zero = np.zeros_like(x[0], shape=x[0].shape[1])
        rows = [zero if row is None else x[row.rank][row.token] for row in self.lines(rank)]
        return np.array(rows, x[0].dtype).reshape(self.local, self.capacity, -1)

    def row_weights(self, rank: int) -> Array:
        lines = self.lines(rank)
        weights = [0 if r is None else self.weights[r.rank][r.token, r.choice] for r in lines]
        return np.array(weights, np.float32)

    def combined(self, y: list[Array], rank: int, *, weighted: bool = True) -> Array:
        """Return the sums of a rank's tokens, each step rounded to the dtype of ``y``."""
        out = np.zeros((len(self.ids[rank]), y[0].shape[-1]), y[0].dtype)
        started: set[int] = set()
        for owner in range(self.size):
            partial: dict[int, Array] = {}
            lines = [(p, r) for p, r in enumerate(self.lines(owner)) if r and r.rank == rank]
            for index, row in sorted(lines, key=lambda one: one[1].choice):
                value = y[owner].reshape(-1, out.shape[1])[index]
                if weighted:
                    value = self.weights[rank][row.token, row.choice].astype(y[0].dtype) * value
                total = partial.get(row.token)
                partial[row.token] = value if total is None else total + value
            for token, value in partial.items():
                out[token] = out[token] + value if token in started else value
                started.add(token)
        return out

    def gradient_of_y(self, grads: list[Array], rank: int) -> Array:
        """Return the gradient of ``combined`` for a rank's rows, before it is rounded."""
        weights = self.row_weights(rank).astype(grads[0].dtype)
        rows = self.dispatched(grads, rank)
        rows *= weights.reshape(self.local, self.capacity, 1)
        return rows

    def gradient_of_weights(self, grads: list[Array], y: list[Array], rank: int) -> Array:
        """Return the gradient of ``combined`` for a rank's weights, in float64."""
        out = np.zeros((len(self.ids[rank]), self.top_k))
        for owner in range(self.size):
            for index, row in enumerate(self.lines(owner)):
                if row is not None and row.rank == rank:
                    value = y[owner].reshape(-1, y[owner].shape[2])[index].astype("f8")
                    out[row.token, row.choice] = value @ grads[rank][row.token].astype("f8")
        return out


def random_routing(size: int, seed: int, **given: Any) -> Routing:
    """Draw tokens, choices, weights and numbers; ``given`` are numbers to keep."""
    values = np.random.default_rng([size, seed])
    num_experts = given.get("num_experts", int(values.integers(1, 4 * size)))
    capacity = given.get("capacity", int(values.integers(1, 9)))
    top_k = given.get("top_k", int(values.integers(1, 5)))
    tokens = given.get("tokens", values.integers(0, 7, size).tolist())
    ids = [values.integers(-1, num_experts + 1, (count, top_k)).tolist() for count in tokens]
    return with_weights(Routing(num_experts, capacity, ids, top_k, given.get("active")), seed)


def with_weights(routing: Routing, seed: int = 0) -> Routing:
    """Return the routing with weights that every rank knows."""
    shapes = [(len(ids), routing.top_k) for ids in routing.ids]
    drawn = [wide(sample(r, s, torch.float32, seed + 1)) for r, s in enumerate(shapes)]
    return Routing(
        routing.num_experts, routing.capacity, routing.ids, routing.top_k, routing.active, drawn
    )


def tokens_of(
    routing: Routing, width: int, dtype: torch.dtype, seed: int = 0
) -> list[torch.Tensor]:
    """Return every rank's ``x``."""
    return [sample(r, (len(ids), width), dtype, seed) for r, ids in enumerate(routing.ids)]


def given(routing: Routing, comm: Any, **more: Any) -> dict[str, Any]:
    """Return this rank's arguments of ``expert_dispatch`` after ``x``."""
    ids = torch.tensor(routing.ids[comm.rank], dtype=more.pop("ids", torch.int64))
    arguments = {
        "expert_ids": ids.view(-1, routing.top_k).to(comm.device),
        "num_experts": routing.num_experts,
        "capacity": routing.capacity,
        "weights": torch.from_numpy(routing.weights[comm.rank]).to(comm.device),
        "on_overflow": "drop",
        **more,
    }
    if routing.active is not None:
        arguments["active"] = torch.tensor(routing.active, device=comm.device)
    return arguments


def differing_bytes(
    found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return how many bytes differ, on the device: the host does not wait for it."""
    pairs = zip(found, expected, strict=True)
    parts = [
        (one.contiguous().view(torch.uint8) != other.contiguous().view(torch.uint8)).sum()
        for one, other in pairs
    ]
    return torch.stack(parts).sum()
