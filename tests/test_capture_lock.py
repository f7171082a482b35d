"""The lock of captures: a deadline for other threads, none for those that work for the holder."""

import ctypes
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import flags
from commlib.errors import GraphError
from commlib.graph.backends import capture_lock
from commlib.graph.backends.capture_lock import CaptureLock
from commlib.graph.backends.thread_state import thread_state
from tests.support.autograd_threads import by_autograd
from tests.support.checks import assert_equal, raises

STATE = thread_state() or pytest.fail("this torch lacks the functions")


def elsewhere(call: Callable[[], object]) -> list[object]:
    """Return what a call in another thread returns or raises."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except GraphError as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(10)
    return results


def entered(lock: CaptureLock) -> bool:
    with lock:
        return True


def refused(lock: CaptureLock) -> bool:
    """Return True if another thread does not get the lock before its deadline."""
    (result,) = elsewhere(lambda: entered(lock))
    return isinstance(result, GraphError)


def free(lock: CaptureLock) -> bool:
    with lock.if_free() as held:
        return held


def state(lock: CaptureLock) -> Any:
    """Return what autograd's threads get of this thread, with which they enter the lock."""
    key = lock._key
    return STATE.get(key) if STATE.has(key) else None


def working(lock: CaptureLock, carried: object, call: Callable[[], object]) -> object:
    """Return what ``call`` returns, made with the state that a thread of autograd has got."""
    STATE.put(lock._key, carried)
    try:
        return call()
    finally:
        STATE.remove(lock._key)


@pytest.fixture
def lock(monkeypatch: pytest.MonkeyPatch) -> CaptureLock:
    """A lock with a short deadline."""
    monkeypatch.setattr(flags, "get", lambda name: 0.05)
    return CaptureLock()


def test_one_thread(lock: CaptureLock) -> None:
    with lock, lock, lock.if_free() as held:
        assert_equal(held, True, "held again by its thread")
    assert_equal(elsewhere(lambda: entered(lock)), [True], "released")


def test_another_thread(lock: CaptureLock) -> None:
    """It gets an error after the deadline, or an answer at once where it can do without."""
    with lock:
        (error,) = elsewhere(lambda: entered(lock))
        assert_equal(elsewhere(lambda: free(lock)), [False], "free")
    assert isinstance(error, GraphError)
    assert "for 0.05 s" in str(error) and "outside of the function" in str(error)
    assert_equal(elsewhere(lambda: free(lock)), [True], "free afterwards")


def test_threads_of_autograd(lock: CaptureLock) -> None:
    """They enter without it while the holder waits for them, and so do those that they wait for."""
    threads = {threading.get_ident()}

    def inner() -> bool:
        threads.add(threading.get_ident())
        return entered(lock) and refused(lock)

    def outer() -> bool:
        threads.add(threading.get_ident())
        with lock, lock:
            return bool(by_autograd(inner)) and inner()

    with lock:
        assert_equal(by_autograd(outer), True, "entered by those that work for this thread")
        with lock:
            assert_equal(by_autograd(outer), True, "in a further entrance")
        assert_equal(by_autograd(outer), True, "after it")
        assert_equal(refused(lock), True, "other threads")
    assert_equal(len(threads) >= 3, True, "threads")
    assert_equal(elsewhere(lambda: entered(lock)), [True], "released")


def test_threads_of_autograd_without_a_holder(lock: CaptureLock) -> None:
    """They wait as others do; their own entrances are for those that work for them."""
    assert_equal(by_autograd(lambda: entered(lock) and state(lock) is None), True, "entered")
    with lock:
        assert_equal(elsewhere(lambda: by_autograd(lambda: refused(lock))), [True], "of others")
    assert_equal(elsewhere(lambda: entered(lock)), [True], "released")


def test_free_for_threads_of_autograd(lock: CaptureLock) -> None:
    """The holder may be in a capture, in which nothing gives memory back."""
    with lock:
        assert_equal(by_autograd(lambda: free(lock)), False, "while it is held")
        assert_equal(free(lock), True, "for the holder")
        carried, entered_it, left = state(lock), threading.Event(), threading.Event()

        def other() -> bool:
            with lock:
                entered_it.set()
                return left.wait(10)

        thread = threading.Thread(target=lambda: working(lock, carried, other))
        thread.start()
        entered_it.wait(10)
        assert_equal(free(lock), False, "for the holder, with another one inside")
        left.set()
        thread.join(10)
    assert_equal(by_autograd(lambda: free(lock)), True, "free")


def test_two_threads_for_one_holder(lock: CaptureLock) -> None:
    """Threads of two GPUs work for it at once: one of them at a time is inside."""
    with lock:
        carried = state(lock)

        def first() -> bool:
            with lock:
                (second,) = elsewhere(lambda: working(lock, carried, lambda: entered(lock)))
                return isinstance(second, GraphError)

        assert_equal(elsewhere(lambda: working(lock, carried, first)), [True], "second waits")
        assert_equal(
            elsewhere(lambda: working(lock, carried, lambda: entered(lock))), [True], "one more"
        )


def test_nodes_of_another_backward(lock: CaptureLock) -> None:
    """A thread that waits for its own backward runs nodes of others too: they do not wait."""

    def node() -> bool:
        with lock:
            carried = state(lock)
            STATE.remove(lock._key)
            try:
                return entered(lock) and refused(lock)
            finally:
                STATE.put(lock._key, carried)

    with lock:
        assert_equal(by_autograd(node), True)


def test_an_error(lock: CaptureLock) -> None:
    """It leaves the lock and the states of threads as they were."""

    def fail() -> None:
        with lock:
            raise ValueError("in a node")

    with lock:
        before = state(lock)
        with raises(ValueError, "in a node"):
            by_autograd(fail)
        with raises(ValueError, "in a node"):
            fail()
        assert state(lock) is before
        assert_equal(by_autograd(lambda: entered(lock)), True, "entered after it")
        assert_equal(refused(lock), True, "still held")
    assert_equal(state(lock), None, "state that is left")
    assert_equal(elsewhere(lambda: entered(lock)), [True], "released")


def test_a_state_that_is_left_over(lock: CaptureLock) -> None:
    """It names a hold that has ended: nobody enters with it, and the lock is taken in earnest."""
    with lock:
        outer = state(lock)
        with lock:
            ended = state(lock)
        (inside,) = elsewhere(lambda: working(lock, ended, lambda: entered(lock)))
        assert_equal(inside, True, "the outer hold goes on")
    with lock:
        for carried in (outer, ended):
            (error,) = elsewhere(lambda: working(lock, carried, lambda: entered(lock)))  # noqa: B023
            assert isinstance(error, GraphError)

    def alone() -> bool:
        with lock:
            return refused(lock)

    assert_equal(elsewhere(lambda: working(lock, ended, alone)), [True], "it excludes others")


def test_a_hold_that_ends_meanwhile(lock: CaptureLock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that waits for its turn in a hold enters the lock in earnest when the hold ends."""
    monkeypatch.setattr(flags, "get", lambda name: 0.5)
    with lock:
        hold = state(lock)
    hold.ended = False
    results: list[object] = []

    def alone() -> bool:
        with lock:
            return refused(lock)

    thread = threading.Thread(target=lambda: results.append(working(lock, hold, alone)))
    with hold.inner:
        thread.start()
        time.sleep(0.1)
        hold.ended = True
    thread.join(10)
    assert_equal(results, [True], "it excludes others")


def test_an_end_that_waits(lock: CaptureLock) -> None:
    """A backward that fails does not wait for its other threads: the holder does, as it leaves."""
    order, inside = list[str](), threading.Event()

    def late() -> None:
        with lock:
            inside.set()
            time.sleep(0.2)
            order.append("late")

    with lock:
        carried = state(lock)
        thread = threading.Thread(target=lambda: working(lock, carried, late))
        thread.start()
        inside.wait(10)
    order.append("left")
    thread.join(10)
    assert_equal(order, ["late", "left"])


def test_without_the_state(lock: CaptureLock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch that lacks one of its functions: these threads wait as others do."""
    monkeypatch.setattr(capture_lock, "_state", None)
    with lock, lock:
        with raises(GraphError, "for 0.05 s"):
            by_autograd(lambda: entered(lock))
        assert_equal(state(lock), None, "state")
    monkeypatch.delattr(torch._C, "_stash_obj_in_tls")
    assert_equal(thread_state(), None, "functions")


class Older:
    """The functions of torch 2.11: an object comes without a reference, and can't be removed."""

    def __init__(self) -> None:
        self._held: dict[str, Any] = {}

    def _is_key_in_tls(self, key: str) -> bool:
        return key in self._held

    def _get_obj_in_tls(self, key: str) -> Any:
        return self._held[key]

    def _stash_obj_in_tls(self, key: str, value: Any) -> None:
        self._held[key] = value
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))


def test_an_older_torch() -> None:
    """References are counted right, and None takes the place of what is removed."""
    functions, value = thread_state(Older()), object()
    assert functions is not None
    before = sys.getrefcount(value)
    functions.put("key", value)
    assert_equal(sys.getrefcount(value), before + 1, "references while it is there")
    assert functions.get("key") is value
    functions.remove("key")
    assert_equal(sys.getrefcount(value), before, "references after that")
    assert_equal((functions.has("key"), functions.get("key")), (True, None))
