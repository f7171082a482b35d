"""``paddle.distributed`` over rings: ``import commlib.compat.paddle.distributed as dist``.

Names, argument orders and defaults are those of Paddle 2.6. Tensors are torch tensors. A ``Group``
is a ring with a legacy number: ``group.id`` is its ``ring_id``, so the operators of
``commlib.compat.paddle`` take it. Rings come from ``PADDLE_*`` or torchrun's variables.
``docs/paddle_differences.md`` lists the differences.
"""

from typing import TYPE_CHECKING, Any

from commlib.compat.paddle.distributed import (
    fleet,
    layers,
    moe_utils,
    mp_ops,
    pp_utils,
    stream,
    topology,
)
from commlib.compat.paddle.distributed import import_paths as import_paths
from commlib.compat.paddle.distributed.collectives import (
    all_gather,
    all_reduce,
    alltoall,
    alltoall_single,
    broadcast,
    gather,
    reduce,
    reduce_scatter,
    scatter,
)
from commlib.compat.paddle.distributed.environment import (
    ParallelEnv,
    ParallelMode,
    get_rank,
    get_world_size,
    init_parallel_env,
    is_available,
)
from commlib.compat.paddle.distributed.groups import (
    Group,
    destroy_process_group,
    get_backend,
    get_group,
    is_initialized,
    new_group,
)
from commlib.compat.paddle.distributed.moe_utils import global_gather, global_scatter
from commlib.compat.paddle.distributed.mp_ops import split
from commlib.compat.paddle.distributed.objects import (
    all_gather_object,
    broadcast_object_list,
    scatter_object_list,
)
from commlib.compat.paddle.distributed.point_to_point import (
    P2POp,
    batch_isend_irecv,
    irecv,
    isend,
    recv,
    send,
)
from commlib.compat.paddle.distributed.reduce_op import ReduceOp
from commlib.compat.paddle.distributed.waits import barrier, wait
from commlib.compat.paddle.unported import unported

__all__ = [
    "Group",
    "P2POp",
    "ParallelEnv",
    "ParallelMode",
    "ReduceOp",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "alltoall",
    "alltoall_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "fleet",
    "gather",
    "get_backend",
    "get_group",
    "get_rank",
    "get_world_size",
    "global_gather",
    "global_scatter",
    "init_parallel_env",
    "irecv",
    "is_available",
    "is_initialized",
    "isend",
    "layers",
    "moe_utils",
    "mp_ops",
    "new_group",
    "pp_utils",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "scatter_object_list",
    "send",
    "split",
    "stream",
    "topology",
    "wait",
]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]


import_paths.install()

if not TYPE_CHECKING:  # a checker would take any name for one that is there

    def __getattr__(name: str) -> Any:
        """Refuse an unknown name, with the nearest one or the reason why it is missing."""
        raise unported(__name__, __all__, name)
