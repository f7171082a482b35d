"""The number of CUDA graphs, also captured by hand, that hold calls of a communicator."""

import ctypes
from functools import cache
from typing import Any

from commlib.errors import EngineError
from commlib.keepalive import keep_forever

_SEMAPHORE_BYTES = 64  # at least sizeof(sem_t)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


class GraphHolds:
    """Counts captures by a reference in each graph: the driver posts a semaphore at its end.

    A graph can outlive the capture in many forms, and only the driver knows when the last of them
    is destroyed. Its callback must not enter Python, so it is the C library's ``sem_post``.
    """

    def __init__(self) -> None:
        self._ended = ctypes.create_string_buffer(_SEMAPHORE_BYTES)
        self._place = ctypes.addressof(self._ended)
        _libc().sem_init(ctypes.c_void_p(self._place), 0, 0)
        self._held = 0
        self._last = 0  # number of the last capture that was counted

    def add(self, stream: int) -> None:
        """Count the capture that a stream is part of; a capture counts once."""
        driver = _driver()
        status, state, number, graph = driver.cuStreamGetCaptureInfo(stream)[:4]
        active = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE
        if int(status) != 0 or state != active or int(number) == self._last:
            return
        post = ctypes.cast(_libc().sem_post, ctypes.c_void_p).value
        no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        made = driver.cuUserObjectCreate(self._place, driver.CUhostFn(post), 1, no_sync)
        _succeed("cuUserObjectCreate", made[0])
        if not self._last:
            keep_forever(self._ended)  # a graph may outlive the ring, its abort too
        move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        (status,) = driver.cuGraphRetainUserObject(graph, made[1], 1, move)
        _succeed("cuGraphRetainUserObject", status)
        self._held, self._last = self._held + 1, int(number)

    @property
    def count(self) -> int:
        """Return the number of graphs that still hold calls; never blocks."""
        while _libc().sem_trywait(ctypes.c_void_p(self._place)) == 0:
            self._held -= 1
        return self._held


def _succeed(what: str, status: Any) -> None:
    if int(status) != 0:
        raise EngineError(f"{what}: {status}")
