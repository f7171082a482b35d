"""Stores that tests serve themselves."""

from typing import Any

from commlib.deadlines import Deadline
from commlib.rendezvous.tcp_store import LOOPBACK, serve


def loopback_store() -> Any:
    """Serve a TCP store on a free port of this host's IPv4 loopback.

    torch's own server listens on IPv6, too. It then sees each client at an address that only a name
    server could know, asks that for the name, and answers nobody meanwhile.
    """
    return serve(LOOPBACK, 0, "the tests", Deadline(600))
