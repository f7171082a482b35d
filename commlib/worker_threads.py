"""Daemon threads that are started in advance, for steps that may block forever."""

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from commlib.keepalive import keep_forever

# Idle threads from the first ring on. A step that blocks forever occupies one, and the interpreter
# can't start threads while it exits.
SPARES = 4


class Task:
    """One step in a worker thread, and its result or error once it has ended."""

    def __init__(self, step: Callable[[], Any], name: str) -> None:
        self.name = name
        self.error: Exception | None = None
        self.result: Any = None
        self._step: Callable[[], Any] | None = step
        self._ended = threading.Event()

    def run(self) -> None:
        """Run the step and store its result, or its error for the thread that waits."""
        step, self._step = self._step, None  # its objects are freed when it ends
        assert step is not None  # a task runs once
        try:
            self.result = step()
        except Exception as error:
            self.error = error

    def end(self) -> None:
        """Wake the thread that waits."""
        self._ended.set()

    def wait(self, seconds: float) -> bool:
        """Wait at most ``seconds`` for the end of the step; return True if it has ended."""
        return self._ended.wait(seconds)


class Workers:
    """A pool of daemon threads with at least one idle thread wherever threads can be started."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start with no threads, as in a forked child, where none of the parent's exist."""
        self._lock = threading.Lock()
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self._free = 0  # idle threads minus queued tasks
        self._running: set[Task] = set()  # including queued tasks
        self._local = threading.local()

    def reserve(self) -> None:
        """Start threads until ``SPARES`` are idle; does nothing while the interpreter exits."""
        with self._lock:
            while self._free < SPARES and self._add():
                pass

    def start(self, step: Callable[[], Any], name: str) -> Task | None:
        """Run ``step`` in an idle or a new thread.

        Returns:
            The task, or None if every thread is busy and the exiting interpreter can't start
            another one. A step that was not started is never freed, because the destructors of
            its objects may block.
        """
        task = Task(step, name)
        with self._lock:
            if self._free < 1 and not self._add():
                if not getattr(self._local, "working", False):
                    keep_forever(step)
                    return None
                in_place = True  # the thread that waits for this worker has a deadline
            else:
                self._free, in_place = self._free - 1, False
                self._running.add(task)
                if not self._free:
                    self._add()
        if in_place:
            task.run()
            task.end()
        else:
            self._tasks.put(task)
        return task

    def await_steps(self, seconds: float) -> None:
        """Wait at most ``seconds`` for the steps that nobody waits for any more.

        Called at the exit: a step that returns from C++ to an interpreter that is shutting down
        aborts the process.
        """
        end = time.monotonic() + seconds
        with self._lock:
            running = list(self._running)
        for task in running:
            task.wait(max(0.0, end - time.monotonic()))

    def _add(self) -> bool:
        """Start another idle thread; return False if the interpreter can't start threads."""
        try:
            threading.Thread(
                target=self._work, args=(self._tasks,), name="commlib idle worker", daemon=True
            ).start()
        except RuntimeError:  # "can't create new thread at interpreter shutdown"
            return False
        self._free += 1
        return True

    def _work(self, tasks: "SimpleQueue[Task]") -> None:
        self._local.working = True
        thread = threading.current_thread()
        stays = True
        while stays:
            task = tasks.get()
            thread.name = f"commlib {task.name}"
            task.run()
            thread.name = "commlib idle worker"
            with self._lock:  # before the waiter wakes, so that its next step finds this thread
                stays = self._free < SPARES
                self._free += stays
                self._running.discard(task)
            task.end()
            del task


workers = Workers()
