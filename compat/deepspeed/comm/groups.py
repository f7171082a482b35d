"""Start, end and groups of ``deepspeed.comm``."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from commlib.compat import torch_distributed as dist
from commlib.compat.c10d.bridges import calls_of
from commlib.compat.deepspeed.comm.counters import configure
from commlib.errors import ArgumentError
from commlib.rendezvous import environment

Group = dist.ProcessGroup | None

DEFAULT_PORT = 29500
default_pg_timeout = timedelta(minutes=30)


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = DEFAULT_PORT,
    verbose: bool = True,
    timeout: timedelta = default_pg_timeout,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Initialise the communication of all ranks, unless that was done.

    Args:
        dist_backend: "nccl", "gloo" or None stand for rings; another name is that of a backend of
            ``torch.distributed``.
        auto_mpi_discovery: Ignored: without RANK, the variables of other launchers are read.
        distributed_port: Ignored: the launcher names the port, by MASTER_PORT.
        verbose: Ignored.
        timeout: The longest wait of a call on a CPU.
        init_method: As in ``torch.distributed.init_process_group``.
        dist_init_required: False expects that it was done.
        config: As ``configure(deepspeed_config)``.
        rank: With ``init_method``: this rank.
        world_size: With ``init_method``: the number of ranks.

    Raises:
        ArgumentError: ``dist_init_required`` is False, and nothing is initialised.
    """
    if config is not None:
        configure(deepspeed_config=config)
    if dist_init_required is False and not is_initialized():
        raise ArgumentError(
            "init_distributed(dist_init_required=False): torch.distributed is not initialised; "
            "pass dist_init_required=None, or initialise it before"
        )
    if is_initialized():
        return
    kwargs: dict[str, Any] = {} if init_method is not None or rank >= 0 else _of_launcher()
    if init_method is not None:
        kwargs["init_method"] = init_method
    if rank >= 0:
        kwargs |= {"rank": rank, "world_size": world_size}
    dist.init_process_group(dist_backend, timeout=timeout, **kwargs)


def _of_launcher() -> dict[str, Any]:
    """Return the place of this rank if no RANK says it: another launcher's, or alone."""
    if environment.names_rank():
        return {}
    world = environment.world()
    kwargs: dict[str, Any] = {"rank": world.rank, "world_size": world.size}
    if world.address is None:
        return {**kwargs, "store": dist.HashStore()}
    host, port = world.address
    return {**kwargs, "init_method": f"tcp://{host}:{port}"}


def is_available() -> bool:
    """Return True."""
    return True


def is_initialized() -> bool:
    """Return True between ``init_distributed`` and ``destroy_process_group``."""
    return bool(dist.is_initialized())


def destroy_process_group(group: Group = None) -> None:
    """Close a group, or all of them.

    Args:
        group: A process group; None closes all groups.
    """
    dist.destroy_process_group(group)


def new_group(ranks: Sequence[int]) -> dist.ProcessGroup | int:
    """Return a group of some ranks; every rank calls it.

    Args:
        ranks: Global ranks.

    Returns:
        The group; on a rank that is not in it ``GroupMember.NON_GROUP_MEMBER`` of torch.
    """
    group: dist.ProcessGroup | int = dist.new_group(list(ranks))
    return group


def get_world_group() -> Group:
    """Return the group of all ranks; None before ``init_distributed``."""
    return dist.group.WORLD


def _given(name: str, group: Group) -> dist.ProcessGroup:
    """Return the ``group`` of a call of ``name``; for None that of all ranks."""
    pg = group or get_world_group()
    if pg is None:
        raise ArgumentError(
            f"deepspeed.comm.{name}: no group exists; expected the group of all ranks; call "
            f"deepspeed.comm.init_distributed() first"
        )
    return pg


def get_world_size(group: Group = None) -> int:
    """Return the number of ranks of a group; -1 for one that this rank is not in.

    Args:
        group: A process group; None is that of all ranks.
    """
    return int(dist.get_world_size(group))


def get_rank(group: Group = None) -> int:
    """Return this rank's position in a group; -1 for one that it is not in.

    Args:
        group: A process group; None is that of all ranks.
    """
    return int(dist.get_rank(group))


def get_local_rank() -> int:
    """Return this rank's number on its host."""
    number = environment.world().local_rank
    return get_rank() if number is None else number


def get_global_rank(group: Group = None, group_rank: int = 0) -> int:
    """Return the global rank of a position in a group.

    Args:
        group: A process group; None is that of all ranks.
        group_rank: A position in the group.
    """
    return int(dist.get_global_rank(_given("get_global_rank", group), group_rank))


def get_all_ranks_from_group(group: Group = None) -> list[int]:
    """Return the ranks of a group in its order.

    Args:
        group: A process group; None is that of all ranks.
    """
    return list(dist.get_process_group_ranks(_given("get_all_ranks_from_group", group)))


def initialize_mesh_device(
    mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]
) -> DeviceMesh:
    """Return a ``DeviceMesh`` over the devices of all ranks.

    Args:
        mesh_shape: Sizes of the dimensions.
        mesh_dim_names: Names of the dimensions.
    """
    calls = calls_of(_given("initialize_mesh_device", None))
    kind = "cuda" if calls is not None and "cuda" in calls.rings else "cpu"
    return dist.init_device_mesh(kind, mesh_shape, mesh_dim_names=mesh_dim_names)


def has_all_gather_into_tensor() -> bool:
    """Return True."""
    return True


def has_reduce_scatter_tensor() -> bool:
    """Return True."""
    return True


def has_all_reduce_coalesced() -> bool:
    """Return True."""
    return True


def has_coalescing_manager() -> bool:
    """Return True."""
    return True
