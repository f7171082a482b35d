"""The legacy helpers of expert parallelism: counting, ordering and dropping tokens."""

from commlib.ops import (
    assign_pos,
    limit_by_capacity,
    number_count,
    prune_gate_by_capacity,
    random_routing,
)

__all__ = [
    "assign_pos",
    "limit_by_capacity",
    "number_count",
    "prune_gate_by_capacity",
    "random_routing",
]
