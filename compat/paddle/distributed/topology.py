"""The grid of ranks in hybrid parallelism."""

from collections import namedtuple
from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

from commlib.errors import ArgumentError

_namedtuple: Any = namedtuple  # mypy knows literal names only
AXES = ("data", "pipe", "sharding", "sep", "model")


class CommunicateTopology:
    """A grid of ranks: the last axis changes fastest from one rank to the next.

    Attributes:
        coordinate: Named tuple of a rank's position on each axis.
    """

    def __init__(
        self, hybrid_group_names: Sequence[str] = AXES, dims: Sequence[int] = (1, 1, 1, 1, 1)
    ) -> None:
        """Take the names of the axes and their lengths.

        Raises:
            ArgumentError: There are not as many lengths as names, or a length is below 1.
        """
        if len(hybrid_group_names) != len(dims) or min(dims) < 1:
            raise ArgumentError(
                f"CommunicateTopology: hybrid_group_names={list(hybrid_group_names)}, "
                f"dims={list(dims)}; expected one length above 0 per name"
            )
        self._names, self._dims = list(hybrid_group_names), list(dims)
        self.coordinate = _namedtuple("Coordinate", self._names)
        grid = product(*(range(length) for length in dims))
        self._coordinates = [self.coordinate(*coord) for coord in grid]
        self._ranks = {coord: rank for rank, coord in enumerate(self._coordinates)}

    def get_hybrid_group_names(self) -> list[str]:
        """Return the names of the axes."""
        return self._names

    def get_dim(self, axis_name: str) -> int:
        """Return the length of an axis."""
        return self._dims[self._axis(axis_name)]

    get_dim_size = get_dim

    def world_size(self) -> int:
        """Return the number of ranks."""
        return prod(self._dims)

    def get_rank(self, **args: int) -> int:
        """Return the rank at a position on every axis.

        Raises:
            ArgumentError: An axis is missing or unknown, or a position is outside.
        """
        coord = self.coordinate(**args) if sorted(args) == sorted(self._names) else None
        if coord not in self._ranks:
            raise ArgumentError(
                f"get_rank: {args}; expected one position for each of "
                f"{dict(zip(self._names, self._dims, strict=True))}, from 0 on"
            )
        return self._ranks[coord]

    def get_coord(self, rank: int) -> Any:
        """Return the position of a rank on every axis, as a named tuple.

        Raises:
            ArgumentError: There is no such rank.
        """
        if not 0 <= rank < len(self._coordinates):
            raise ArgumentError(
                f"get_coord: rank={rank}; expected 0 to {len(self._coordinates) - 1}"
            )
        return self._coordinates[rank]

    def get_axis_list(self, axis_name: str, index: int) -> list[int]:
        """Return the ranks at position ``index`` of an axis, in ascending order."""
        axis = self._axis(axis_name)
        return [rank for rank, coord in enumerate(self._coordinates) if coord[axis] == index]

    def get_comm_list(self, axis_name: str) -> list[list[int]]:
        """Return the groups along an axis: ranks that differ in their position on it alone."""
        axis = self._axis(axis_name)
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank, coord in enumerate(self._coordinates):
            others = (*coord[:axis], *coord[axis + 1 :])
            groups.setdefault(others, []).append(rank)
        return [groups[others] for others in sorted(groups)]

    def get_fused_ranks(self, fused_axis: Sequence[str]) -> list[list[int]]:
        """Return the groups over several axes: ranks that differ in their positions on these alone.

        Args:
            fused_axis: Names of axes. The last one changes fastest within a group.
        """
        fused = [self._axis(name) for name in fused_axis]
        groups: dict[tuple[int, ...], dict[tuple[int, ...], int]] = {}
        for rank, coord in enumerate(self._coordinates):
            others = tuple(one for axis, one in enumerate(coord) if axis not in fused)
            groups.setdefault(others, {})[tuple(coord[axis] for axis in fused)] = rank
        return [
            [groups[others][key] for key in sorted(groups[others])] for others in sorted(groups)
        ]

    def get_rank_from_stage(self, global_rank: int, **kwargs: int) -> int:
        """Return the rank that differs from ``global_rank`` in the given positions."""
        return self.get_rank(**{**self.get_coord(global_rank)._asdict(), **kwargs})

    def _axis(self, name: str) -> int:
        if name not in self._names:
            raise ArgumentError(f"axis {name!r}; expected one of {self._names}")
        return self._names.index(name)
