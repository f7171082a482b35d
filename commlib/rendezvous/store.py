"""Keys of a rendezvous store with a deadline per operation, and the store of an engine's set-up."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from commlib.deadlines import Deadline
from commlib.rendezvous.clone_opening import CloneOpening, clone
from commlib.rendezvous.connection import POST_S, Connection, Step, grace


class BoundedStore:
    """The keys under ``prefix``; each operation ends by the deadline that it is given."""

    def __init__(self, connection: Connection, prefix: str = "") -> None:
        self.connection, self._prefix = connection, prefix

    @staticmethod
    def of(store: Any) -> "BoundedStore":
        """Return a bounded form of ``store``, with its own connection if it can be cloned."""
        if isinstance(store, BoundedStore):
            return store
        return BoundedStore(Connection(CloneOpening(store), f"a {type(store).__name__}"))

    @property
    def name(self) -> str:
        """The prefix without its last slash."""
        return self._prefix.rstrip("/")

    def path(self, key: str) -> str:
        """Return the full name of ``key``, for steps that use the c10d store directly."""
        return self._prefix + key

    def apart(self) -> "BoundedStore":
        """Return the same keys over another connection, for waits that would block this one."""
        connection = Connection(self.connection._opening, self.connection.where)
        return BoundedStore(connection, self._prefix)

    def under(self, name: str) -> "BoundedStore":
        """Return the keys under ``name``, as ``PrefixStore(name, store)`` does."""
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
        """Set ``key`` if its value is ``expected`` ("": none), and return its value after that."""
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
            except RuntimeError:  # a timeout; if the server has exited, check() raises too
                return bool(store.check(names))
            return True

        return bool(self._run(f"wait({names[0]})", step, deadline))

    def num_keys(self, deadline: Deadline | None = None) -> int:
        """Return the number of keys in the whole store."""
        step: Step = lambda store: store.num_keys()  # noqa: E731
        return int(self._run("num_keys()", step, deadline or Deadline(POST_S)))

    def post_set(self, key: str, value: str) -> None:
        """Queue setting ``key``; nobody waits for it."""
        name = self._prefix + key
        self.connection.post(lambda store: store.set(name, value))

    def delete(self, keys: Iterable[str]) -> None:
        """Queue the deletion of ``keys``; nobody waits for it."""
        names = [self._prefix + key for key in keys]

        def step(store: Any) -> None:
            for name in names:
                store.delete_key(name)

        self.connection.post(step)

    def delete_after(
        self, counter: str, needed: int | str, keys: Iterable[str], first: Step | None = None
    ) -> None:
        """Add this rank to ``counter``; the rank that completes ``needed`` deletes ``keys``.

        ``needed`` is a number, or the name of another counter. ``first`` runs before the deletion.
        Nobody waits for the deletion.
        """
        names = [self._prefix + key for key in (*keys, counter)]
        counter_name = self._prefix + counter
        target_name = None if isinstance(needed, int) else self._prefix + needed

        def step(store: Any) -> None:
            count = store.add(counter_name, 1)
            target = needed if target_name is None else store.add(target_name, 0)
            if count >= target:
                if first is not None:
                    first(store)
                for name in names:
                    store.delete_key(name)

        self.connection.post(step)

    def client(self, deadline: Deadline) -> Any:
        """Return a client that one set-up has to itself; its operations wait until ``deadline``."""
        spares = self.connection.spares

        def step(store: Any) -> Any:
            client = spares.pop() if spares else clone(store)
            client.set_timeout(deadline.timedelta())
            return client

        return self._run("clone()", step, deadline)

    def raw(self, timeout: float, deadline: Deadline) -> dist.Store:
        """Return a c10d store of these keys whose operations wait ``timeout`` seconds.

        Stores with the same timeout share a connection that is separate from this one, because
        engines use it from other threads.
        """
        clients = self.connection.clients

        def step(store: Any) -> Any:
            client = clients.get(timeout)
            if client is None:
                client = clients[timeout] = clone(store)
            client.set_timeout(timedelta(seconds=timeout))
            return client

        return dist.PrefixStore(self.name, self._run("clone()", step, deadline))


class EngineStore:
    """The store that an engine uses during its set-up, which ends by ``deadline``.

    ``begun`` is called when the engine begins to wait for the other members.
    """

    def __init__(
        self, store: BoundedStore, deadline: Deadline, begun: Callable[[], None] | None = None
    ) -> None:
        self._store, self._deadline, self._begun = store, deadline, begun
        self._client: Any = None

    def for_connecting(self) -> dist.Store:
        """Return a c10d store that waits until the deadline; records that connecting has begun."""
        if self._begun is not None:
            self._begun()
        if self._client is None:
            self._client = self._store.client(self._deadline)
        return dist.PrefixStore(self._store.name, self._client)

    def for_good(self, timeout: timedelta) -> dist.Store:
        """Return a c10d store that the engine keeps as long as the ring exists, as NCCL does."""
        return self._store.raw(timeout.total_seconds(), self._deadline)

    def give_up(self) -> None:
        """Abandon the client to a set-up that timed out; the next set-up gets another client."""
        self._client = None

    def end(self) -> None:
        """Return the client for a later set-up; this set-up has ended on every member."""
        if self._client is not None:
            self._store.connection.spares.append(self._client)
        self._client = None
