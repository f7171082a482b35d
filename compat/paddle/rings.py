"""The legacy bring-up of a ring: c_gen_nccl_id and c_comm_init."""

from collections.abc import Sequence
from typing import Any

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
    """Return None on every rank: ids travel through the rendezvous store when the ring is created.

    Upstream opens sockets between ``endpoint`` and ``other_endpoints`` here and, with its new
    library, does nothing. The arguments are checked, so that a wrong program fails here. Pass
    the result to ``c_comm_init`` as ``x``. Raises ``RingError``, ``PeerError``, ``ArgumentError``.
    Source: operator ``c_gen_nccl_id``.
    """
    _checked_ring("c_gen_nccl_id", ring_id)
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
    x: Any = None,
) -> CommContext:
    """Create ring ``ring_id``, with this process at position ``rank``, and return its context.

    Called by the ring's ``nranks`` members alone; blocks until all have come, at most
    FLAGS_comm_timeout_s seconds. The same call again returns the same context. ``endpoints``,
    joined by commas, names the members in order: each is looked up in PADDLE_TRAINER_ENDPOINTS.
    Without one of both the members are the global ranks 0 to nranks - 1. ``device_id`` is the GPU
    to use, which becomes the current one, -1 for the program's; on a CPU it has no meaning. ``x``,
    the id that ``c_gen_nccl_id`` wrote upstream, is not read. A ring of one rank is allowed. Raises
    ``ArgumentError``, ``PeerError``, ``DeviceError``, ``RingError`` when the ring exists with other
    members, and what ``CommContextManager.create`` raises. Source: operator ``c_comm_init``.
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
            f"process is global rank {me}; the ring's members are {list(members)}; give this "
            f"process's position, or call commlib.new_ring({ring_id}, global_ranks)"
        )
    device = _device(device_id)
    if device is not None:
        torch.cuda.set_device(device)
    return CommContextManager.instance().create(ring_id, members, device=device)


def _checked_ring(name: str, ring_id: int) -> None:
    if ring_id < 0:
        raise RingError(f"{name}: ring_id={ring_id}; expected the number of a ring, 0 or above")


def _members(ring_id: int, nranks: int, endpoints: str) -> tuple[int, ...]:
    """Return the global ranks of the ring, in its order."""
    named = [one.strip() for one in endpoints.split(",") if one.strip()]
    if named and len(named) != nranks:
        raise ArgumentError(
            f"c_comm_init: {len(named)} endpoints {named} with nranks={nranks} for ring {ring_id}; "
            f"expected one a rank, joined by commas"
        )
    known = environment.paddle_endpoints()
    if not named or not known:
        return tuple(range(nranks))
    strange = [one for one in named if one not in known]
    if strange:
        raise ArgumentError(
            f"c_comm_init: endpoints {strange} of ring {ring_id} are not in {_ENDPOINTS}={known}; "
            f"correct one of them, or leave endpoints away for global ranks 0 to {nranks - 1}"
        )
    return tuple(known.index(one) for one in named)


def _device(device_id: int) -> torch.device | None:
    """Return the GPU that was asked for; None lets the manager decide."""
    manager = CommContextManager.instance()
    on_cpu = manager.has(0) and manager.get(0).device.type == "cpu"
    if device_id < 0 or on_cpu or not torch.cuda.is_available():
        return None
    return checked_device(torch.device("cuda", device_id))
