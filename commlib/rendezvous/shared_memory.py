"""The shared-memory all-gather: integers between the ranks of one host."""

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

Rounds = Callable[[list[int]], list[list[int]]]

MOST = 510  # numbers of one round
_SLOT = 8 * (MOST + 2)  # a checksum, round and length in one word each, then the numbers
_HEAD = struct.Struct("<Iiq")  # checksum, length, round
_SPIN_S, _LONGEST_SLEEP_S, _LOOK_S = 30e-6, 1e-3, 0.05
_FOLDER = Path("/dev/shm")


class Mailbox:
    """``box(values)`` gives every rank's numbers; every rank calls it as often as the others.

    Two slots a rank take turns: a rank is one round ahead of another at most. A message carries
    its round and a checksum, so that a reader never takes a half-written one, whatever order the
    machine's stores become visible in. A rank that dies is noticed by the lock it held.
    """

    def __init__(self, file: int, rank: int, size: int, seconds: float) -> None:
        self._file, self._rank, self._size, self._seconds = file, rank, size, seconds
        self._memory = mmap.mmap(file, _length(size))
        self._round = 0

    def __call__(self, values: list[int]) -> list[list[int]]:
        """Return the numbers of every rank, in rank order; at most ``MOST`` each.

        Raises ``CommTimeout`` naming the late ranks, ``EngineError`` for dead ones.
        """
        self._round += 1
        text = struct.pack(f"<{len(values)}q", *values)
        head = _HEAD.pack(self._checksum(len(values), text), len(values), self._round)
        at = self._place(self._rank)
        self._memory[at + _HEAD.size : at + _HEAD.size + len(text)] = text
        self._memory[at : at + _HEAD.size] = head
        rows: list[list[int]] = [[]] * self._size
        missing = set(range(self._size))
        deadline, began, pause = Deadline(self._seconds), time.monotonic(), 0.0
        looked = began
        while missing:
            for rank in list(missing):
                row = self._read(rank)
                if row is not None:
                    rows[rank] = row
                    missing.remove(rank)
            now = time.monotonic()
            if not missing or now - began < _SPIN_S:
                continue
            if now - looked > _LOOK_S:
                self._look(missing, deadline)
                looked = now
            time.sleep(pause)
            pause = min(pause * 1.5 + 1e-6, _LONGEST_SLEEP_S)
        return rows

    def dead(self) -> list[int]:
        """Return the other ranks that have ended or closed the ring."""
        others = (rank for rank in range(self._size) if rank != self._rank)
        return [rank for rank in others if not _held(self._file, rank)]

    def close(self) -> None:
        """Let go of the memory."""
        self._memory.close()
        os.close(self._file)

    def _place(self, rank: int) -> int:
        return ((self._round & 1) * self._size + rank) * _SLOT

    def _checksum(self, length: int, text: bytes) -> int:
        return zlib.crc32(text, (self._round * 31 + length) & 0xFFFFFFFF)

    def _read(self, rank: int) -> list[int] | None:
        """The numbers of ``rank`` if its message of this round is complete."""
        at = self._place(rank)
        checksum, length, number = _HEAD.unpack_from(self._memory, at)
        if number != self._round or not 0 <= length <= MOST:
            return None
        text = self._memory[at + _HEAD.size : at + _HEAD.size + 8 * length]
        if self._checksum(length, text) != checksum:
            return None
        return list(struct.unpack(f"<{length}q", text))

    def _look(self, missing: set[int], deadline: Deadline) -> None:
        """Raise when a missing rank is dead, or all time is gone.

        A rank may have written its message and closed the ring since it was last looked for.
        """
        dead = [rank for rank in missing if not _held(self._file, rank)]
        dead = [rank for rank in dead if self._read(rank) is None]
        if dead:
            raise EngineError(f"positions {sorted(dead)} in the ring have ended or closed it")
        if deadline.passed():
            raise CommTimeout(
                f"positions {sorted(missing)} in the ring did not arrive within {self._seconds:g} s"
            )


def open_mailbox(rounds: Rounds, rank: int, size: int, host: int, seconds: float) -> Mailbox | None:
    """Return a mailbox that all ranks share, or None, on all of them alike.

    ``rounds`` carries the numbers that set it up; ``host`` differs between hosts.
    """
    made, file, ready = 0, -1, False
    try:
        if rank == 0 and _FOLDER.is_dir():
            file, made = _create(size)
        rows = rounds([host, made])
        name = rows[0][1] if len({row[0] for row in rows}) == 1 else 0
        if name:
            file = _enter(file, name, rank)
        ready = all(row == [1] for row in rounds([int(name != 0 and file >= 0)]))
    finally:  # also after an error or a signal
        if made:
            _unlink(made)
        if not ready and file >= 0:
            os.close(file)
    return Mailbox(file, rank, size, seconds) if ready else None


def _length(size: int) -> int:
    return 2 * size * _SLOT


def _path(name: int) -> Path:
    return _FOLDER / f"commlib-{name:x}"


def _create(size: int) -> tuple[int, int]:
    """Make an empty file that no other user may open; its name is a number."""
    name, file = int.from_bytes(os.urandom(7), "little") | 1, -1
    _named.add(name)  # before there is a file
    try:
        file = os.open(_path(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(file, 0, _length(size))
    except OSError:  # full, or not writable: the ranks go on without
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
    """Remove what a signal has left in the middle of a set-up."""
    for name in list(_named):
        _unlink(name)


os.register_at_fork(after_in_child=_named.clear)  # the files are the parent's


def _enter(file: int, name: int, rank: int) -> int:
    """Open the file and hold this rank's lock in it; -1 when that can't be done here."""
    try:
        if file < 0:
            file = os.open(_path(name), os.O_RDWR | os.O_CLOEXEC)
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:  # another container of the same host: the ranks go on without
        return -1
    return file


def _held(file: int, rank: int) -> bool:
    """Whether the process of ``rank`` lives: it holds the lock of its byte."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
    except OSError:
        return True
    fcntl.lockf(file, fcntl.LOCK_UN, 1, rank)
    return False
