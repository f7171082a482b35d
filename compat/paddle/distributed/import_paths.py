"""Paddle's deep import paths: modules under upstream's names, all made from one table.

``import commlib.compat.paddle.distributed.fleet.layers.mpu.mp_ops`` gives the same functions as
``paddle.distributed.mp_ops``. The modules hold names only; nothing is defined in them.
"""

import sys
from types import ModuleType
from typing import Any

from commlib.compat.paddle import moe
from commlib.compat.paddle.distributed import (
    collectives,
    environment,
    groups,
    hybrid_group,
    layers,
    moe_utils,
    mp_ops,
    objects,
    point_to_point,
    pp_utils,
    reduce_op,
    rng_states,
    stream,
    topology,
    waits,
)
from commlib.compat.paddle.distributed.fleet import (
    meta_optimizers,
    meta_parallel,
    program,
    strategy,
    training,
)
from commlib.compat.paddle.distributed.stream import copies, exchanges, reductions
from commlib.compat.paddle.unported import unported

ROOT = "commlib.compat.paddle.distributed"
_COLLECTIVE = (groups, collectives, objects, point_to_point, reduce_op, waits, environment)
_MPU = (mp_ops, layers, rng_states)

# Upstream's path under paddle.distributed, and the modules whose names it has.
PATHS: dict[str, tuple[ModuleType, ...]] = {
    "collective": (*_COLLECTIVE, mp_ops),
    "communication": _COLLECTIVE,
    "communication.all_gather": (collectives, objects),
    "communication.all_reduce": (collectives, reduce_op),
    "communication.all_to_all": (collectives,),
    "communication.batch_isend_irecv": (point_to_point,),
    "communication.broadcast": (collectives, objects),
    "communication.gather": (collectives,),
    "communication.group": (groups, waits),
    "communication.recv": (point_to_point,),
    "communication.reduce": (collectives, reduce_op),
    "communication.reduce_scatter": (collectives, reduce_op),
    "communication.scatter": (collectives, objects),
    "communication.send": (point_to_point,),
    "communication.stream": (stream,),
    "communication.stream.all_gather": (copies,),
    "communication.stream.all_reduce": (reductions, reduce_op),
    "communication.stream.all_to_all": (exchanges,),
    "communication.stream.broadcast": (copies,),
    "communication.stream.gather": (copies,),
    "communication.stream.recv": (exchanges,),
    "communication.stream.reduce": (reductions, reduce_op),
    "communication.stream.reduce_scatter": (reductions, reduce_op),
    "communication.stream.scatter": (copies,),
    "communication.stream.send": (exchanges,),
    "fleet.base": (),
    "fleet.base.distributed_strategy": (strategy,),
    "fleet.base.topology": (topology, hybrid_group, environment),
    "fleet.fleet": (program, training),
    "fleet.layers": (),
    "fleet.layers.mpu": _MPU,
    "fleet.layers.mpu.mp_layers": (layers,),
    "fleet.layers.mpu.mp_ops": (mp_ops,),
    "fleet.layers.mpu.random": (rng_states,),
    "fleet.meta_optimizers.dygraph_optimizer": (meta_optimizers,),
    "fleet.meta_parallel.parallel_layers": (meta_parallel,),
    "fleet.meta_parallel.parallel_layers.mp_layers": (layers,),
    "fleet.meta_parallel.parallel_layers.pp_layers": (meta_parallel,),
    "fleet.meta_parallel.parallel_layers.random": (rng_states,),
    "fleet.meta_parallel.pp_utils": (pp_utils,),
    "fleet.meta_parallel.pp_utils.p2p_communication": (pp_utils,),
    "fleet.model": (training,),
    "models": (),
    "models.moe": (),
    "models.moe.utils": (moe,),
    "parallel": (environment,),
    "utils": (moe_utils,),
    "utils.moe_utils": (moe_utils,),
}
# Names that upstream has with an underscore where ours have none.
_PRIVATE = {
    "models.moe.utils": (
        "assign_pos",
        "limit_by_capacity",
        "number_count",
        "prune_gate_by_capacity",
        "random_routing",
    ),
}


class _Alias(ModuleType):
    """A module under one of upstream's paths."""

    def __getattr__(self, name: str) -> Any:
        """Refuse an unknown name, with the reason why it is missing."""
        if name.startswith("__"):  # the import system asks for them
            raise AttributeError(name)
        names = [each for each in self.__dict__ if not each.startswith("__")]
        raise unported(self.__name__, names, name)


def install() -> None:
    """Register the modules, and set each as an attribute of its parent."""
    for path, sources in PATHS.items():
        name = f"{ROOT}.{path}"
        alias = _Alias(name, f"``paddle.distributed.{path}``; see ``import_paths``.")
        alias.__path__ = []  # a package: paths go on below it
        for source in sources:
            for each in _public(source):
                setattr(alias, each, getattr(source, each))
        for each in _PRIVATE.get(path, ()):
            if hasattr(alias, each):
                setattr(alias, f"_{each}", getattr(alias, each))
        sys.modules[name] = alias
        parent, _, last = name.rpartition(".")
        if last not in vars(sys.modules[parent]):  # a function may have the module's name
            setattr(sys.modules[parent], last, alias)


def _public(source: ModuleType) -> list[str]:
    """Return the names that a module defines, or lists."""
    listed = getattr(source, "__all__", None)
    if listed is not None:
        return list(listed)
    module = source.__name__
    return [
        name
        for name, value in vars(source).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module
    ]
