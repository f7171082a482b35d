"""All collectives of a ring."""

from commlib.core.collectives.all_gather import AllGather
from commlib.core.collectives.exchanges import Exchanges
from commlib.core.collectives.experts import Experts
from commlib.core.collectives.objects import Objects
from commlib.core.collectives.reductions import Reductions


class Collectives(Reductions, AllGather, Exchanges, Experts, Objects):
    """The collectives of a ring, over tensors and over objects."""
