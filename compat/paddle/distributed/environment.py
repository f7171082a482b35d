"""The process in the program: ``init_parallel_env``, its rank and the number of ranks."""

import torch

from commlib import flags
from commlib.compat.paddle.distributed.groups import Group, global_group
from commlib.core.manager import CommContextManager
from commlib.core.rings.opening import init
from commlib.rendezvous.environment import World, paddle_endpoints


class ParallelMode:
    """The kinds of parallelism that ``HybridCommunicateGroup.get_parallel_mode`` returns."""

    DATA_PARALLEL = 0
    TENSOR_PARALLEL = 1
    PIPELINE_PARALLEL = 2
    SHARDING_PARALLEL = 3
    SEGMENT_PARALLEL = 4


class ParallelEnv:
    """The place of this process, from the environment variables that ``init`` reads.

    ``PADDLE_TRAINER_ID``, ``PADDLE_TRAINERS_NUM``, ``PADDLE_MASTER``,
    ``PADDLE_TRAINER_ENDPOINTS`` and ``FLAGS_selected_gpus`` are read, also torchrun's variables.
    """

    def __init__(self) -> None:
        self._world: World = CommContextManager.instance()._world()

    @property
    def rank(self) -> int:
        """This process's global rank."""
        return self._world.rank

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self._world.size

    @property
    def device_id(self) -> int:
        """Index of this process's GPU on its host."""
        return self._world.local_rank or 0

    @property
    def device_type(self) -> str:
        """ "gpu" where a GPU is visible, else "cpu"."""
        return "gpu" if torch.cuda.device_count() else "cpu"

    @property
    def trainer_endpoints(self) -> list[str]:
        """Addresses of all processes from ``PADDLE_TRAINER_ENDPOINTS``; [] without it."""
        return paddle_endpoints()

    @property
    def current_endpoint(self) -> str:
        """This process's address; "" without ``PADDLE_TRAINER_ENDPOINTS``."""
        endpoints = paddle_endpoints()
        return endpoints[self.rank] if self.rank < len(endpoints) else ""

    @property
    def nrings(self) -> int:
        """Number of rings per group, always 1."""
        return 1

    @property
    def pg_timeout(self) -> int:
        """Milliseconds that a call waits for other ranks: FLAGS_comm_timeout_s."""
        return int(flags.get(flags.TIMEOUT) * 1000)

    local_rank = rank  # upstream's: not the rank on this host
    nranks = world_size
    dev_id = device_id


def init_parallel_env() -> Group:
    """Find the other ranks and return the group of all of them; a second call returns it too.

    It is ``commlib.init()``, which may be called before with a device or a backend.

    Raises:
        CommError: As ``commlib.init``.
    """
    init()
    return global_group()


def is_available() -> bool:
    """Return True: the package is there."""
    return True


def get_rank(group: Group | None = None) -> int:
    """Return this process's position in a group, -1 if it is not a member.

    Args:
        group: Default: all processes, also before ``init_parallel_env``.
    """
    return ParallelEnv().rank if group is None else group.rank


def get_world_size(group: Group | None = None) -> int:
    """Return the number of members of a group, -1 if this process is not one of them.

    Args:
        group: Default: all processes, also before ``init_parallel_env``.
    """
    return ParallelEnv().world_size if group is None else group.world_size
