"""All collectives of a ring."""

from commlib.core.collectives.exchanges import Exchanges
from commlib.core.collectives.objects import Objects
from commlib.core.collectives.uneven import Uneven


class Collectives(Uneven, Exchanges, Objects):
    """The collectives of a ring, over tensors and over objects."""
