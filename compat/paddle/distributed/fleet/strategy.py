"""The strategy of a program: how long every axis of hybrid parallelism is."""

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from commlib.compat.paddle.distributed.topology import CommunicateTopology
from commlib.errors import ArgumentError

_AXES = {"dp": "data", "pp": "pipe", "sharding": "sharding", "sep": "sep", "mp": "model"}


_OTHER_DEGREES = ("cp_degree", "cp_sharding_degree", "ep_degree", "moe_sharding_degree")
_DETAILS = (  # of fusion, overlap, schedules and NCCL
    *("mp_configs", "pp_configs", "sharding_configs", "dp_configs", "sep_configs", "ep_configs"),
    *("cp_configs", "cp_sharding_configs", "cp_mp_configs", "dp_sep_configs", "pp_tp_configs"),
    *("moe_sharding_configs", "default_comm_group_configs"),
)
_SYNCHRONIZATION = ("sync_param", "sync_grad", "sync_moment")  # details that change results
_REASONS = {
    "a_sync": "parameter servers are out of scope",
    "adaptive_localsgd": "average parameters by all_reduce in the program",
    "amp": "use torch.autocast and torch.amp.GradScaler",
    "asp": "sparsity is not ported",
    "dgc": "gradient compression is not ported; call all_reduce in torch.bfloat16",
    "find_unused_parameters": "parameters without a gradient take part with zeros; leave it away",
    "fp16_allreduce": "cast gradients before step()",
    "gradient_merge": "call backward() several times before step()",
    "gradient_scale": "scale the loss",
    "lamb": "use DistributedFusedLamb",
    "lars": "use an optimizer of torch",
    "localsgd": "average parameters by all_reduce in the program",
    "pipeline": "set pp_degree in hybrid_configs and train a PipelineLayer",
    "qat": "quantization is not ported",
    "recompute": "use torch.utils.checkpoint",
    "sharding": "set sharding_degree in hybrid_configs",
    "sync_batch_norm": "use torch.nn.SyncBatchNorm, or the operator sync_batch_norm",
    "tensor_parallel": "set mp_degree in hybrid_configs",
}
_ELSE = (
    "fleet.init reads hybrid_configs and tensor_parallel_configs, and nothing here needs another "
    "setting; leave it away"
)


class _Details(dict[str, Any]):
    """Settings by key, or by attribute as those of upstream's messages."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"{name!r} is not set; expected one of {list(self)}", name=name)
        return self[name]

    def __setattr__(self, name: str, value: object) -> None:
        self[name] = value


class DistributedStrategy:
    """Settings of ``fleet.init``; others of upstream's are an ``AttributeError`` with the reason.

    Attributes:
        hybrid_configs: ``dp_degree`` (-1: what the other degrees leave), ``mp_degree``,
            ``pp_degree``, ``sharding_degree``, ``sep_degree``, and ``order``, the axes from the one
            that changes slowest. What is set is added to the defaults. Upstream's details, such
            as ``mp_configs`` and ``pp_configs``, are accepted without effect.
        tensor_parallel_configs: ``tensor_init_seed``, the seed of split weights (-1: drawn).
            ``tensor_parallel_degree`` has no effect, as in dynamic mode upstream: ``mp_degree``
            has the number of ranks.
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
            **dict.fromkeys(_OTHER_DEGREES, 1),
            "enable_optimizer_timer": False,
            "split_norm_comm": False,
            **{name: _Details() for name in _DETAILS},
        }
        self._tensor_parallel: dict[str, Any] = {
            "tensor_init_seed": -1,
            "tensor_parallel_degree": 1,
        }

    def __setattr__(self, name: str, value: object) -> None:
        """Set a setting; refuse one that is not there, with the reason."""
        if not hasattr(type(self), name):
            raise _refused(name)
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # a checker would take any name for one that is there

        def __getattr__(self, name: str) -> Any:
            """Refuse a setting that is not there, with the reason."""
            raise _refused(name)

    @property
    def hybrid_configs(self) -> dict[str, Any]:
        """The degrees and the order of the axes."""
        return self._hybrid

    @hybrid_configs.setter
    def hybrid_configs(self, configs: Mapping[str, Any]) -> None:
        wrong = [key for key in _DETAILS if not isinstance(configs.get(key, {}), Mapping)]
        if wrong:
            raise ArgumentError(
                f"hybrid_configs: {wrong[0]}={configs[wrong[0]]!r}; expected a dict of settings"
            )
        details = {key: _Details(configs[key]) for key in _DETAILS if key in configs}
        _update(self._hybrid, "hybrid_configs", {**configs, **details})

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
            ArgumentError: ``order`` does not name every axis once, or a setting is one that
                changes results and is not ported.
        """
        self._check()
        order = self._hybrid["order"]
        if sorted(order) != sorted(_AXES):
            raise ArgumentError(
                f"hybrid_configs: order={order}; expected every one of {list(_AXES)} once"
            )
        degrees = {axis: self._hybrid[f"{axis}_degree"] for axis in order}
        if degrees["dp"] == -1:
            degrees["dp"] = max(1, ranks // prod(degrees[axis] for axis in order if axis != "dp"))
        return CommunicateTopology([_AXES[axis] for axis in order], list(degrees.values()))

    def _check(self) -> None:
        """Raise for settings that change results and are not ported."""
        other = [(key, self._hybrid[key]) for key in _OTHER_DEGREES if self._hybrid[key] != 1]
        other += [
            (f"{name}[{key!r}]", value)
            for name in _DETAILS
            for key, value in self._hybrid[name].items()
            if key in _SYNCHRONIZATION and value
        ]
        if other:
            name, value = other[0]
            raise ArgumentError(
                f"hybrid_configs: {name}={value!r}; this is not ported, since it changes results; "
                f"leave it away"
            )


def _refused(name: str) -> AttributeError:
    """Return the error of a setting that is not there."""
    reason = _REASONS.get(name.removesuffix("_configs"), _ELSE)
    return AttributeError(f"DistributedStrategy has no setting {name!r}; {reason}", name=name)


def _update(settings: dict[str, Any], name: str, configs: Mapping[str, Any]) -> None:
    unknown = [key for key in configs if key not in settings]
    if unknown:
        raise ArgumentError(
            f"{name}: unknown settings {unknown}; expected some of {list(settings)}"
        )
    settings.update(configs)
