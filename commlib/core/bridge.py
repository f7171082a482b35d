"""From a ring to the process group of ``torch.distributed`` over it."""

from collections.abc import Callable

import torch.distributed as dist

from commlib.core.ring import Ring

Maker = Callable[[Ring], dist.ProcessGroup]
_makers: list[Maker] = []


def use(maker: Maker) -> None:
    """Make the process groups of rings with ``maker``, which is in a room above this one."""
    _makers[:] = [maker]


class Bridge(Ring):
    """Conversion of a ring to a process group, for other libraries."""

    def process_group(self) -> dist.ProcessGroup:
        """Return the process group over this ring, the same object at every call.

        For ``DDP(process_group=...)``, ``DeviceMesh.from_group``, checkpoints and the like: their
        calls are calls of this ring. No member waits for another one.

        Returns:
            A group of the backend "commlib". Its calls end when the ring is closed.

        Raises:
            ArgumentError: ``torch.distributed`` is not initialised; it keeps the list of groups.
        """
        return _makers[0](self)
