"""The TCP store of a program: rank 0 or the launcher serves it, and every rank connects to it."""

import ipaddress
import os
import socket
import threading
import time
from contextlib import suppress
from errno import ECONNREFUSED
from typing import Any

import torch.distributed as dist

from commlib.deadlines import Deadline
from commlib.errors import BootstrapError

LOOPBACK = "127.0.0.1"
_LONGEST_PAUSE_S = 1.0
_LOOPBACK_NAMES = {"localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback"}
# A host that has lost its power ends no connection: after 5 s of silence three questions, one a
# second.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}  # where the system has them


class IdleSocket:
    """A connection to a server on which nothing is sent or received.

    The kernel ends it after the server's process and its forked children. A connection per question
    would cost more, because torch's server looks up the name of each client, and answers nobody
    else meanwhile.
    """

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()  # several connections may open at the same time

    @property
    def connected(self) -> bool:
        """Return True if the server was reached, also where it has ended since."""
        return self._socket is not None

    def connect(self, family: socket.AddressFamily, address: Any, deadline: Deadline) -> None:
        """Connect, and close an earlier socket."""
        new = _connected(family, address, deadline)
        with self._lock:
            last, self._socket = self._socket, new
        if last is not None:
            last.close()

    def peer(self) -> str:
        """Return the numeric address of the server that was reached; empty if it has ended."""
        idle = self._socket
        if idle is None:
            return ""
        try:
            with suppress(BlockingIOError):  # there is nothing to read
                if not idle.recv(1, socket.MSG_PEEK):
                    return ""
            return str(idle.getpeername()[0])
        except OSError:
            return ""

    def __del__(self) -> None:
        if self._socket is not None:
            self._socket.close()


class TcpOpening:
    """Connect to the TCP store at ``host:port``; the deadline includes the host look-up.

    ``who`` is the prefix of error messages. torch's client prints a stack trace for each attempt
    that finds no server, so a plain socket tries first. It stays open.
    """

    def __init__(self, host: str, port: int, who: str) -> None:
        self.host, self.port, self.who = host, port, who
        self.stage = ""
        self._idle = IdleSocket()

    def __call__(self, deadline: Deadline) -> dist.Store:
        """Connect within the deadline."""
        address = self._idle.peer() or self._reach(deadline)
        self.stage = (
            f"{self.who} was waiting for an answer to its first request: the port is open, but "
            "its server may not be a rendezvous store; check MASTER_ADDR and MASTER_PORT"
        )
        try:
            store = dist.TCPStore(
                address,
                self.port,
                None,
                False,
                timeout=deadline.timedelta(),
                wait_for_workers=False,
            )
        except Exception as error:
            reason = str(error).partition("\n")[0]
            raise self._error(
                deadline,
                f"the server of that port is not a rendezvous store, or has exited ({reason})",
            ) from error
        self.stage = ""
        return store

    def answers(self) -> bool:
        """Return True if the server was reached and its process has not ended since."""
        return bool(self._idle.peer())

    def _reach(self, deadline: Deadline) -> str:
        """Wait until the server accepts a connection; return its numeric address."""
        pause, reason = 0.01, "nothing was tried"
        while True:
            self.stage = f"{self.who} was looking up the host {self.host!r}; check MASTER_ADDR"
            try:
                candidates = addresses(self.host, self.port)
                self.stage = f"{self.who} was connecting"
                for family, address in candidates:
                    try:
                        self._idle.connect(family, address, deadline)
                        return str(address[0])
                    except OSError as error:
                        reason = f"{error.strerror or error}: is rank 0 running"
            except socket.gaierror as error:
                reason = f"the host {self.host!r} is unknown ({error.strerror})"
            if deadline.left() <= pause:
                time.sleep(deadline.left())
                hint = "are MASTER_ADDR and MASTER_PORT right?"
                raise self._error(deadline, f"{reason}, and {hint}")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _error(self, deadline: Deadline, reason: str) -> BootstrapError:
        return BootstrapError(
            f"{self.who} can't reach the store at {self.host}:{self.port} within "
            f"{deadline.seconds:g} s: {reason}"
        )


def _connected(family: socket.AddressFamily, address: Any, deadline: Deadline) -> socket.socket:
    """Return a connected socket that never blocks."""
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, deadline.left()))
        connection.connect(address)
        if connection.getsockname() == connection.getpeername():  # no server: it met itself
            raise ConnectionRefusedError(ECONNREFUSED, os.strerror(ECONNREFUSED))
        connection.setblocking(False)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name in _KEEPALIVE.keys() & vars(socket).keys():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), _KEEPALIVE[name])
    except OSError:
        connection.close()
        raise
    return connection


def addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    """Return family and socket address of every address of ``host``, IPv4 first."""
    rows = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    pairs = {(family, address) for family, _, _, _, address in rows}
    return sorted(pairs, key=lambda pair: (pair[0] != socket.AF_INET, str(pair[1])))


def serve(host: str, port: int, who: str, deadline: Deadline) -> dist.Store:
    """Serve a TCP store on ``port``: on loopback if ``host`` says so, else on all addresses.

    The name of a host may have a loopback address on that host alone, as on Debian; its other names
    and the ranks of other hosts need the rest.

    Raises:
        BootstrapError: The port is taken, or the host is unknown.
    """
    try:
        listening, address = _listen(host, addresses(host, port), port)
    except socket.gaierror as error:
        raise BootstrapError(
            f"{who} can't serve the store at {host}:{port}: the host {host!r} is unknown "
            f"({error.strerror}); correct MASTER_ADDR"
        ) from error
    except OSError as error:
        raise BootstrapError(
            f"{who} can't serve the store at {host}:{port}: {error.strerror or error}: the port is "
            f"taken or the host is another one; change MASTER_PORT"
        ) from error
    return dist.TCPStore(
        address,
        port,
        None,
        True,
        timeout=deadline.timedelta(),
        wait_for_workers=False,
        multi_tenant=True,  # init_process_group("env://") may serve the same port later
        master_listen_fd=listening.detach(),
    )


def _listen(
    host: str, candidates: list[tuple[socket.AddressFamily, Any]], port: int
) -> tuple[socket.socket, str]:
    """Return a bound socket, and the address at which this host reaches it."""
    if _is_loopback(host):
        family, address = candidates[0]
        return _bound(family, address), str(address[0])
    if socket.has_dualstack_ipv6():
        return _bound(socket.AF_INET6, ("::", port)), LOOPBACK
    return _bound(socket.AF_INET, ("", port)), LOOPBACK


def _bound(family: socket.AddressFamily, address: Any) -> socket.socket:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            only = address[0] != "::"
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(only))
        listening.bind(address)
    except OSError:
        listening.close()
        raise
    return listening


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() in _LOOPBACK_NAMES
