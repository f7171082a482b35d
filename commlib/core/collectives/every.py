"""All collectives of a ring."""

from commlib.core.collectives.all_gather import AllGather
from commlib.core.collectives.all_reduce import AllReduce
from commlib.core.collectives.all_to_all import AllToAll
from commlib.core.collectives.barrier import Barrier
from commlib.core.collectives.broadcast import Broadcast
from commlib.core.collectives.exchange_rows import ExchangeRows
from commlib.core.collectives.experts import Experts
from commlib.core.collectives.gather import Gather
from commlib.core.collectives.objects import Objects
from commlib.core.collectives.reduce import Reduce
from commlib.core.collectives.reduce_scatter import ReduceScatter
from commlib.core.collectives.scatter import Scatter
from commlib.core.collectives.send_recv import SendRecv


class Collectives(
    AllReduce,
    Reduce,
    ReduceScatter,
    Broadcast,
    AllGather,
    Gather,
    Scatter,
    AllToAll,
    ExchangeRows,
    SendRecv,
    Barrier,
    Experts,
    Objects,
):
    """The collectives of a ring, over tensors and over objects.

    No collective inherits another one; those that another one calls are declared in ``Ring``.
    """
