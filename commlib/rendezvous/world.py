"""The position of this process among all ranks of its program."""

from dataclasses import dataclass

from commlib.errors import BootstrapError


@dataclass(frozen=True)
class World:
    """The position of this process among all ranks.

    ``address`` is None for a process that is alone or that joins ``torch.distributed``. A local
    rank or size is None where the environment does not give it.
    """

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    address: tuple[str, int] | None
    hosts_store: bool
    prefix: str

    def checked(self) -> "World":
        """Return this world. Raises ``BootstrapError`` if the rank is not below the size."""
        if not 0 <= self.rank < self.size:
            raise BootstrapError(
                f"rank {self.rank} with world size {self.size}: expected 0 <= rank < size; "
                f"correct RANK and WORLD_SIZE (or PADDLE_TRAINER_ID and PADDLE_TRAINERS_NUM)"
            )
        return self
