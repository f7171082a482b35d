"""Ranks from the environment variables of launchers other than torchrun."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from commlib.errors import BootstrapError


class Launched(NamedTuple):
    """The rank of this process among those that one launcher started."""

    names: tuple[str, str]  # the variables of rank and size
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


# The variables of rank, size, local rank and local size. mpirun precedes srun: inside a Slurm job
# it may start its daemons with srun, whose variables then reach the ranks as well. The task count
# of a job step precedes that of the job.
_VARIABLES = (
    (
        *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    (
        *("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    ),
    ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_TASKS_PER_NODE"),
)


def launched(environment: Mapping[str, str]) -> Launched | None:
    """Find the launcher that started this process.

    Args:
        environment: The environment variables of this process.

    Returns:
        Rank and size from Open MPI, MVAPICH, MPICH (Hydra) or Slurm. The local rank and size are
        those of any launcher that agrees on rank and size. None without a launcher.

    Raises:
        BootstrapError: A variable is not a whole number, or PMIx gives a rank without a size.
    """
    rows = [_row(environment, *names) for names in _VARIABLES]
    launchers = [row for row in rows if row is not None]
    if not launchers:
        if environment.get("PMIX_RANK", "0") != "0":
            raise BootstrapError(
                f"PMIX_RANK={environment['PMIX_RANK']!r} shows a launcher that does not give the "
                f"number of ranks; export RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"
            )
        return None
    first = launchers[0]
    agreeing = [row for row in launchers if (row.rank, row.size) == (first.rank, first.size)]
    ranks = [row.local_rank for row in agreeing if row.local_rank is not None]
    sizes = [row.local_size for row in agreeing if row.local_size is not None]
    return first._replace(local_rank=next(iter(ranks), None), local_size=next(iter(sizes), None))


def _row(
    environment: Mapping[str, str], rank: str, size: str, local_rank: str, local_size: str
) -> Launched | None:
    if rank not in environment or size not in environment:
        return None
    for name in (rank, size):
        if not environment[name].isdigit():
            raise BootstrapError(f"{name}={environment[name]!r}: expected a whole number >= 0")
    ranks = int(environment[rank]), int(environment[size])
    local_ranks = _number(environment.get(local_rank)), _number(environment.get(local_size))
    return Launched((rank, size), *ranks, *local_ranks)


def _number(text: str | None) -> int | None:
    """Read ``8``, or Slurm's ``8(x2)`` for two hosts of 8; None if hosts differ."""
    match = re.fullmatch(r"(\d+)(\(x\d+\))?", text or "")
    return int(match[1]) if match else None
