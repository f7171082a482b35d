"""Two hosts for one test: network namespaces with a veth link, or loopback twice."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """The host of one node: its command prefix, address and network interface."""

    prefix: tuple[str, ...]
    address: str
    interface: str


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True, timeout=20).returncode == 0


def _joined(names: tuple[str, str]) -> bool:
    """Create two namespaces and a link between them; return False if the machine forbids it."""
    first, second = names
    link = ("link", "add", "eth0", "netns", first, "type", "veth")
    if not (_ip("netns", "add", first) and _ip("netns", "add", second)):
        return False
    if not _ip(*link, "peer", "name", "eth0", "netns", second):
        return False
    return all(
        _ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
        and _ip("-n", name, "link", "set", "lo", "up")
        and _ip("-n", name, "link", "set", "eth0", "up")
        for number, name in enumerate(names, 1)
    )


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Yield two hosts, and remove them after the test."""
    names = (f"commlib-a-{os.getpid()}", f"commlib-b-{os.getpid()}")
    try:
        if shutil.which("ip") and _joined(names):
            inside = ("ip", "netns", "exec")
            yield (
                Host((*inside, names[0]), "10.77.0.1", "eth0"),
                Host((*inside, names[1]), "10.77.0.2", "eth0"),
            )
        else:
            yield Host((), "127.0.0.1", "lo"), Host((), "127.0.0.1", "lo")
    finally:
        if shutil.which("ip"):
            for name in names:
                _ip("netns", "delete", name)
