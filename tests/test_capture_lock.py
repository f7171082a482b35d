"""The lock of captures: one thread may hold it again, another one waits until a deadline."""

import threading
from collections.abc import Callable

import pytest

from commlib import flags
from commlib.errors import GraphError
from commlib.graph.backends.capture_lock import CaptureLock
from tests.support.checks import assert_equal


def elsewhere(call: Callable[[], object]) -> list[object]:
    """Return what a call in another thread returns or raises."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(call())
        except GraphError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return found


def entered(lock: CaptureLock) -> bool:
    with lock:
        return True


def free(lock: CaptureLock) -> bool:
    with lock.if_free() as held:
        return held


def test_one_thread() -> None:
    lock = CaptureLock()
    with lock, lock, lock.if_free() as held:
        assert_equal(held, True, "held again by its thread")
    assert_equal(elsewhere(lambda: entered(lock)), [True], "released")


def test_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """It gets an error after the deadline, or an answer at once where it can do without."""
    monkeypatch.setattr(flags, "get", lambda name: 0.05)
    lock = CaptureLock()
    with lock:
        (error,) = elsewhere(lambda: entered(lock))
        assert_equal(elsewhere(lambda: free(lock)), [False], "free")
    assert isinstance(error, GraphError)
    assert "for 0.05 s" in str(error) and "run that backward outside" in str(error)
    assert_equal(elsewhere(lambda: free(lock)), [True], "free afterwards")
