"""The rendezvous environment: torchrun's, Paddle's or another launcher's variables."""

import multiprocessing
import os

import torch.distributed as dist

from commlib import flags
from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.log import log
from commlib.rendezvous import program_store
from commlib.rendezvous.launchers import Launched, launched
from commlib.rendezvous.program_store import forget, leave
from commlib.rendezvous.store import BoundedStore
from commlib.rendezvous.world import World

__all__ = [
    "World",
    "connect",
    "forget",
    "joined",
    "leave",
    "paddle_endpoints",
    "run_token",
    "world",
]

_PREFIX = "commlib/run/0"


def names_rank() -> bool:
    """Return True if RANK or WORLD_SIZE is set, as by torchrun."""
    return "RANK" in os.environ or "WORLD_SIZE" in os.environ


def has(name: str) -> bool:
    """Return True if the environment has a variable of this name."""
    return name in os.environ


def world() -> World:
    """Read the rendezvous environment.

    The first source that is set decides: torchrun's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    Paddle's PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM, and PADDLE_MASTER or PADDLE_TRAINER_ENDPOINTS;
    an initialised ``torch.distributed``; the ranks of Slurm, Open MPI, MVAPICH or MPICH together
    with MASTER_ADDR and MASTER_PORT. RANK and WORLD_SIZE without an address join an initialised
    ``torch.distributed``.

    Returns:
        The position of this process; size 1 if there is no launcher.

    Raises:
        BootstrapError: The environment is incomplete, a launcher started several ranks without
            MASTER_ADDR and MASTER_PORT, or a value can't be read.
    """
    env = os.environ
    if names_rank():
        complete = bool(env.get("MASTER_ADDR") and env.get("MASTER_PORT"))
        return _initialised() if not complete and dist.is_initialized() else _torchrun()
    if "PADDLE_TRAINER_ID" in env or "PADDLE_TRAINERS_NUM" in env:
        return _paddle()
    if dist.is_initialized():
        return _initialised()
    launcher = launched(env)
    if launcher is not None and launcher.size != 1:
        return _from_launcher(launcher)
    if launcher is None and "LOCAL_RANK" in env:  # incomplete: running alone would be wrong
        return _torchrun()
    if launcher is None and multiprocessing.parent_process() is not None:
        log.warning_once(
            "%s was started by multiprocessing without a rendezvous: its rings have one rank. For "
            "several ranks set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process",
            multiprocessing.current_process().name,
        )
    return World(0, 1, None, None, None, False, "commlib")


def _initialised() -> World:
    return joined(dist.get_rank(), dist.get_world_size())


def joined(rank: int, size: int) -> World:
    """Return a place among the ranks that ``torch.distributed`` has found; they share its store."""
    return World(
        rank,
        size,
        _optional("LOCAL_RANK"),
        _optional("LOCAL_WORLD_SIZE"),
        None,
        False,
        "commlib",
    )


def _from_launcher(launcher: Launched) -> World:
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        first, second = launcher.names
        raise BootstrapError(
            f"{first}={launcher.rank} and {second}={launcher.size} show that a launcher started "
            f"{launcher.size} ranks, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; export MASTER_ADDR (the host of "
            f"rank 0) and MASTER_PORT (a free port of that host), or unset {first} and "
            f"{second} to run alone"
        )
    rank, size = launcher.rank, launcher.size
    address = _text("MASTER_ADDR"), _number("MASTER_PORT")
    local_ranks = launcher.local_rank, launcher.local_size
    return World(rank, size, *local_ranks, address, rank == 0, _PREFIX).checked()


def _torchrun() -> World:
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    host, port = _text("MASTER_ADDR"), _number("MASTER_PORT")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The agent's store outlives a restart of the workers; their keys must not.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    local_rank, local_size = _optional("LOCAL_RANK"), _optional("LOCAL_WORLD_SIZE")
    launcher = launched(os.environ)  # a job script may have exported its ranks as RANK
    if launcher is not None and (launcher.rank, launcher.size) == (rank, size):
        local_rank = launcher.local_rank if local_rank is None else local_rank
        local_size = launcher.local_size if local_size is None else local_size
    prefix, hosts_store = f"commlib/{run}/{restart}", rank == 0 and not agent
    return World(rank, size, local_rank, local_size, (host, port), hosts_store, prefix).checked()


def _paddle() -> World:
    rank, size = _number("PADDLE_TRAINER_ID"), _number("PADDLE_TRAINERS_NUM")
    master = os.environ.get("PADDLE_MASTER") or (paddle_endpoints() or [""])[0]
    host, _, port = master.rpartition(":")
    if not host or not port.isdigit():
        raise BootstrapError(
            f"PADDLE_MASTER={os.environ.get('PADDLE_MASTER')!r} and PADDLE_TRAINER_ENDPOINTS="
            f"{','.join(paddle_endpoints())!r} contain no host:port; run "
            f"`export PADDLE_MASTER=127.0.0.1:6170`"
        )
    local_rank = _number("PADDLE_LOCAL_RANK") if "PADDLE_LOCAL_RANK" in os.environ else rank
    if "FLAGS_selected_gpus" in os.environ:
        first = os.environ["FLAGS_selected_gpus"].split(",")[0]
        if not first.isdigit():
            raise BootstrapError(f"FLAGS_selected_gpus={first!r}: expected indices of GPUs")
        local_rank = int(first)
    local_size = max(local_rank + 1, _paddle_local_size(rank))
    address = host, int(port)
    world = World(rank, size, local_rank, local_size, address, rank == 0, "commlib/paddle")
    return world.checked()


def _paddle_local_size(rank: int) -> int:
    """Return the number of ranks on this rank's host; 1 if the environment does not give it."""
    if "PADDLE_LOCAL_SIZE" in os.environ:
        return _number("PADDLE_LOCAL_SIZE")
    hosts = [endpoint.rpartition(":")[0] for endpoint in paddle_endpoints()]
    return hosts.count(hosts[rank]) if rank < len(hosts) else 1


def paddle_endpoints() -> list[str]:
    """Return the host:port of every rank in PADDLE_TRAINER_ENDPOINTS; [] when it is not set."""
    text = os.environ.get("PADDLE_TRAINER_ENDPOINTS", "")
    return [endpoint.strip() for endpoint in text.split(",") if endpoint.strip()]


def _text(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise BootstrapError(
            f"{name} is not set, but other rendezvous variables are; start the program with "
            f"`torchrun --nproc-per-node N program.py`, or unset RANK, WORLD_SIZE and "
            f"LOCAL_RANK to run alone"
        )
    return value


def _optional(name: str) -> int | None:
    return _number(name) if name in os.environ else None


def _number(name: str) -> int:
    text = _text(name)
    if not text.isdigit():
        raise BootstrapError(f"{name}={text!r}: expected a whole number >= 0")
    return int(text)


def connect(world: World, deadline: Deadline) -> BoundedStore:
    """Open the store of ``world`` and return this run's keys in it (see ``program_store``)."""
    return program_store.connect(world, run_token(), _on_one_host(world), deadline)


def run_token() -> str:
    """Return the text that identifies this run: FLAGS_comm_run_token, else torchrun's run id."""
    token: str = flags.get(flags.RUN_TOKEN)
    return token or os.environ.get("TORCHELASTIC_RUN_ID", "")


def _on_one_host(world: World) -> bool:
    """Return True if all ranks run on this host and the launcher does not serve the store."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    if "PADDLE_TRAINER_ID" in env and "RANK" not in env:
        return len({endpoint.rpartition(":")[0] for endpoint in paddle_endpoints()}) == 1
    return env.get("LOCAL_WORLD_SIZE") == str(world.size)
