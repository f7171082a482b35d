"""The legacy bring-up of a ring: c_gen_nccl_id and c_comm_init."""

from collections.abc import Sequence

import torch

from commlib.core.context import CommContext
from commlib.core.devices import checked_device
from commlib.core.manager import CommContextManager
from commlib.errors import ArgumentError, PeerError, RingError
from commlib.rendezvous import environment

_ENDPOINTS = "PADDLE_TRAINER_ENDPOINTS"


def c_gen_nccl_id(
    rank: int, endpoint: str = "", other_endpoints: Sequence[str] = (), ring_id: int = 0
) -> None:
    """Check the arguments of upstream's exchange of ids, which is part of ``c_comm_init`` here.

    Source: operator ``c_gen_nccl_id``. Upstream connects ``endpoint`` and ``other_endpoints`` by
    sockets here, or does nothing with its new library. Here the arguments are checked, so that a
    wrong program fails early.

    Args:
        rank: This rank's position in the ring.
        endpoint: This rank's address, "host:port".
        other_endpoints: The addresses of the other ranks.
        ring_id: The ring, which does not exist yet.

    Raises:
        RingError: ``ring_id`` is negative.
        PeerError: ``rank`` is negative.
        ArgumentError: An address is not "host:port".
    """
    _checked_ring("c_gen_nccl_id", ring_id)
    if isinstance(rank, bool) or not isinstance(rank, int):
        raise ArgumentError(
            f"c_gen_nccl_id: rank={rank!r}; expected this rank's position; the order is rank, "
            f"endpoint, other_endpoints, ring_id; pass them by keyword"
        )
    if rank < 0:
        raise PeerError(f"c_gen_nccl_id: rank={rank} for ring {ring_id}; expected 0 or above")
    for one in (endpoint, *other_endpoints):
        host, _, port = one.rpartition(":")
        if one and not (host and port.isdigit()):
            raise ArgumentError(
                f"c_gen_nccl_id: endpoint {one!r} for ring {ring_id} on rank {rank}; expected "
                f"host:port; for example '127.0.0.1:6170'"
            )


def c_comm_init(
    nranks: int,
    rank: int,
    device_id: int = -1,
    ring_id: int = 0,
    endpoints: str = "",
    x: object = None,
) -> CommContext:
    """Create ring ``ring_id``, with this process at position ``rank``, and return it.

    Source: operator ``c_comm_init``. Every member of the ring calls it, and no other rank. It
    blocks until all members have called it, at most FLAGS_comm_timeout_s seconds. The same call
    again returns the same ring.

    Args:
        nranks: Number of members; 1 is allowed.
        rank: This rank's position in the ring.
        device_id: GPU of this rank, which becomes the current one; -1 lets
            ``CommContextManager.create`` choose. Ignored on a CPU.
        ring_id: The ring.
        endpoints: Addresses of the members, joined by commas, in the order of the ring. Each is
            looked up in PADDLE_TRAINER_ENDPOINTS. If either is empty, the members are the global
            ranks 0 to ``nranks`` - 1.
        x: Ignored. Upstream passes the id that ``c_gen_nccl_id`` wrote.

    Returns:
        The ring.

    Raises:
        ArgumentError: This process is not at position ``rank``, or ``endpoints`` is wrong.
        PeerError: ``rank`` is not in 0 to ``nranks`` - 1.
        DeviceError: There is no such GPU.
        RingError: ``ring_id`` is negative, or the ring exists with other members.
        CommError: As ``CommContextManager.create``.
    """
    _checked_ring("c_comm_init", ring_id)
    if nranks < 1 or not 0 <= rank < nranks:
        raise PeerError(
            f"c_comm_init: rank={rank} of nranks={nranks} for ring {ring_id}; expected "
            f"nranks >= 1 and 0 <= rank < nranks"
        )
    members, me = _members(ring_id, nranks, endpoints), environment.world().rank
    if members[rank] != me:
        raise ArgumentError(
            f"c_comm_init: rank={rank} of ring {ring_id} is global rank {members[rank]}, this "
            f"process is global rank {me}; the ring's members are {list(members)}; pass this "
            f"process's position, or call commlib.new_ring({ring_id}, global_ranks)"
        )
    device = _device(device_id)
    if device is not None:
        torch.cuda.set_device(device)
    return CommContextManager.instance().create(ring_id, members, device=device)


def _checked_ring(name: str, ring_id: int) -> None:
    if isinstance(ring_id, bool) or not isinstance(ring_id, int):
        raise ArgumentError(f"{name}: ring_id={ring_id!r}; expected the number of a ring")
    if ring_id < 0:
        raise RingError(f"{name}: ring_id={ring_id}; expected the number of a ring, 0 or above")


def _members(ring_id: int, nranks: int, endpoints: str) -> tuple[int, ...]:
    """Return the global ranks of the ring, in its order."""
    named = [one.strip() for one in endpoints.split(",") if one.strip()]
    if named and len(named) != nranks:
        raise ArgumentError(
            f"c_comm_init: {len(named)} endpoints {named} with nranks={nranks} for ring {ring_id}; "
            f"expected one per rank, joined by commas"
        )
    world = environment.paddle_endpoints()
    if not named or not world:
        return tuple(range(nranks))
    strange = [one for one in named if one not in world]
    if strange:
        raise ArgumentError(
            f"c_comm_init: endpoints {strange} of ring {ring_id} are not in {_ENDPOINTS}={world}; "
            f"correct one of them, or leave endpoints away for global ranks 0 to {nranks - 1}"
        )
    return tuple(world.index(one) for one in named)


def _device(device_id: int) -> torch.device | None:
    """Return the GPU that was asked for; None lets the manager decide."""
    manager = CommContextManager.instance()
    on_cpu = manager.has(0) and manager.get(0).device.type == "cpu"
    if device_id < 0 or on_cpu or not torch.cuda.is_available():
        return None
    return checked_device(torch.device("cuda", device_id))


def c_gen_xccl_id(
    rank: int, endpoint: str = "", other_endpoints: Sequence[str] = (), ring_id: int = 0
) -> None:
    """Check the arguments of upstream's exchange of ids between custom devices.

    Source: operator ``c_gen_xccl_id``, which does what ``c_gen_nccl_id`` does.

    Args:
        rank: This rank's position in the ring.
        endpoint: This rank's address, "host:port".
        other_endpoints: The addresses of the other ranks.
        ring_id: The ring, which does not exist yet.

    Raises:
        RingError: ``ring_id`` is negative.
        PeerError: ``rank`` is negative.
        ArgumentError: An address is not "host:port".
    """
    c_gen_nccl_id(rank, endpoint, other_endpoints, ring_id)


def c_comm_init_all(devices: Sequence[int] = (), ring_id: int = 0) -> CommContext:
    """Create ring ``ring_id`` of all devices of this process, and return it.

    Source: operator ``c_comm_init_all``. Upstream may run several devices in one process. Here a
    process has one device, so that the ring has one rank.

    Args:
        devices: The GPU of this process, or nothing.
        ring_id: The ring.

    Returns:
        The ring.

    Raises:
        ArgumentError: There are several devices.
        DeviceError: There is no such GPU.
        RingError: ``ring_id`` is negative, or the ring exists with other members.
    """
    _checked_ring("c_comm_init_all", ring_id)
    device = _device(_only("c_comm_init_all", devices, ring_id))
    if device is not None:
        torch.cuda.set_device(device)
    me = environment.world().rank
    return CommContextManager.instance().create(ring_id, [me], device=device)


def comm_init_all(devices: Sequence[int] = (), ring_id: int = 0) -> CommContext:
    """Create ring ``ring_id`` of all devices of this process, and return it.

    Source: operator ``comm_init_all``, which does what ``c_comm_init_all`` does.

    Args:
        devices: The GPU of this process, or nothing.
        ring_id: The ring.

    Returns:
        The ring.

    Raises:
        ArgumentError: There are several devices.
        DeviceError: There is no such GPU.
        RingError: ``ring_id`` is negative, or the ring exists with other members.
    """
    return c_comm_init_all(devices, ring_id)


def c_comm_init_multitrainer(
    ntrainers: int,
    trainer_id: int,
    devices: Sequence[int] = (),
    ring_id: int = 0,
    x: object = None,
) -> CommContext:
    """Create ring ``ring_id`` of the devices of all trainers, and return it.

    Source: operator ``c_comm_init_multitrainer``. A trainer is a process with one device here.

    Args:
        ntrainers: Number of trainers.
        trainer_id: This process's position among them.
        devices: The GPU of this process, or nothing.
        ring_id: The ring.
        x: Ignored.

    Returns:
        The ring.

    Raises:
        ArgumentError: There are several devices.
        CommError: As ``c_comm_init``.
    """
    if not (isinstance(ntrainers, int) and isinstance(trainer_id, int)):
        raise ArgumentError(
            f"c_comm_init_multitrainer: ntrainers={ntrainers!r}, trainer_id={trainer_id!r}; "
            f"expected numbers; x, the id, comes last here; pass the arguments by keyword"
        )
    device_id = _only("c_comm_init_multitrainer", devices, ring_id)
    return c_comm_init(ntrainers, trainer_id, device_id, ring_id)


def _only(name: str, devices: Sequence[int], ring_id: int) -> int:
    """Return the only device; -1 lets the manager choose."""
    if len(devices) > 1:
        raise ArgumentError(
            f"{name}: devices={list(devices)} for ring {ring_id}; expected one device per process; "
            f"start {len(devices)} processes, for example with torchrun, and call c_comm_init on "
            f"each"
        )
    return devices[0] if devices else -1
