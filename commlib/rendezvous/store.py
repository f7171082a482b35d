"""A rendezvous store whose every operation ends within a deadline.

A client of a c10d store waits without limit for a server that is stopped. So each connection has
one daemon thread that alone uses it, and callers wait for that thread with a deadline. The thread
exists before the interpreter shuts down, when no other one can be started.
"""

import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Protocol

import torch.distributed as dist

from commlib.deadlines import Deadline
from commlib.errors import BootstrapError
from commlib.log import log

Step = Callable[[Any], Any]

_LOOK_S = 0.1  # how often a wait looks whether its deadline was cancelled
_POST_S = 5.0  # to open a connection for an operation without a waiter


class Opening(Protocol):
    """Open a store by ``deadline``; ``stage`` says what it is doing meanwhile."""

    stage: str

    def __call__(self, deadline: Deadline) -> Any:
        """Return the connected store of torch."""


class _Clone:
    """A connection of our own to a store that the program made."""

    stage = "this rank was opening it"

    def __init__(self, store: Any) -> None:
        self.store = store

    def __call__(self, deadline: Deadline) -> Any:
        try:
            return self.store.clone()
        except (AttributeError, RuntimeError, NotImplementedError):
            return self.store  # a store that is written in Python


class _Job:
    """One operation on its way through the thread of a connection."""

    def __init__(self, step: Step, deadline: Deadline | None) -> None:
        self.step, self.deadline = step, deadline or Deadline(_POST_S)
        self.started = False
        self.value: Any = None
        self.error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self, store: Any) -> None:
        try:
            self.value = self.step(store)
        except Exception as error:
            self.error = error

    def finish(self) -> None:
        self._done.release()

    def wait(self, seconds: float) -> bool:
        return self._done.acquire(timeout=seconds)


def _serve(opening: Opening, jobs: "SimpleQueue[_Job | None]") -> None:
    """Run jobs in order; this frame holds the only reference to the store."""
    store: Any = None
    while (job := jobs.get()) is not None:
        job.started = True
        try:
            store = opening(job.deadline) if store is None else store
        except Exception as error:
            job.error = error
        else:
            job.run(store)
        job.finish()
        del job


def grace(deadline: Deadline) -> float:
    """Return the seconds that an operation gets after its deadline, to write what happened."""
    return min(2.0, max(0.5, deadline.seconds / 10))


class Connection:
    """One connection to a store, at ``where``, and the thread that uses it."""

    def __init__(self, opening: Opening, where: str) -> None:
        self.where, self.fault, self.closed = where, "", False
        self._opening = opening
        self.clients: dict[float, Any] = {}  # for engines, by how long they wait
        self.spares: list[Any] = []  # for one set-up each: it blocks its client while it waits
        self._start()
        _connections.add(self)

    def _start(self) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve,
            args=(self._opening, self._jobs),
            name=f"commlib store {self.where}",
            daemon=True,
        )
        self._thread.start()
        _threads.add(self._thread)

    def revive(self) -> None:
        """Open the connection again if an earlier operation has found it faulty."""
        if self.fault and not self.closed:
            self._restart()

    def _restart(self) -> None:
        """Leave the thread to the operation that it is in, and open a second connection."""
        self._jobs.put(None)
        if self.closed:
            return
        self.fault = ""
        self.clients, self.spares = {}, []
        self._start()

    def run(self, what: str, step: Step, deadline: Deadline) -> Any:
        """Return ``step(store)``.

        Raises ``BootstrapError`` if the store does not answer by ``deadline``, or answers with an
        error. The connection is faulty then, and later operations fail at once.
        """
        if self.fault:
            raise BootstrapError(self.fault)
        job = _Job(step, deadline)
        self._jobs.put(job)
        try:
            done = self._awaited(job, deadline)
        except BaseException:  # Ctrl-C: the next operation must not queue after this one
            self._restart()
            raise
        if not done and deadline.cancelled is not None:
            self._restart()
            raise BootstrapError(f"{what} was given up: {deadline.cancelled}")
        if not done:
            raise self._late(what, job, deadline)
        if isinstance(job.error, BootstrapError):
            raise job.error
        if isinstance(job.error, RuntimeError | OSError):
            reason = str(job.error).partition("\n")[0]
            self.fault = (
                f"the rendezvous store at {self.where} failed in {what} "
                f"({type(job.error).__name__}: {reason}); is the process that serves it alive?"
            )
            raise BootstrapError(self.fault) from job.error
        if job.error is not None:
            raise job.error
        return job.value

    def _awaited(self, job: _Job, deadline: Deadline) -> bool:
        """Wait for a job until its deadline and the grace have passed, or it is cancelled.

        The grace is counted in looks, not in clock time. If the host stops this process past the
        deadline, the store still has the whole grace to answer once the process runs again.

        Returns:
            Whether the job is done.
        """
        looks = math.ceil(grace(deadline) / _LOOK_S)
        given_up = deadline.cancelled is not None  # what follows then is for the other members
        while not job.wait(_LOOK_S):
            if deadline.cancelled is not None and not given_up:
                return False
            if deadline.passed():
                if looks == 0:
                    return False
                looks -= 1
        return True

    def _late(self, what: str, job: _Job, deadline: Deadline) -> BootstrapError:
        if not job.started:
            return BootstrapError(
                f"the rendezvous store at {self.where} was busy with another call for "
                f"{deadline.seconds:g} s before {what}"
            )
        stage = self._opening.stage
        doing = f"{what} (while {stage})" if stage else what
        self.fault = (
            f"the rendezvous store at {self.where} did not answer {doing} within "
            f"{deadline.seconds:g} s; is the process that serves it alive, or stopped?"
        )
        return BootstrapError(self.fault)

    def post(self, step: Step) -> None:
        """Run ``step(store)`` some time later; no thread waits for it."""
        if not self.fault:
            self._jobs.put(_Job(_logged(step, self.answers), None))

    def answers(self) -> bool:
        """Return False if no process serves the store any more; takes at most a second.

        torch prints a stack trace for each request to a server that is gone. So what happens after
        the members have parted asks first.
        """
        asks: Callable[[], bool] | None = getattr(self._opening, "answers", None)
        return asks is None or asks()

    def close(self, seconds: float) -> None:
        """End the thread after what it has been given, and wait for that at most ``seconds``."""
        sound = not self.fault
        self._end()
        if sound:
            self._thread.join(seconds)

    def _end(self) -> None:
        self.closed, self.clients, self.spares = True, {}, []
        self.fault = self.fault or f"the connection to the store at {self.where} is closed"
        self._jobs.put(None)

    def __del__(self) -> None:
        self._jobs.put(None)


_connections: "weakref.WeakSet[Connection]" = weakref.WeakSet()
_threads: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()  # also those given up


def close_connections(seconds: float) -> None:
    """Close all connections before the exit, and wait for their threads at most ``seconds``.

    Python ends a thread that returns into a dying interpreter. In a call of a store that is an
    abort of the process, because the call's C++ frames can't be unwound.
    """
    end = time.monotonic() + seconds
    for connection in list(_connections):
        connection._end()
    for thread in list(_threads):
        if thread is not threading.current_thread():
            thread.join(max(0.0, end - time.monotonic()))


def forget() -> None:
    """Give up all connections in a forked child, without using or closing a socket.

    The stores stay in the frames of the parent's threads, which nothing clears in a child.
    """
    _threads.clear()
    for connection in list(_connections):
        connection.closed = True
        connection.fault = (
            f"the store at {connection.where} belongs to the parent of this forked process"
        )


def _logged(step: Step, answers: Callable[[], bool]) -> Step:
    def attempt(store: Any) -> None:
        try:
            if answers():
                step(store)
        except Exception as error:
            log.once("unused keys stay in the store: %s", error)

    return attempt


class BoundedStore:
    """The keys under ``prefix``; operations take the deadline by which they end."""

    def __init__(self, connection: Connection, prefix: str = "") -> None:
        self.connection, self._prefix = connection, prefix

    @staticmethod
    def of(store: Any) -> "BoundedStore":
        """Return a bounded form of ``store``, over its own connection if it can be cloned."""
        if isinstance(store, BoundedStore):
            return store
        return BoundedStore(Connection(_Clone(store), f"a {type(store).__name__}"))

    @property
    def name(self) -> str:
        """The prefix without its last slash."""
        return self._prefix.rstrip("/")

    def path(self, key: str) -> str:
        """Return the whole name of ``key``, for steps that use the store itself."""
        return self._prefix + key

    def apart(self) -> "BoundedStore":
        """Return the same keys over another connection, for waits that would block this one."""
        connection = Connection(self.connection._opening, self.connection.where)
        return BoundedStore(connection, self._prefix)

    def under(self, name: str) -> "BoundedStore":
        """Return the part ``name`` of this store, as ``PrefixStore(name, store)`` does."""
        return BoundedStore(self.connection, f"{self._prefix}{name}/")

    def _run(self, what: str, step: Step, deadline: Deadline) -> Any:
        return self.connection.run(what, step, deadline)

    def set(self, key: str, value: str | bytes, deadline: Deadline) -> None:
        """Set ``key``."""
        name = self._prefix + key
        self._run(f"set({name})", lambda store: store.set(name, value), deadline)

    def get(self, key: str, deadline: Deadline) -> bytes:
        """Return the value of a key that exists."""
        name = self._prefix + key
        value: bytes = self._run(f"get({name})", lambda store: store.get(name), deadline)
        return value

    def add(self, key: str, amount: int, deadline: Deadline) -> int:
        """Add to a counter and return its value."""
        name = self._prefix + key
        return int(self._run(f"add({name})", lambda store: store.add(name, amount), deadline))

    def append(self, key: str, text: str, deadline: Deadline) -> None:
        """Append to the text of ``key``."""
        name = self._prefix + key
        self._run(f"append({name})", lambda store: store.append(name, text), deadline)

    def check(self, keys: Iterable[str], deadline: Deadline) -> bool:
        """Return True if all ``keys`` exist."""
        names = [self._prefix + key for key in keys]
        return bool(self._run(f"check({names[0]})", lambda store: store.check(names), deadline))

    def compare_set(self, key: str, expected: str, desired: str, deadline: Deadline) -> str:
        """Set ``key`` if it has the ``expected`` value ("": none), and return what it is now."""
        name = self._prefix + key
        value: bytes = self._run(
            f"compare_set({name})",
            lambda store: store.compare_set(name, expected, desired),
            deadline,
        )
        return value.decode()

    def multi_get(self, keys: Iterable[str], deadline: Deadline) -> list[bytes]:
        """Return the values of keys that exist, in one request."""
        names = [self._prefix + key for key in keys]
        if not names:
            return []
        return list(
            self._run(f"multi_get({names[0]})", lambda store: store.multi_get(names), deadline)
        )

    def wait(self, keys: list[str], deadline: Deadline) -> bool:
        """Wait on the server until all ``keys`` exist; return False when the deadline passes."""
        if deadline.passed():
            return self.check(keys, deadline)
        names = [self._prefix + key for key in keys]

        def step(store: Any) -> bool:
            try:
                store.wait(names, timedelta(seconds=deadline.left() + grace(deadline) / 2))
            except RuntimeError:  # late, unless the store is gone: then this raises too
                return bool(store.check(names))
            return True

        return bool(self._run(f"wait({names[0]})", step, deadline))

    def num_keys(self, deadline: Deadline | None = None) -> int:
        """Return how many keys the whole store holds."""
        step: Step = lambda store: store.num_keys()  # noqa: E731
        return int(self._run("num_keys()", step, deadline or Deadline(_POST_S)))

    def post_set(self, key: str, value: str) -> None:
        """Set ``key`` some time later."""
        name = self._prefix + key
        self.connection.post(lambda store: store.set(name, value))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete ``keys`` some time later."""
        names = [self._prefix + key for key in keys]

        def step(store: Any) -> None:
            for name in names:
                store.delete_key(name)

        self.connection.post(step)

    def delete_after(
        self, counter: str, needed: int | str, keys: Iterable[str], first: Step | None = None
    ) -> None:
        """Count this rank in ``counter``; the one that completes ``needed`` deletes ``keys``.

        ``needed`` is a number, or the name of another counter. ``first`` runs before the deletion.
        """
        names = [self._prefix + key for key in (*keys, counter)]
        mine = self._prefix + counter

        def step(store: Any) -> None:
            count = store.add(mine, 1)
            most = needed if isinstance(needed, int) else store.add(self._prefix + needed, 0)
            if count >= most:
                if first is not None:
                    first(store)
                for name in names:
                    store.delete_key(name)

        self.connection.post(step)

    def client(self, deadline: Deadline) -> Any:
        """Return a client for one set-up, which waits until ``deadline``; no other code has it."""
        spares = self.connection.spares

        def step(store: Any) -> Any:
            own = spares.pop() if spares else _Clone(store)(deadline)
            own.set_timeout(deadline.timedelta())
            return own

        return self._run("clone()", step, deadline)

    def raw(self, timeout: float, deadline: Deadline) -> dist.Store:
        """Return a c10d store of these keys, which waits ``timeout`` seconds.

        It has its own connection, shared by all that wait as long: engines use it from other
        threads.
        """
        clients = self.connection.clients

        def step(store: Any) -> Any:
            own = clients.get(timeout)
            if own is None:
                own = clients[timeout] = _Clone(store)(deadline)
            own.set_timeout(timedelta(seconds=timeout))
            return own

        return dist.PrefixStore(self.name, self._run("clone()", step, deadline))


class EngineStore:
    """What an engine is given as its store while it sets itself up, by ``deadline``.

    ``begun`` is called when the engine begins to wait for the other members.
    """

    def __init__(
        self, store: BoundedStore, deadline: Deadline, begun: Callable[[], None] | None = None
    ) -> None:
        self._store, self._deadline, self._begun = store, deadline, begun
        self._client: Any = None

    def for_connecting(self) -> dist.Store:
        """Return a c10d store that waits until the deadline of the set-up; note that it begins."""
        if self._begun is not None:
            self._begun()
        if self._client is None:
            self._client = self._store.client(self._deadline)
        return dist.PrefixStore(self._store.name, self._client)

    def for_good(self, timeout: timedelta) -> dist.Store:
        """Return a c10d store for an engine that keeps it for the ring's life, as NCCL's does."""
        return self._store.raw(timeout.total_seconds(), self._deadline)

    def give_up(self) -> None:
        """Leave the client to a set-up that is late: the next one gets another."""
        self._client = None

    def end(self) -> None:
        """Give the client to a later set-up; this one is over on every member."""
        if self._client is not None:
            self._store.connection.spares.append(self._client)
        self._client = None
