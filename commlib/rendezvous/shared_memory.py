"""All-gather of integers between the ranks of one host through shared memory."""

import atexit
import fcntl
import mmap
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path

from commlib.deadlines import Deadline
from commlib.errors import CommTimeout, EngineError
from commlib.rendezvous.call_board import ROW, CallBoard

Rounds = Callable[[list[int]], list[list[int]]]

MOST = 510  # integers per rank and all-gather
_SLOT = 8 * (MOST + 2)  # the header (checksum, length, number of the all-gather), then the integers
_HEADER = struct.Struct("<Iiq")  # checksum, length, number of the all-gather
_SPIN_S, _LONGEST_SLEEP_S, _CHECK_S = 30e-6, 1e-3, 0.05
_FOLDER = Path("/dev/shm")


class SharedMemoryAllGather:
    """The shared-memory all-gather: a call returns every rank's integers.

    All ranks call it equally often. Two slots per rank alternate, because a rank is at most one
    all-gather ahead of another. A message carries its number and a checksum, so that a reader
    never accepts a partly written one, in whatever order the stores become visible. A rank that has
    died is detected by the file lock that it held.

    Attributes:
        board: The calls of the ranks, in the same memory.
    """

    def __init__(self, file: int, rank: int, size: int, seconds: float) -> None:
        self._file, self._rank, self._size, self._seconds = file, rank, size, seconds
        self._memory = mmap.mmap(file, _length(size))
        self._round = 0
        self.board = CallBoard(self._memory, 2 * size * _SLOT, rank, size)

    def __call__(self, values: list[int]) -> list[list[int]]:
        """Return the integers of every rank, in rank order; at most ``MOST`` each.

        Raises:
            CommTimeout: Ranks are late; the error names them.
            EngineError: Ranks have ended or closed the ring.
        """
        self._round += 1
        self._write(values)
        rows: list[list[int]] = [[]] * self._size
        missing = set(range(self._size))
        deadline, began, pause = Deadline(self._seconds), time.monotonic(), 0.0
        checked = began
        while missing:
            for rank in list(missing):
                row = self._read(rank)
                if row is not None:
                    rows[rank] = row
                    missing.remove(rank)
            now = time.monotonic()
            if not missing or now - began < _SPIN_S:
                continue
            if now - checked > _CHECK_S:
                self._check_alive(missing, deadline)
                checked = now
            time.sleep(pause)
            pause = min(pause * 1.5 + 1e-6, _LONGEST_SLEEP_S)
        return rows

    def dead(self) -> list[int]:
        """Return the other ranks that have ended or closed the ring."""
        others = (rank for rank in range(self._size) if rank != self._rank)
        return [rank for rank in others if not _held(self._file, rank)]

    def close(self) -> None:
        """Unmap the memory and close the file, which releases this rank's lock."""
        self.board.close()
        self._memory.close()
        os.close(self._file)

    def _offset(self, rank: int) -> int:
        return ((self._round & 1) * self._size + rank) * _SLOT

    def _checksum(self, length: int, payload: bytes) -> int:
        return zlib.crc32(payload, (self._round * 31 + length) & 0xFFFFFFFF)

    def _write(self, values: list[int]) -> None:
        payload = struct.pack(f"<{len(values)}q", *values)
        checksum = self._checksum(len(values), payload)
        start = self._offset(self._rank)
        end = start + _HEADER.size
        self._memory[end : end + len(payload)] = payload
        self._memory[start:end] = _HEADER.pack(checksum, len(values), self._round)

    def _read(self, rank: int) -> list[int] | None:
        """Return the integers of ``rank`` if its message is complete, else None."""
        start = self._offset(rank)
        checksum, length, number = _HEADER.unpack_from(self._memory, start)
        if number != self._round or not 0 <= length <= MOST:
            return None
        start += _HEADER.size
        payload = self._memory[start : start + 8 * length]
        if self._checksum(length, payload) != checksum:
            return None
        return list(struct.unpack(f"<{length}q", payload))

    def _check_alive(self, missing: set[int], deadline: Deadline) -> None:
        """Raise if a missing rank is dead or the deadline has passed.

        A rank may have written its message and closed the ring since it was last read.
        """
        dead = [rank for rank in missing if not _held(self._file, rank)]
        dead = [rank for rank in dead if self._read(rank) is None]
        if dead:
            raise EngineError(f"positions {sorted(dead)} in the ring have ended or closed it")
        if deadline.passed():
            raise CommTimeout(
                f"timed out after {self._seconds:g} s waiting for positions {sorted(missing)} in "
                f"the ring"
            )


def open_shared_memory(
    rounds: Rounds, rank: int, size: int, host: int, seconds: float
) -> SharedMemoryAllGather | None:
    """Set up the shared-memory all-gather.

    Args:
        rounds: Another all-gather, which carries the integers of this set-up.
        rank: This rank's position in the ring.
        size: The size of the ring.
        host: A number that differs between hosts.
        seconds: The timeout of one all-gather.

    Returns:
        The all-gather, or None on all ranks if they can't share memory.
    """
    created, file, ready = 0, -1, False
    try:
        if rank == 0 and _FOLDER.is_dir():
            file, created = _create(size)
        rows = rounds([host, created])
        name = rows[0][1] if len({row[0] for row in rows}) == 1 else 0
        if name:
            file = _open_and_lock(file, name, rank)
        ready = all(row == [1] for row in rounds([int(name != 0 and file >= 0)]))
    finally:  # also after an error or a signal
        if created:
            _unlink(created)
        if not ready and file >= 0:
            os.close(file)
    return SharedMemoryAllGather(file, rank, size, seconds) if ready else None


def _length(size: int) -> int:
    return size * (2 * _SLOT + ROW)


def _path(name: int) -> Path:
    return _FOLDER / f"commlib-{name:x}"


def _create(size: int) -> tuple[int, int]:
    """Create an empty file that no other user may open; return it and the number in its name."""
    name, file = int.from_bytes(os.urandom(7), "little") | 1, -1
    _named.add(name)  # before there is a file
    try:
        file = os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(file, 0, _length(size))
    except OSError:  # full, or not writable: the ranks use the other all-gather
        _unlink(name)
        if file >= 0:
            os.close(file)
        return -1, 0
    return file, name


_named: set[int] = set()  # files of this process that still have a name


def _unlink(name: int) -> None:
    """Remove the name of a file; processes that have it open keep it."""
    _path(name).unlink(missing_ok=True)
    _named.discard(name)


@atexit.register
def _unlink_left() -> None:
    """Remove the files of set-ups that a signal interrupted."""
    for name in list(_named):
        _unlink(name)


os.register_at_fork(after_in_child=_named.clear)  # the parent owns the files


def _open_and_lock(file: int, name: int, rank: int) -> int:
    """Open the file and lock this rank's byte in it; return -1 if that fails."""
    try:
        if file < 0:
            file = os.open(_path(name), os.O_RDWR | os.O_CLOEXEC)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:  # another container of the same host: the ranks use the other all-gather
        return -1
    return file


def _held(file: int, rank: int) -> bool:
    """Return True if the process of ``rank`` is alive: it then holds the lock of its byte."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:
        return True
    fcntl.lockf(file, fcntl.LOCK_UN, 1, rank)
    return False
