"""Fork programs from a process that has imported torch; ``warm_client.py`` asks for them.

A program is ``-c CODE``, ``-m MODULE`` or a file, as for Python itself. It runs in a child that
leaves this module's loop first, so it ends through the interpreter's own exit: exit handlers,
threads, destructors. The objects and static destructors of the libraries that are loaded here,
0.25 s, are taken down where the environment has ``COMMLIB_WHOLE_EXIT``. Nothing of commlib is
loaded here.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import struct
import sys
import types
import warnings
import weakref
from typing import Any

CLONE_NEWNET = 0x40000000  # of linux/sched.h
# Most programs compile something; an exit with these modules loaded takes 0.1 s longer.
LOADED = ("torch", "torch.distributed", "numpy", "tests.support.compiler", "tests.support.torchrun")


class Server:
    """Accepts requests at a socket and forks a child for each, until its standard input ends."""

    def __init__(self, path: str) -> None:
        self._programs: dict[int, socket.socket] = {}
        self._waiting = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(path)
        self._listener.listen(64)
        self._ended, self._wakeup = socket.socketpair()
        self._ended.setblocking(False)
        self._wakeup.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._wakeup.fileno())
        for source in (self._listener, self._ended, sys.stdin):
            self._waiting.register(source, selectors.EVENT_READ)

    def run(self) -> dict[str, Any]:
        """Serve; return a request in the child that is to become its program."""
        while True:
            for key, _ in self._waiting.select():
                if key.fileobj is sys.stdin:
                    self._kill(list(self._programs))
                    os._exit(0)
                elif key.fileobj is self._ended:
                    self._ended.recv(4096)
                    self._report_ended()
                elif key.fileobj is self._listener:
                    request = self._accept()
                    if request is not None:
                        return request
                else:  # the client was killed: its program must not outlive it
                    self._kill([p for p, c in self._programs.items() if c is key.fileobj])
                    self._waiting.unregister(key.fileobj)

    def _accept(self) -> dict[str, Any] | None:
        """Fork for one client; return its request in the child, None in the server."""
        client, _ = self._listener.accept()
        head, streams, _, _ = socket.recv_fds(client, 4, 3)
        (length,) = struct.unpack("!I", head)
        request: dict[str, Any] = json.loads(client.recv(length, socket.MSG_WAITALL))
        pid = os.fork()
        if pid == 0:
            self._leave(streams)
            return request
        for stream in streams:
            os.close(stream)
        self._programs[pid] = client
        self._waiting.register(client, selectors.EVENT_READ)
        _send(client, pid)
        return None

    def _leave(self, streams: list[int]) -> None:
        """Keep nothing of the server in a child, except what it has loaded."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        sources = [key.fileobj for key in self._waiting.get_map().values()]
        self._waiting.close()
        for source in (*sources, self._wakeup):
            if source is not sys.stdin:
                source.close()  # type: ignore[union-attr]  # a socket

    def _report_ended(self) -> None:
        while self._programs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            client = self._programs.pop(pid)
            if client in [key.fileobj for key in self._waiting.get_map().values()]:
                self._waiting.unregister(client)
                _send(client, status)
            client.close()

    def _kill(self, programs: list[int]) -> None:
        for pid in programs:
            os.kill(pid, signal.SIGKILL)


def _send(client: socket.socket, number: int) -> None:
    with contextlib.suppress(ConnectionError):  # the client was killed: the loop sees it next
        client.sendall(struct.pack("!i", number))


def become(request: dict[str, Any]) -> None:
    """Run the program of a request as Python would."""
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    _join_network(request["client"])
    if "COMMLIB_WHOLE_EXIT" not in os.environ:
        _leave_libraries()
    if "PYTHONWARNINGS" in os.environ:
        warnings._processoptions(os.environ["PYTHONWARNINGS"].split(","))  # type: ignore[attr-defined]
    arguments = request["arguments"]
    if arguments[0] == "-u":
        sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
        arguments = arguments[1:]
    if arguments[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        main.__dict__["__builtins__"] = __builtins__
        exec(compile(arguments[1], "<string>", "exec"), main.__dict__)
    elif arguments[0] == "-m":
        sys.argv, sys.path[0] = arguments[1:], os.getcwd()
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]  # as python -m does
    elif arguments[0].startswith("-"):
        raise ValueError(f"{arguments[0]}: a program of tests has -u, -c, -m or a file")
    else:
        sys.argv, sys.path[0] = arguments, os.path.dirname(os.path.abspath(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")


def _join_network(client: int) -> None:
    """Use the network of the client, which `ip netns exec` may have given another one."""
    ours, theirs = "/proc/self/ns/net", f"/proc/{client}/ns/net"
    if os.path.exists(theirs) and not os.path.samefile(ours, theirs):
        with open(theirs) as network:
            if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns", theirs)


def _leave_libraries() -> None:
    """Let the exit of this process take down what the program made, not what was loaded here.

    To destroy an object is to write to it, and so to copy its page. ``torch.distributed`` refers to
    objects of programs, and is taken down.
    """
    libraries = {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] not in sys.stdlib_module_names
        and not f"{name}.".startswith("torch.distributed.")
    }
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(libraries))
    _left.update(dict.fromkeys(libraries))
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # of glibc alone; the handler is called with the exit status
        libc.on_exit(libc._exit, None)


if __name__ == "__main__":
    # The first handler runs last. The interpreter itself replaces modules by None at that time.
    _left: dict[str, None] = {}
    atexit.register(sys.modules.update, _left)
    for module in LOADED:
        importlib.import_module(module)
    sys.modules["tests.support.compiler"].load_compiler()
    sys.modules["tests.support.torchrun"].load_launcher()
    gc.freeze()  # a child's last collection would copy the pages of all this
    become(Server(sys.argv[1]).run())
