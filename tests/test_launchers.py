"""Programs started by Slurm, mpirun or multiprocessing: joined, rejected or alone."""

from pathlib import Path

import pytest

from commlib.errors import BootstrapError
from commlib.rendezvous.launchers import launched
from tests.support.ports import free_port
from tests.support.processes import run, start

SLURM = {"SLURM_PROCID": "{rank}", "SLURM_NTASKS": "{size}", "SLURM_LOCALID": "{rank}"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "{rank}",
    "OMPI_COMM_WORLD_SIZE": "{size}",
    "OMPI_COMM_WORLD_LOCAL_RANK": "{rank}",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "{size}",
}
MPICH = {"PMI_RANK": "{rank}", "PMI_SIZE": "{size}"}
LAUNCHERS = pytest.mark.parametrize(
    "names", [SLURM, OPEN_MPI, MPICH], ids=["slurm", "openmpi", "mpich"]
)
PROGRAM = (
    "import torch, commlib\n"
    "ring = commlib.init('gloo', timeout=30)\n"
    "print(ring.rank, ring.size, commlib.ops.all_reduce(torch.ones(1)).item())\n"
)


def variables(names: dict[str, str], rank: int, size: int) -> dict[str, str]:
    return {name: text.format(rank=rank, size=size) for name, text in names.items()}


@LAUNCHERS
def test_joined_with_an_address(names: dict[str, str]) -> None:
    port = str(free_port())
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [start("-c", PROGRAM, **variables(names, rank, 2), **address) for rank in range(2)]
    try:
        ends = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert ends == [("0 2 2.0\n", ""), ("1 2 2.0\n", "")]


@LAUNCHERS
def test_rejected_without_an_address(names: dict[str, str]) -> None:
    code, out, err = run("-c", PROGRAM, **variables(names, 1, 4))
    assert (code, out) == (1, "")
    rank, size = list(names)[:2]
    text = err.splitlines()[-1]
    assert f"BootstrapError: {rank}=1 and {size}=4 show that a launcher started 4 ranks" in text
    assert "MASTER_ADDR and MASTER_PORT are not set; export MASTER_ADDR" in text
    assert f"unset {rank} and {size} to run alone" in text


@LAUNCHERS
def test_one_rank_runs_alone(names: dict[str, str]) -> None:
    assert run("-c", PROGRAM, **variables(names, 0, 1)) == (0, "0 1 1.0\n", "")


def test_children_of_multiprocessing_are_warned(tmp_path: Path) -> None:
    """torch.multiprocessing.spawn sets no rendezvous: each child would be alone silently."""
    program = tmp_path / "program.py"
    program.write_text(
        "import torch.multiprocessing as mp\n"
        "def main(index):\n"
        "    import commlib\n"
        "    print(commlib.init('gloo').size, flush=True)\n"
        "    commlib.new_ring(1, [0])\n"
        "if __name__ == '__main__': mp.spawn(main, nprocs=2)\n"
    )
    code, out, err = run(str(program))
    assert (code, out) == (0, "1\n1\n")
    assert err.count("was started by multiprocessing without a rendezvous") == 2
    assert "set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each process" in err


def test_ranks_of_mpirun_inside_a_slurm_job() -> None:
    """Mpirun's daemons run as Slurm tasks, one per host, and their variables reach the ranks."""
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}
    result = launched({**variables(OPEN_MPI, 3, 8), **slurm})
    assert result is not None
    assert (result.rank, result.size, result.local_rank, result.local_size) == (3, 8, 3, 8)


@pytest.mark.parametrize(("text", "size"), [("8(x2)", 8), ("4", 4), ("2,1", None)])
def test_the_local_size_of_slurm(text: str, size: int | None) -> None:
    step = {"SLURM_STEP_NUM_TASKS": "16", "SLURM_NTASKS": "64", "SLURM_STEP_TASKS_PER_NODE": text}
    result = launched({"SLURM_PROCID": "9", "SLURM_LOCALID": "1", **step})
    assert result is not None
    assert (result.rank, result.size, result.local_rank, result.local_size) == (9, 16, 1, size)


def test_the_local_rank_of_slurm_under_pmi() -> None:
    """Srun --mpi=pmi2 gives both; MPICH's local rank is missing there."""
    result = launched({**variables(MPICH, 9, 16), **variables(SLURM, 9, 16), "SLURM_LOCALID": "1"})
    assert result is not None
    assert (result.names[0], result.rank, result.local_rank) == ("PMI_RANK", 9, 1)


def test_unreadable_ranks() -> None:
    with pytest.raises(BootstrapError, match=r"SLURM_PROCID='x': expected a whole number"):
        launched(variables(SLURM, 0, 2) | {"SLURM_PROCID": "x"})
    with pytest.raises(BootstrapError, match=r"PMIX_RANK='1'.*export RANK, WORLD_SIZE"):
        launched({"PMIX_RANK": "1"})
    assert launched({"PMIX_RANK": "0"}) is None
    assert launched({}) is None


@pytest.mark.parametrize("ranked", [True, False], ids=["RANK", "nothing"])
def test_an_initialised_torch_distributed_is_joined(tmp_path: Path, ranked: bool) -> None:
    """A rendezvous by file sets no MASTER_ADDR; a job script may export RANK all the same."""
    program = (
        "import sys, torch.distributed as dist\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/meet', world_size=2,\n"
        "                        rank=int(sys.argv[1]))\n" + PROGRAM
    )
    ranks = [
        start(
            "-c", program, str(rank), **({"RANK": str(rank), "WORLD_SIZE": "2"} if ranked else {})
        )
        for rank in range(2)
    ]
    try:
        ends = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [out for out, _ in ends] == ["0 2 2.0\n", "1 2 2.0\n"]
    assert [rank.returncode for rank in ranks] == [0, 0]
