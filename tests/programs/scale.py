"""Count the requests of many waiting members: threads over one real TCP store.

``python -m tests.programs.scale MEMBERS RINGS SECONDS`` lets all members but one of each ring wait
for that time, and then starts the last ones. It prints the requests per second while all
wait, and the requests per member of a complete meeting.
"""

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from commlib.deadlines import Deadline
from commlib.rendezvous.connection import Connection
from commlib.rendezvous.roll_call import RollCall
from commlib.rendezvous.store import BoundedStore
from tests.support.stores import loopback_store

_REQUESTS = (
    *("set", "get", "add", "append", "check", "compare_set", "multi_get", "wait", "delete_key"),
    "num_keys",
)


class Counted:
    """A store that counts the requests of all members; ``wait`` and ``get`` are two messages."""

    def __init__(self, store: Any, counts: "Counter[str]") -> None:
        for name in _REQUESTS:
            setattr(self, name, self._counted(getattr(store, name), name, counts))

    @staticmethod
    def _counted(method: Any, name: str, counts: "Counter[str]") -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1  # under the interpreter's lock, precise enough for a sum
            return method(*args)

        return call


class _Opening:
    stage = ""

    def __init__(self, port: int, counts: "Counter[str]") -> None:
        self.port, self.counts = port, counts

    def __call__(self, deadline: Deadline) -> Counted:
        wait = timedelta(seconds=600)
        client = TCPStore("127.0.0.1", self.port, timeout=wait, wait_for_workers=False)
        return Counted(client, self.counts)


class ManyRanks:
    """``members`` ranks in ``rings`` equal rings; the last rank of each ring joins on demand."""

    def __init__(self, members: int, rings: int, timeout: float) -> None:
        self.counts: Counter[str] = Counter()
        self.server = loopback_store()
        each = members // rings
        self.rings = [tuple(range(ring * each, (ring + 1) * each)) for ring in range(rings)]
        self.timeout, self.outcomes = timeout, dict[int, str]()
        self.threads: list[threading.Thread] = []

    def join_rings(self, ranks: Sequence[int]) -> None:
        """Have ``ranks`` call ``meet`` and ``finish``, each in a thread."""
        for rank in ranks:
            thread = threading.Thread(target=self._member, args=(rank,), daemon=True)
            thread.start()
            self.threads.append(thread)

    def early(self) -> list[int]:
        """Return all ranks but the last of each ring."""
        return [rank for ring in self.rings for rank in ring[:-1]]

    def late(self) -> list[int]:
        """Return the last rank of each ring."""
        return [ring[-1] for ring in self.rings]

    def _member(self, rank: int) -> None:
        number = next(at for at, ring in enumerate(self.rings) if rank in ring)
        ranks, deadline = self.rings[number], Deadline(self.timeout)
        conn = Connection(_Opening(self.server.port, self.counts), "the simulation")
        try:
            call = RollCall(BoundedStore(conn, "run/"), rank)
            call.meet(number, ranks, deadline, "gloo", "the call").finish(None, deadline)
            self.outcomes[rank] = "met"
        except Exception as error:
            self.outcomes[rank] = type(error).__name__
        conn.close(self.timeout)

    def registered(self) -> int:
        """Return how many ranks wait (a direct query of the server, which is not counted)."""
        keys = [f"run/{key}" for key in self._arrived()]
        return sum(int(self.server.add(key, 0)) for key in keys)

    def _arrived(self) -> list[str]:
        from commlib.rendezvous.roll_call import ring_key

        return [f"{ring_key(at, ring)}/0/arrived" for at, ring in enumerate(self.rings)]

    def requests(self) -> int:
        """Return the number of requests of all members."""
        return sum(self.counts.values())

    def join(self) -> Counter[str]:
        """Wait for every member; return the number of members per outcome."""
        for thread in self.threads:
            thread.join(self.timeout)
        return Counter(self.outcomes.values())


def load(members: int, rings: int, seconds: float, timeout: float = 300) -> dict[str, Any]:
    """Return the requests of ``members`` that wait in ``rings``, and the outcomes."""
    many = ManyRanks(members, rings, timeout)
    many.join_rings(many.early())
    end = Deadline(timeout)
    end.poll(lambda: many.registered() == len(many.early()), longest_sleep=0.2)
    before, began = many.requests(), time.monotonic()
    time.sleep(seconds)
    waited, spent = many.requests() - before, time.monotonic() - began
    many.join_rings(many.late())
    ended = many.join()
    Deadline(10).poll(lambda: many.server.num_keys() <= members + 2 * rings + 2)
    return {
        "members": sum(map(len, many.rings)),
        "rings": rings,
        "requests while waiting": waited,
        "seconds": round(spent, 1),
        "requests per second while waiting": round(waited / spent, 1),
        "requests per member": round(many.requests() / sum(map(len, many.rings)), 1),
        "ended": dict(ended),
        "keys": many.server.num_keys(),
    }


if __name__ == "__main__":
    threading.stack_size(256 * 1024)
    print(json.dumps(load(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])), indent=1))
