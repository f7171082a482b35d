"""Ports for programs that need one before anybody listens there."""

import itertools
import os
import random
import socket
from pathlib import Path

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST, EACH = 16384, 256
_taken = itertools.count(random.randrange(EACH))


def free_port() -> int:
    """Return a port that nobody serves, and that the system gives to nobody by itself.

    A port of the system's own range may become the end of any other connection before the program
    listens on it. Each worker of pytest-xdist has its own ports.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    system = int(RANGE.read_text().split()[0]) if RANGE.exists() else 49152
    shares = (system - FIRST) // EACH
    for _ in range(EACH):
        port = FIRST + worker % shares * EACH + next(_taken) % EACH
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError(f"all {EACH} ports of worker {worker} from {FIRST} on are in use")
