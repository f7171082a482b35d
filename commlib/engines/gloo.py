"""The CPU engine: a gloo group of its own for each ring, outside torch's registry of groups."""

from datetime import timedelta
from typing import Any, ClassVar

from commlib.engines.c10d import C10dContext
from commlib.engines.reductions import Reducer
from commlib.rendezvous import host_exchange
from commlib.rendezvous.store import EngineStore


class GlooCommContext(C10dContext):
    """A ring of CPU ranks over gloo; connects to the other members when it is created."""

    engine: ClassVar[str] = "gloo"
    reducer: ClassVar[Reducer] = Reducer("gloo", unsigned=False, premul=False)

    def _make(self, store: EngineStore, wait: timedelta) -> Any:
        return host_exchange.connect(store, self.rank, self.size, wait, self._one_network)
