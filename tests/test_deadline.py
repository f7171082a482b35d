"""Deadlines that another thread cancels, and steps in worker threads."""

import threading
import time

import pytest

from commlib.deadlines import Deadline, bounded
from commlib.errors import CommTimeout
from commlib.worker_threads import SPARES, Workers


def test_cancel_ends_every_wait() -> None:
    deadline, stuck = Deadline(600), threading.Event()
    errors: list[str] = []

    def wait() -> None:
        try:
            bounded(stuck.wait, deadline, "a step")
        except CommTimeout as error:
            errors.append(str(error))

    threads = [threading.Thread(target=wait)]
    threads.append(threading.Thread(target=lambda: deadline.poll(stuck.is_set)))
    for thread in threads:
        thread.start()
    deadline.cancel("close(1)")
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert errors == ["a step was given up: close(1)"]
    assert (deadline.passed(), deadline.left(), deadline.seconds) == (True, 0, 600)
    stuck.set()


def test_bounded_returns_raises_and_gives_up() -> None:
    assert bounded(lambda: 7, Deadline(60), "a step") == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 // 0, Deadline(60), "a step")
    stuck = threading.Event()
    with pytest.raises(CommTimeout, match=r"a step did not return within 0\.1 s"):
        bounded(stuck.wait, Deadline(0.1), "a step")
    stuck.set()


def test_threads_are_reused() -> None:
    workers, used = Workers(), set()
    for _ in range(50):
        task = workers.start(lambda: used.add(threading.get_ident()), "a step")
        assert task is not None
        assert task.wait(30)
    assert len(used) <= 2


def test_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the interpreter's exit: idle threads run the steps, and stuck threads are abandoned."""
    workers, stuck = Workers(), threading.Event()
    workers.reserve()

    def fail(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", fail)
    done: list[int] = []
    for number in range(3 * SPARES):
        task = workers.start(lambda number=number: done.append(number), "a step")
        assert task is not None
        assert task.wait(30)
    assert done == list(range(3 * SPARES))
    tasks = [workers.start(stuck.wait, "a stuck step") for _ in range(SPARES + 2)]
    assert [task is None for task in tasks] == [False] * SPARES + [True] * 2
    stuck.set()
    for task in tasks:
        assert task is None or task.wait(30)


def test_a_worker_runs_steps_in_place_if_no_other_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that aborts a ring runs the inner steps itself if no other worker is idle."""
    workers = Workers()
    workers.reserve()
    monkeypatch.setattr(workers, "_add", lambda: False)
    free = threading.Barrier(SPARES)

    def step() -> int:
        free.wait(30)  # every worker is busy
        task = workers.start(threading.get_ident, "an inner step")
        assert task is not None
        assert task.wait(30)
        assert task.result == threading.get_ident()
        free.wait(30)
        return 1

    tasks = [workers.start(step, "a step") for _ in range(SPARES)]
    end = time.monotonic() + 30
    assert all(task is not None and task.wait(end - time.monotonic()) for task in tasks)
    assert [task is not None and task.result for task in tasks] == [1] * SPARES
