"""Machine code of kernels on disk: a folder of this user, and whose turn it is to compile."""

import fcntl
import hashlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from commlib.deadlines import Deadline
from commlib.log import log

_DIGEST = hashlib.sha256().digest_size
_TURN_S = 60.0  # to wait for a process that compiles, which takes up to 6 s for a file
_POLL_S = 0.05


def folder() -> Path | None:
    """Return where machine code is kept: a folder that this user alone may write, or None."""
    try:
        path = Path.home()
        for name in (".cache", "commlib", "kernels"):
            path /= name
            path.mkdir(mode=0o700, exist_ok=True)
        state = path.stat()
    except (OSError, RuntimeError) as error:
        log.once("compiled kernels are not kept: %s", error)
        return None
    if not _private(state):
        log.once("compiled kernels are not kept: others may write to %s; remove it", path)
        return None
    return path


def _private(state: os.stat_result) -> bool:
    """Return True if no other user may write there."""
    return state.st_uid == os.getuid() and not state.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def read(path: Path) -> bytes | None:
    """Return what was kept, unless it is not whole, or others could have put it there."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            if not _private(os.fstat(file.fileno())):
                return None
            data = file.read()
    except OSError:
        return None
    digest, code = data[:_DIGEST], data[_DIGEST:]
    return code if hashlib.sha256(code).digest() == digest else None


def write(path: Path, code: bytes) -> None:
    """Put the file there in one step: other ranks write and read the same one."""
    part = path.with_name(f".{secrets.token_hex(8)}")
    try:
        part.touch(mode=0o600)
        part.write_bytes(hashlib.sha256(code).digest() + code)
        part.replace(path)
    except OSError as error:
        log.once("compiled kernels are not kept: %s", error)


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """Hold the lock of a folder inside a ``with`` block; after ``_TURN_S`` go on without it.

    A process that ends loses the lock.
    """
    deadline = Deadline(_TURN_S)
    try:
        number = os.open(path, os.O_RDONLY)
    except OSError:
        yield  # a write will say why
        return
    try:
        while not _locked(number) and deadline.left():
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(number)


def _locked(number: int) -> bool:
    """Try to lock a folder once; True also where its file system has no locks."""
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
