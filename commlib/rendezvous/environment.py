"""Where the ranks of a program find each other: torchrun's or Paddle's environment, and a store."""

import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch.distributed as dist

from commlib import flags
from commlib.deadlines import Deadline, bounded
from commlib.errors import BootstrapError, CommTimeout
from commlib.keepalive import keep_forever
from commlib.log import log
from commlib.rendezvous.launchers import Launched, launched
from commlib.rendezvous.store import BoundedStore, Connection, close_connections
from commlib.rendezvous.store import forget as forget_connections
from commlib.rendezvous.tcp_store import LOOPBACK, TcpOpening, serve

_PREFIX = "commlib/run/0"
_QUIET_S = 2.0  # ranks that end together need no line in the log


@dataclass(frozen=True)
class World:
    """The place of this process among all ranks.

    ``address`` is None for a process that is alone or that joins ``torch.distributed``. A local
    rank or size is None where the environment does not give it.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: tuple[str, int] | None
    hosts_store: bool
    prefix: str


def world() -> World:
    """Read the rendezvous environment.

    The first that is there decides: torchrun's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT;
    Paddle's PADDLE_TRAINER_ID, PADDLE_TRAINERS_NUM, and PADDLE_MASTER or PADDLE_TRAINER_ENDPOINTS;
    an initialised ``torch.distributed``; the ranks of Slurm, Open MPI, MVAPICH or MPICH together
    with MASTER_ADDR and MASTER_PORT. RANK and WORLD_SIZE without an address join an initialised
    ``torch.distributed``.

    Returns:
        This process's place; size 1 if no launcher shows.

    Raises:
        BootstrapError: Half of an environment is there, a launcher started several ranks without
            MASTER_ADDR and MASTER_PORT, or a value can't be read.
    """
    env = os.environ
    if "RANK" in env or "WORLD_SIZE" in env:
        complete = bool(env.get("MASTER_ADDR") and env.get("MASTER_PORT"))
        return _joined() if not complete and dist.is_initialized() else _torchrun()
    if "PADDLE_TRAINER_ID" in env or "PADDLE_TRAINERS_NUM" in env:
        return _paddle()
    if dist.is_initialized():
        return _joined()
    launcher = launched(env)
    if launcher is not None and launcher.size != 1:
        return _from_launcher(launcher)
    if launcher is None and "LOCAL_RANK" in env:  # half an environment: running alone is wrong
        return _torchrun()
    if launcher is None and multiprocessing.parent_process() is not None:
        log.warning_once(
            "%s was started by multiprocessing without a rendezvous: its rings have one rank. For "
            "several ranks set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process",
            multiprocessing.current_process().name,
        )
    return World(0, 1, None, None, None, False, "commlib")


def _joined() -> World:
    """Return the ranks of an initialised ``torch.distributed``, which lends its store."""
    return World(
        dist.get_rank(),
        dist.get_world_size(),
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
            f"rank 0) and MASTER_PORT (a free port there), or unset {first} and {second} to run "
            f"alone"
        )
    rank, size = launcher.rank, launcher.size
    address = _text("MASTER_ADDR"), _number("MASTER_PORT")
    places = launcher.local_rank, launcher.local_size
    return _checked(World(rank, size, *places, address, rank == 0, _PREFIX))


def _torchrun() -> World:
    rank, size = _number("RANK"), _number("WORLD_SIZE")
    host, port = _text("MASTER_ADDR"), _number("MASTER_PORT")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # The agent's store outlives a restart of the workers; their keys must not.
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    local, here = _optional("LOCAL_RANK"), _optional("LOCAL_WORLD_SIZE")
    launcher = launched(os.environ)  # whose ranks a job script may have exported as RANK
    if launcher is not None and (launcher.rank, launcher.size) == (rank, size):
        local = launcher.local_rank if local is None else local
        here = launcher.local_size if here is None else here
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
    """Return how many ranks run on this host, as far as the environment shows it."""
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


def _optional(name: str) -> int | None:
    return _number(name) if name in os.environ else None


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


# The connections of the process by address. They outlive shutdown(), so that a rank that is slower
# to close its rings, or faster to call init() again, always finds the same server.
_open: dict[tuple[str, int], BoundedStore] = {}
_served: dict[tuple[str, int], dist.Store] = {}
_rooms: dict[tuple[str, int], tuple[World, BoundedStore]] = {}  # this run's part of them
_LAST_S = 1.0  # for operations in flight on connections that are closed at the exit
_LOOK_S = 0.05  # how often a wait for the lock looks whether its deadline was cancelled
_lock = threading.Lock()  # held from the look into the tables until the entry is there


def connect(world: World, deadline: Deadline) -> BoundedStore:
    """Open the store of ``world``: its rank 0 serves it unless a launcher does.

    An initialised ``torch.distributed`` lends its store. Blocks at most until ``deadline``.

    Raises:
        BootstrapError: the port is taken, the host is unknown, no server answers, or the store
            belongs to a run with another token.
    """
    token = run_token()
    if world.address not in _open and dist.is_initialized():
        root = BoundedStore.of(dist.distributed_c10d._get_default_store())
        return _checked_run(root, world, token, deadline)
    if world.address is None:
        raise BootstrapError("a ring of several ranks needs a rendezvous; start with torchrun")
    with _locked(world, deadline):
        if world.address not in _open:
            _open[world.address] = _tcp_store(world, *world.address, deadline)
        root = _open[world.address]
    room = _checked_run(root, world, token, deadline)
    _rooms[world.address] = world, room
    return room


@contextmanager
def _locked(world: World, deadline: Deadline) -> Iterator[None]:
    """Hold the lock of the tables; another thread may have it until its own deadline."""
    lock = _lock
    while not lock.acquire(timeout=min(deadline.left(), _LOOK_S)):
        if deadline.passed():
            raise BootstrapError(
                f"rank {world.rank} of {world.size}: another thread of this process was still "
                f"opening a store after {deadline.seconds:g} s"
            )
    try:
        yield
    finally:
        lock.release()


def run_token() -> str:
    """Return the identity of this run: FLAGS_comm_run_token, else torchrun's run id."""
    given: str = flags.get(flags.RUN_TOKEN)
    return given or os.environ.get("TORCHELASTIC_RUN_ID", "")


def _checked_run(root: BoundedStore, world: World, token: str, deadline: Deadline) -> BoundedStore:
    """Return this run's part of the store; the first rank names the run, the others compare."""
    root.connection.revive()
    first = root.compare_set("commlib/run", "", f"run {token}", deadline).removeprefix("run ")
    if first != token:
        raise BootstrapError(
            f"rank {world.rank} of {world.size}: the store at {root.connection.where} belongs to "
            f"run {first!r}, this rank to run {token!r}: another program uses the same address. "
            f"Change MASTER_PORT, or set {flags.RUN_TOKEN} to the same text on every rank"
        )
    return root.under(f"{world.prefix}/{token}")


def _tcp_store(world: World, host: str, port: int, deadline: Deadline) -> BoundedStore:
    who = f"rank {world.rank} of {world.size}"
    if _on_one_host(world):
        host = LOOPBACK
    if world.hosts_store and (host, port) not in _served:
        what = f"serving the store at {host}:{port}"
        try:
            server = bounded(lambda: serve(host, port, who, deadline), deadline, what)
        except CommTimeout as error:
            raise BootstrapError(f"{who}: {error}; is MASTER_ADDR={host!r} known here?") from error
        _served[host, port] = server
    return BoundedStore(Connection(TcpOpening(host, port, who), f"{host}:{port}"))


def _on_one_host(world: World) -> bool:
    """Return True if the launcher says that all ranks are here and that none of its own serves."""
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    if "PADDLE_TRAINER_ID" in env and "RANK" not in env:
        return len({one.rpartition(":")[0] for one in paddle_endpoints()}) == 1
    return env.get("LOCAL_WORLD_SIZE") == str(world.size)


def leave(deadline: Deadline, *, wait: bool) -> None:
    """Report the exit of this rank to the others.

    Args:
        deadline: The longest wait.
        wait: Whether a rank that serves the store stays until all others have left.
    """
    for world, room in _rooms.values():
        if not world.hosts_store and not room.connection.answers():
            continue  # the server left first
        try:
            room.set(f"left/{world.rank}", "1", deadline)
            if room.add("left", 1, deadline) == world.size:
                room.set("all left", "1", deadline)
            elif wait and world.hosts_store:
                _wait_for_others(world, room, deadline)
        except BootstrapError:
            where = room.connection.where
            log.once("the process that serves the store at %s ended first", where)
    close_connections(_LAST_S)
    for table in (_open, _rooms, _served):
        table.clear()


def _wait_for_others(world: World, room: BoundedStore, deadline: Deadline) -> None:
    left = partial(room.check, ["all left"], deadline)
    if Deadline(min(_QUIET_S, deadline.seconds)).poll(left, longest_sleep=0.05):
        return
    late = [rank for rank in range(world.size) if not room.check([f"left/{rank}"], deadline)]
    log.warning("waiting for ranks %s to leave, at most %g s", late, deadline.seconds)
    deadline.poll(left, longest_sleep=0.05)


def forget() -> None:
    """Give up every store in a forked child, without using or closing a socket."""
    global _lock
    keep_forever(dict(_served), dict(_open), dict(_rooms))
    _lock = threading.Lock()  # another thread of the parent may have held the old one
    forget_connections()
    for table in (_open, _rooms, _served):
        table.clear()
