"""The strategy of a program: how long every axis of hybrid parallelism is."""

from collections.abc import Mapping
from math import prod
from typing import Any

from commlib.compat.paddle.distributed.topology import CommunicateTopology
from commlib.errors import ArgumentError

_AXES = {"dp": "data", "pp": "pipe", "sharding": "sharding", "sep": "sep", "mp": "model"}


class DistributedStrategy:
    """Settings of ``fleet.init``; others of upstream's are an ``AttributeError``.

    Attributes:
        hybrid_configs: ``dp_degree`` (-1: what the other degrees leave), ``mp_degree``,
            ``pp_degree``, ``sharding_degree``, ``sep_degree``, and ``order``, the axes from the one
            that changes slowest. What is set is added to the defaults.
        tensor_parallel_configs: ``tensor_init_seed``, the seed of split weights (-1: drawn).
    """

    __slots__ = ("_hybrid", "_tensor_parallel")

    def __init__(self) -> None:
        self._hybrid: dict[str, Any] = {
            "dp_degree": -1,
            "mp_degree": 1,
            "pp_degree": 1,
            "sharding_degree": 1,
            "sep_degree": 1,
            "order": list(_AXES),
        }
        self._tensor_parallel: dict[str, Any] = {"tensor_init_seed": -1}

    @property
    def hybrid_configs(self) -> dict[str, Any]:
        """The degrees and the order of the axes."""
        return self._hybrid

    @hybrid_configs.setter
    def hybrid_configs(self, configs: Mapping[str, Any]) -> None:
        _update(self._hybrid, "hybrid_configs", configs)

    @property
    def tensor_parallel_configs(self) -> dict[str, Any]:
        """The settings of tensor parallelism."""
        return self._tensor_parallel

    @tensor_parallel_configs.setter
    def tensor_parallel_configs(self, configs: Mapping[str, Any]) -> None:
        _update(self._tensor_parallel, "tensor_parallel_configs", configs)

    def topology(self, ranks: int) -> CommunicateTopology:
        """Return the grid of ``ranks`` ranks.

        Raises:
            ArgumentError: ``order`` does not name every axis once.
        """
        order = self._hybrid["order"]
        if sorted(order) != sorted(_AXES):
            raise ArgumentError(
                f"hybrid_configs: order={order}; expected every one of {list(_AXES)} once"
            )
        degrees = {axis: self._hybrid[f"{axis}_degree"] for axis in order}
        if degrees["dp"] == -1:
            degrees["dp"] = max(1, ranks // prod(degrees[axis] for axis in order if axis != "dp"))
        return CommunicateTopology([_AXES[axis] for axis in order], list(degrees.values()))


def _update(settings: dict[str, Any], name: str, configs: Mapping[str, Any]) -> None:
    unknown = [key for key in configs if key not in settings]
    if unknown:
        raise ArgumentError(
            f"{name}: unknown settings {unknown}; expected some of {list(settings)}"
        )
    settings.update(configs)
