"""An interpreter that starts fast: ``warm_server.py`` forks the program from a loaded process.

``processes.py`` writes an executable from this file, which imports the standard library alone. The
arguments, the environment, the folder, the network and the standard streams are this process's;
signals reach the program, and its exit status becomes this process's.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def main() -> None:
    """Ask for the program, and end as it does."""
    server = socket.socket(socket.AF_UNIX)
    server.connect(os.environ["COMMLIB_WARM_SERVER"])
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)  # until there is a program
    request = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "client": os.getpid(),
    }
    data = json.dumps(request).encode()
    socket.send_fds(server, [struct.pack("!I", len(data))], [0, 1, 2])
    server.sendall(data)
    (pid,) = struct.unpack("!i", server.recv(4, socket.MSG_WAITALL))
    for forwarded in FORWARDED:
        signal.signal(forwarded, lambda number, frame: _forward(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    (status,) = struct.unpack("!i", server.recv(4, socket.MSG_WAITALL))
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _forward(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended; its status is on the way
        os.kill(pid, number)


if __name__ == "__main__":
    main()
