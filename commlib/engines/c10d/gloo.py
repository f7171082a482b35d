"""The CPU engine: one gloo group per ring, outside torch's registry of groups."""

from datetime import timedelta
from typing import Any, ClassVar

from commlib.engines.c10d.engine import C10dEngine
from commlib.engines.reductions import Reducer
from commlib.rendezvous import host_exchange
from commlib.rendezvous.store import EngineStore


class GlooEngine(C10dEngine):
    """CPU ranks over gloo; connects to the other members when the ring is created."""

    name: ClassVar[str] = "gloo"
    reducer: ClassVar[Reducer] = Reducer("gloo", unsigned=False, bitwise=True)

    def _make(self, store: EngineStore, wait: timedelta) -> Any:
        one_network = self.hosts.one_network
        return host_exchange.connect(store, self.rank, self.size, wait, one_network)
