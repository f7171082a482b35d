"""Where the ranks of a program find each other: torchrun's or Paddle's environment, and a store."""

import os
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from commlib._deadline import Deadline
from commlib.errors import BootstrapError


@dataclass(frozen=True)
class World:
    """Who this process is among all ranks; ``address`` is None for a process on its own."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: tuple[str, int] | None
    hosts_store: bool
    prefix: str


def world() -> World:
    """Read the rendezvous environment.

    torchrun: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT. Paddle: PADDLE_TRAINER_ID,
    PADDLE_TRAINERS_NUM, and PADDLE_MASTER or PADDLE_TRAINER_ENDPOINTS. None of both: size 1.
    Raises ``BootstrapError`` when half of an environment is there, LOCAL_RANK alone for example, or
    a value can't be read.
    """
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        return _torchrun()
    if "PADDLE_TRAINER_ID" in env or "PADDLE_TRAINERS_NUM" in env:
        return _paddle()
    if dist.is_initialized():
        return World(
            dist.get_rank(),
            dist.get_world_size(),
            dist.get_rank(),
            dist.get_world_size(),
            None,
            False,
            "commlib",
        )
    if "LOCAL_RANK" in env:  # a launcher's sign; whoever took it for none would train alone
        return _torchrun()
    return World(0, 1, 0, 1, None, False, "commlib")


def _torchrun() -> World:
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    host, port = _text("MASTER_ADDR"), _number("MASTER_PORT")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The agent's store outlives a restart of the workers; their keys must not.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    local = _number("LOCAL_RANK") if "LOCAL_RANK" in os.environ else rank
    here = _number("LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in os.environ else size
    return _checked(
        World(
            rank,
            size,
            local,
            here,
            (host, port),
            rank == 0 and not agent,
            f"commlib/{run}/{restart}",
        )
    )


def _paddle() -> World:
    rank, size = _number("PADDLE_TRAINER_ID"), _number("PADDLE_TRAINERS_NUM")
    master = os.environ.get("PADDLE_MASTER") or (paddle_endpoints() or [""])[0]
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise BootstrapError(
            f"PADDLE_MASTER={os.environ.get('PADDLE_MASTER')!r} and PADDLE_TRAINER_ENDPOINTS="
            f"{','.join(paddle_endpoints())!r} name no host:port; type "
            f"`export PADDLE_MASTER=127.0.0.1:6170`"
        )
    local = _number("PADDLE_LOCAL_RANK") if "PADDLE_LOCAL_RANK" in os.environ else rank
    if "FLAGS_selected_gpus" in os.environ:
        first = os.environ["FLAGS_selected_gpus"].split(",")[0]
        if not first.isdigit():
            raise BootstrapError(f"FLAGS_selected_gpus={first!r}: expected numbers of GPUs")
        local = int(first)
    here = max(local + 1, _paddle_neighbours(rank))
    return _checked(World(rank, size, local, here, (host, int(port)), rank == 0, "commlib/paddle"))


def _paddle_neighbours(rank: int) -> int:
    """How many ranks run on this one's host, as far as the environment tells."""
    if "PADDLE_LOCAL_SIZE" in os.environ:
        return _number("PADDLE_LOCAL_SIZE")
    hosts = [endpoint.rpartition(":")[0] for endpoint in paddle_endpoints()]
    return hosts.count(hosts[rank]) if rank < len(hosts) else 1


def paddle_endpoints() -> list[str]:
    """Return the host:port of every rank in PADDLE_TRAINER_ENDPOINTS; [] when it is not set."""
    text = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
    return [one.strip() for one in text.split(",") if one.strip()]


def _text(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise BootstrapError(
            f"{name} is not set, but other rendezvous variables are; start the program with "
            f"`torchrun --nproc-per-node N program.py`, or unset RANK, WORLD_SIZE and "
            f"LOCAL_RANK to run alone"
        )
    return value


def _number(name: str) -> int:
    text = _text(name)
    if not text.isdigit():
        raise BootstrapError(f"{name}={text!r}: expected a whole number >= 0")
    return int(text)


def _checked(world: World) -> World:
    if not 0 <= world.rank < world.size:
        raise BootstrapError(
            f"rank {world.rank} with world size {world.size}: expected 0 <= rank < size; "
            f"correct RANK and WORLD_SIZE (or PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM)"
        )
    return world


# The open store of the process: it outlives shutdown(), so that a rank that is slower to close its
# rings, or faster to call init() again, always finds the same server.
_open: dict[tuple[str, int], dist.Store] = {}


def connect(world: World, deadline: Deadline) -> dist.Store:
    """Open the store of ``world``: its rank 0 serves it unless a launcher does.

    An initialised ``torch.distributed`` lends its store. Blocks at most until ``deadline``. Raises
    ``BootstrapError`` with address and port when the port is taken or nobody answers.
    """
    if world.address not in _open and dist.is_initialized():
        return dist.PrefixStore(world.prefix, dist.distributed_c10d._get_default_store())
    if world.address is None:
        raise BootstrapError("a ring of several ranks needs a rendezvous; start with torchrun")
    if world.address not in _open:
        _open[world.address] = _tcp_store(world, *world.address, deadline)
    return dist.PrefixStore(world.prefix, _open[world.address])


def _tcp_store(world: World, host: str, port: int, deadline: Deadline) -> dist.Store:
    try:
        return dist.TCPStore(
            host,
            port,
            None,
            world.hosts_store,
            timeout=deadline.timedelta(),
            wait_for_workers=False,
            multi_tenant=True,  # init_process_group("env://") may serve the same port later
        )
    except Exception as error:
        role, hint = "reach", "is rank 0 running, and are MASTER_ADDR and MASTER_PORT right?"
        if world.hosts_store:
            role, hint = "serve", "the port is taken or the host is another; change MASTER_PORT"
        raise BootstrapError(
            f"rank {world.rank} of {world.size} can't {role} the store at {host}:{port} within "
            f"{deadline.seconds:g} s: {hint} ({type(error).__name__}: {str(error).splitlines()[0]})"
        ) from error


def _all_left(room: dist.Store, size: int) -> bool:
    return room.add("left", 0) >= size


def leave(deadline: Deadline) -> None:
    """Say goodbye at exit; the rank that serves the store stays until all have, or the deadline."""
    if not _open:
        return
    here, stores = world(), list(_open.values())
    _open.clear()
    for store in stores:
        room = dist.PrefixStore(here.prefix, store)
        try:
            left = room.add("left", 1)
        except RuntimeError:
            continue  # the server has gone first; there is nobody to tell
        if here.hosts_store and left < here.size:
            deadline.poll(partial(_all_left, room, here.size))
