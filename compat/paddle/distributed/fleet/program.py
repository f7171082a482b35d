"""The program: its groups along every axis, and its processes."""

from commlib.compat.paddle.distributed.environment import (
    ParallelEnv,
    get_rank,
    get_world_size,
    init_parallel_env,
)
from commlib.compat.paddle.distributed.fleet.strategy import DistributedStrategy
from commlib.compat.paddle.distributed.hybrid_group import HybridCommunicateGroup, hybrid_group
from commlib.compat.paddle.distributed.rng_states import model_parallel_random_seed
from commlib.compat.paddle.distributed.waits import barrier
from commlib.errors import ArgumentError


def init(
    role_maker: object = None,
    is_collective: bool = False,
    strategy: DistributedStrategy | None = None,
    log_level: object = "INFO",
) -> None:
    """Find the other ranks and create the rings of every axis of ``strategy.hybrid_configs``.

    All processes call it. With an ``mp_degree`` above 1 or a ``tensor_init_seed`` it seeds the
    generators: alike on all ranks for what is replicated, differently for what is split.

    Args:
        role_maker: None; parameter servers are out of scope.
        is_collective: True.
        strategy: Default: all ranks on the data axis.
        log_level: Ignored.

    Raises:
        ArgumentError: ``role_maker`` or ``is_collective`` is another value, or the degrees do not
            fit the number of ranks.
        CommError: As ``commlib.init`` and ``commlib.new_ring``.
    """
    if role_maker is not None or not is_collective:
        raise ArgumentError(
            f"fleet.init: role_maker={role_maker!r}, is_collective={is_collective}; expected None "
            f"and True: parameter servers are out of scope; call fleet.init(is_collective=True)"
        )
    init_parallel_env()
    strategy = DistributedStrategy() if strategy is None else strategy
    HybridCommunicateGroup(strategy.topology(get_world_size()))
    seed = strategy.tensor_parallel_configs["tensor_init_seed"]
    if seed != -1:
        model_parallel_random_seed(seed)
    elif hybrid_group().get_model_parallel_world_size() > 1:
        model_parallel_random_seed()


def get_hybrid_communicate_group() -> HybridCommunicateGroup:
    """Return this process's groups along every axis.

    Raises:
        ArgumentError: ``init`` was not called.
    """
    return hybrid_group()


def worker_index() -> int:
    """Return this process's global rank."""
    return get_rank()


def worker_num() -> int:
    """Return the number of processes."""
    return get_world_size()


def is_first_worker() -> bool:
    """Return True on global rank 0."""
    return get_rank() == 0


def worker_endpoints(to_string: bool = False) -> list[str] | str:
    """Return the addresses in ``PADDLE_TRAINER_ENDPOINTS``.

    Args:
        to_string: True joins them by commas.
    """
    endpoints = ParallelEnv().trainer_endpoints
    return ",".join(endpoints) if to_string else endpoints


def barrier_worker() -> None:
    """Hold the host until every process has called it."""
    barrier()
