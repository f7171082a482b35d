"""A busy host: one process per core that does nothing but spin."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# Ends by itself when its parent has ended, so that none is left after a rank that was killed.
SPIN = "import os, sys\nwhile os.getppid() == int(sys.argv[1]): pass"


@contextmanager
def busy_host() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Keep every core that this process may use busy; gives the processes that do."""
    command = [sys.executable, "-S", "-c", SPIN, str(os.getpid())]
    spinning = [subprocess.Popen(command) for _ in os.sched_getaffinity(0)]
    try:
        yield spinning
    finally:
        for process in spinning:
            process.kill()
        for process in spinning:
            process.wait()
