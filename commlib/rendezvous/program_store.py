"""The store of a program: opened once per address, checked for the run, and left at the exit."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist

from commlib import flags
from commlib.deadlines import Deadline, bounded
from commlib.errors import BootstrapError, CommTimeout
from commlib.keepalive import keep_forever
from commlib.log import log
from commlib.rendezvous.connection import Connection, close_connections
from commlib.rendezvous.connection import forget as forget_connections
from commlib.rendezvous.store import BoundedStore
from commlib.rendezvous.tcp_store import LOOPBACK, TcpOpening, serve
from commlib.rendezvous.world import World

Address = tuple[str, int]

# These tables outlive shutdown(). So a rank that is slower to close its rings, or faster to call
# init() again, always finds the same server.
_stores: dict[Address, BoundedStore] = {}
_servers: dict[Address, dist.Store] = {}
_run_stores: dict[Address, tuple[World, BoundedStore]] = {}  # the keys of this run
_lock = threading.Lock()  # held from the look-up in a table until its entry is stored

_QUIET_S = 2.0  # Ranks that exit together need no line in the log.
_CLOSE_S = 1.0  # Queued operations have this long when the connections are closed at the exit.
_POLL_S = 0.05  # A wait for the lock checks this often whether its deadline was cancelled.


def connect(world: World, token: str, one_host: bool, deadline: Deadline) -> BoundedStore:
    """Open the store of ``world`` and return this run's keys in it.

    An initialised ``torch.distributed`` shares its store. Otherwise rank 0 serves the store unless
    a launcher does. Blocks at most until ``deadline``.

    Args:
        world: This process's position.
        token: The text that distinguishes this run from others.
        one_host: True if all ranks run on this host, so that the store is served on loopback.
        deadline: The latest end.

    Raises:
        BootstrapError: The port is taken, the host is unknown, no server answers, or the store
            belongs to a run with another token.
    """
    if world.address not in _stores and dist.is_initialized():
        root = BoundedStore.of(dist.distributed_c10d._get_default_store())
        return _run_store(root, world, token, deadline)
    if world.address is None:
        raise BootstrapError("a ring of several ranks needs a rendezvous; start with torchrun")
    with _locked(world, deadline):
        if world.address not in _stores:
            _stores[world.address] = _tcp_store(world, world.address, one_host, deadline)
        root = _stores[world.address]
    store = _run_store(root, world, token, deadline)
    _run_stores[world.address] = world, store
    return store


@contextmanager
def _locked(world: World, deadline: Deadline) -> Iterator[None]:
    """Hold the lock of the tables; another thread may hold it until its own deadline."""
    lock = _lock
    while not lock.acquire(timeout=min(deadline.left(), _POLL_S)):
        if deadline.passed():
            raise BootstrapError(
                f"rank {world.rank} of {world.size}: another thread of this process was still "
                f"opening a store after {deadline.seconds:g} s"
            )
    try:
        yield
    finally:
        lock.release()


def _run_store(root: BoundedStore, world: World, token: str, deadline: Deadline) -> BoundedStore:
    """Return this run's keys; the first rank stores the run's token, the others compare theirs."""
    root.connection.revive()
    first = root.compare_set("commlib/run", "", f"run {token}", deadline).removeprefix("run ")
    if first != token:
        raise BootstrapError(
            f"rank {world.rank} of {world.size}: the store at {root.connection.where} belongs to "
            f"run {first!r}, this rank to run {token!r}: another program uses the same address. "
            f"Change MASTER_PORT, or set {flags.RUN_TOKEN} to the same text on every rank"
        )
    return root.under(f"{world.prefix}/{token}")


def _tcp_store(world: World, address: Address, one_host: bool, deadline: Deadline) -> BoundedStore:
    host, port = address
    who = f"rank {world.rank} of {world.size}"
    if one_host:
        host = LOOPBACK
    if world.hosts_store and (host, port) not in _servers:
        label = f"serving the store at {host}:{port}"
        try:
            server = bounded(lambda: serve(host, port, who, deadline), deadline, label)
        except CommTimeout as error:
            raise BootstrapError(f"{who}: {error}; is MASTER_ADDR={host!r} known here?") from error
        _servers[host, port] = server
    connection = Connection(TcpOpening(host, port, who), f"{host}:{port}")
    connection.hold()  # for later rings, until the exit
    return BoundedStore(connection)


def leave(deadline: Deadline, *, wait: bool) -> None:
    """Report the exit of this rank to the others and close all connections.

    Args:
        deadline: The longest wait.
        wait: True if a rank that serves the store waits until all others have left.
    """
    for world, store in _run_stores.values():
        if not world.hosts_store and not store.connection.answers():
            continue  # the server left first
        try:
            store.set(f"left/{world.rank}", "1", deadline)
            if store.add("left", 1, deadline) == world.size:
                store.set("all left", "1", deadline)
            elif wait and world.hosts_store:
                _wait_for_others(world, store, deadline)
        except BootstrapError:
            address = store.connection.where
            log.once("the process that serves the store at %s ended first", address)
    close_connections(_CLOSE_S)
    _clear()


def _wait_for_others(world: World, store: BoundedStore, deadline: Deadline) -> None:
    left = partial(store.check, ["all left"], deadline)
    if Deadline(min(_QUIET_S, deadline.seconds)).poll(left, longest_sleep=0.05):
        return
    late = [rank for rank in range(world.size) if not store.check([f"left/{rank}"], deadline)]
    log.warning("waiting for ranks %s to leave, at most %g s", late, deadline.seconds)
    deadline.poll(left, longest_sleep=0.05)


def forget() -> None:
    """Drop every store in a forked child, without using or closing a socket."""
    global _lock
    keep_forever(dict(_servers), dict(_stores), dict(_run_stores))
    _lock = threading.Lock()  # another thread of the parent may have held the old one
    forget_connections()
    _clear()


def _clear() -> None:
    for table in (_stores, _run_stores, _servers):
        table.clear()
