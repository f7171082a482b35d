"""Operations of the rendezvous store: each ends within its deadline with any server."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.rendezvous.clone_opening import CloneOpening
from commlib.rendezvous.connection import Connection
from commlib.rendezvous.store import BoundedStore
from commlib.rendezvous.tcp_store import TcpOpening, addresses, serve
from tests.support.checks import assert_equal, raises, until
from tests.support.ports import free_port

_SERVER = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@contextmanager
def server() -> Iterator[tuple[int, int]]:
    """Yield the port and the process id of a store in a separate process."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.communicate()


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped."""

    def states() -> set[str]:
        stats = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return {stat.rpartition(") ")[2][0] for stat in stats}

    os.kill(pid, signal.SIGSTOP)
    until(lambda: states() == {"T"}, "every thread has stopped")


def opened(port: int, host: str = "127.0.0.1") -> BoundedStore:
    return BoundedStore(Connection(TcpOpening(host, port, "rank 1 of 2"), f"{host}:{port}"))


def test_operations() -> None:
    store, soon = BoundedStore.of(HashStore()).under("a"), Deadline(10)
    store.set("x", "1", soon)
    assert_equal(store.get("x", soon), b"1")
    assert_equal([store.add("n", 2, soon), store.add("n", 0, soon)], [2, 2])
    store.append("log", "a", soon)
    store.append("log", "b", soon)
    assert_equal(store.multi_get(["x", "log"], soon), [b"1", b"ab"])
    assert_equal([store.check(["x"], soon), store.check(["y"], soon)], [True, False])
    assert_equal([store.compare_set("v", "", old, soon) for old in ("1", "2")], ["1", "1"])
    assert_equal([store.wait(["x"], soon), store.wait(["y"], Deadline(0.1))], [True, False])
    for _ in range(2):
        store.delete_after("left", 2, ["x", "n", "log", "v"])
    until(lambda: store.num_keys() == 0, "the second call deletes all")
    store.connection.close(5)
    with raises(BootstrapError, "is closed"):
        store.get("x", soon)


def test_stopped_server() -> None:
    """Each operation ends at its deadline; after that, a revived connection works."""
    with server() as (port, pid):
        store = opened(port)
        store.set("x", "1", Deadline(30))
        stop(pid)
        try:
            begin = time.monotonic()
            with raises(BootstrapError, f"127.0.0.1:{port}", "get(x)", "within 1 s", "stopped"):
                store.get("x", Deadline(1))
            with raises(BootstrapError, "get(x)"):  # at once: the connection is faulty
                store.set("y", "1", Deadline(30))
            store.connection.revive()
            with raises(BootstrapError, "set(y)", "within 1 s"):
                store.set("y", "1", Deadline(1))
            assert time.monotonic() - begin < 25
        finally:
            os.kill(pid, signal.SIGCONT)
        store.connection.revive()
        assert_equal(store.get("x", Deadline(30)), b"1", "after the server continues")


_CLIENT = """
import sys
from commlib.deadlines import Deadline
from tests.test_store import opened
store = opened(int(sys.argv[1]))
store.set("here", "1", Deadline(60))
print("found x:", store.wait(["x"], Deadline(3)), flush=True)
"""


def test_a_client_that_the_host_stops_past_its_deadline() -> None:
    """The client waits for the answer after it was stopped, and does not blame the store."""
    with server() as (port, _):
        client = subprocess.Popen(
            [sys.executable, "-c", _CLIENT, str(port)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert opened(port).wait(["here"], Deadline(60))
            time.sleep(0.5)
            stop(client.pid)
            time.sleep(5)
            os.kill(client.pid, signal.SIGCONT)
            assert_equal(client.communicate(timeout=60)[0], "found x: False\n")
        finally:
            client.kill()
            client.communicate()


def test_server_that_ends() -> None:
    with server() as (port, pid):
        store = opened(port)
        store.set("x", "1", Deadline(30))
        os.kill(pid, signal.SIGKILL)
        with raises(BootstrapError, f"127.0.0.1:{port}", "is the process that serves it alive?"):
            for _ in range(100):  # the first request may still be sent
                store.get("x", Deadline(10))


def test_silent_port() -> None:
    """A port that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store, begin = opened(silent.getsockname()[1]), time.monotonic()
        words = "the port is open", "may not be a rendezvous store", "within 1 s"
        with raises(BootstrapError, *words):
            store.get("x", Deadline(1))
        assert time.monotonic() - begin < 25


def test_unknown_host() -> None:
    begin = time.monotonic()
    with raises(BootstrapError, "rank 1 of 2", "the host 'no.such.host.invalid'", "MASTER_ADDR"):
        opened(1, "no.such.host.invalid").get("x", Deadline(1))
    with raises(BootstrapError, "the host 'no.such.host.invalid' is unknown", "MASTER_ADDR"):
        serve("no.such.host.invalid", 1, "rank 0 of 2", Deadline(1))
    assert time.monotonic() - begin < 20


def test_a_resolver_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    ended, resolve = threading.Event(), socket.getaddrinfo

    def stuck(host: str, *args: Any, **kwargs: Any) -> Any:
        if host == "stuck.invalid":
            ended.wait(60)
        return resolve(host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", stuck)
    words = "rank 1 of 2", "looking up the host 'stuck.invalid'", "MASTER_ADDR", "within 1 s"
    try:
        with raises(BootstrapError, *words):
            opened(1, "stuck.invalid").get("x", Deadline(1))
    finally:
        ended.set()


def test_a_client_waits_for_a_server_that_starts_later(capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    got: list[bytes] = []
    store = opened(port)
    client = threading.Thread(target=lambda: got.append(store.get("x", Deadline(60))))
    client.start()
    until(lambda: "connecting" in store.connection._opening.stage)
    ours = serve("127.0.0.1", port, "rank 0 of 2", Deadline(30))
    ours.set("x", "1")
    client.join(60)
    assert_equal(got, [b"1"])
    noise = capfd.readouterr().err
    assert "frame #" not in noise and "failed to connect" not in noise, noise


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_loopback_alone_listens(host: str) -> None:
    port = free_port()
    store = serve(host, port, "rank 0 of 2", Deadline(30))
    assert addresses(host, port)[0][1][0] == "127.0.0.1"
    with socket.create_connection(("127.0.0.1", port), 10):
        pass
    with pytest.raises(OSError, match="refused"):  # another loopback address
        socket.create_connection(("127.0.0.2", port), 10)
    assert isinstance(store, TCPStore)


def test_a_name_with_a_loopback_address_on_its_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks of other hosts know this host by another address."""
    resolve = socket.getaddrinfo

    def debian(host: str, *args: Any, **kwargs: Any) -> Any:
        return resolve("127.0.1.1" if host == "node0.invalid" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", debian)
    store: Any = serve("node0.invalid", 0, "rank 0 of 2", Deadline(30))
    for address in ("127.0.1.1", "127.0.0.2"):
        with socket.create_connection((address, store.port), 10):
            pass
    opened(store.port, "node0.invalid").set("x", "1", Deadline(30))


def test_a_connection_that_meets_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has the port of a server that is not there yet connects to itself."""
    port = free_port()
    connect = socket.socket.connect

    def from_there(self: socket.socket, address: Any) -> None:
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.bind(("127.0.0.1", port))
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", from_there)
    with raises(BootstrapError, "Connection refused: is rank 0 running"):
        opened(port).get("x", Deadline(1))


def test_a_server_that_has_ended_is_noticed_without_a_request(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with server() as (port, pid):
        store = opened(port)
        connection = store.connection
        assert_equal(connection.answers(), False, "before the first request")
        store.set("x", "1", Deadline(30))
        assert_equal(connection.answers(), True, "while it lives")
        os.kill(pid, signal.SIGKILL)
        until(lambda: not connection.answers(), "the kernel has ended the connection")
        store.delete(["x"])
        connection.close(10)
    noise = capfd.readouterr().err
    assert "frame #" not in noise, noise


def test_the_last_user_closes_the_connection() -> None:
    """It frees the store, whose server ends with the last reference, and ends the thread."""
    base = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    port, store = base.port, BoundedStore.of(PrefixStore("a", base))
    del base
    connection, thread = store.connection, store.connection._thread
    connection.hold()
    connection.hold()
    store.delete_after("left", 2, [])  # a queued operation holds no connection
    connection.release(10)
    store.set("x", "1", Deadline(10))
    assert_equal(connection.answers(), True, "with one user")
    connection.release(10)
    assert_equal((thread.is_alive(), connection.answers()), (False, False), "without users")
    with raises(OSError), socket.create_connection(("127.0.0.1", port), 5):
        pass
    with raises(BootstrapError, "is closed"):
        store.set("x", "1", Deadline(10))


def test_a_clone_notices_that_the_server_has_ended() -> None:
    with server() as (port, pid):
        client = TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        store = BoundedStore.of(PrefixStore("a", PrefixStore("b", client)))
        store.set("x", "1", Deadline(30))
        assert_equal(store.connection.answers(), True, "while it lives")
        os.kill(pid, signal.SIGKILL)
        until(lambda: not store.connection.answers(), "the kernel has ended the connection")
        store.connection.close(10)


def test_rings_of_one_store_watch_its_server_together() -> None:
    """A server needs one more socket for each rank, and none for each ring."""
    port, watching = free_port(), []
    for _ in range(2):  # the second server takes the port of the first one
        base = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)
        openings = [CloneOpening(PrefixStore(f"ring {i}", base)) for i in range(3)]
        clones = [opening(Deadline(30)) for opening in openings]
        assert_equal(len({id(opening._idle) for opening in openings}), 1, "idle sockets")
        assert all(opening.answers() for opening in openings)
        watching.append(openings[0])
        del base, clones, openings
        watching[-1].store = None
        until(lambda: not watching[-1].answers(), "the server has ended")
    assert watching[0]._idle is not watching[1]._idle


def test_forget() -> None:
    """In a forked child, no operation reaches the parent's server."""
    code = """
import os, sys
from torch.distributed import HashStore
from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.rendezvous.connection import forget
from commlib.rendezvous.store import BoundedStore
store = BoundedStore.of(HashStore())
store.set("x", "1", Deadline(10))
child = os.fork()
if child == 0:
    forget()
    try:
        store.get("x", Deadline(1))
    except BootstrapError as error:
        sys.exit(0 if "parent of this forked process" in str(error) else 1)
    sys.exit(2)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), store.get("x", Deadline(10)))
"""
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert_equal(out.stdout, "0 b'1'\n", out.stderr)
