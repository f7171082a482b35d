"""The device of a rank, for the GPUs that a process sees and the ranks that a launcher gives."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from commlib.core import devices
from commlib.core.devices import default_device
from commlib.errors import ArgumentError, DeviceError
from commlib.log import log
from commlib.rendezvous.environment import World

See = Callable[..., None]


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> See:
    """``see(4)`` makes torch report 4 of the host's 8 GPUs; ``current`` is already in use."""

    def gpus(count: int, current: int | None = None, host: int = 8) -> None:
        log._said.clear()
        for number in range(host):
            (tmp_path / f"{host}" / f"{number}").mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(devices, "_DRIVER", tmp_path / f"{host}")
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)

    return gpus


def world(
    rank: int, size: int, local_rank: int | None = None, local_size: int | None = None
) -> World:
    return World(rank, size, local_rank, local_size, None, False, "")


@pytest.mark.parametrize(
    ("count", "place", "device"),
    [
        (8, world(9, 16, 1, 8), "cuda:1"),  # torchrun
        (8, world(9, 16, 1), "cuda:1"),  # Slurm without LOCAL_WORLD_SIZE
        (1, world(9, 16, 1, 8), "cuda:0"),  # each rank sees its own GPU
        (1, world(9, 16), "cuda:0"),  # a pod per GPU
        (8, world(9, 16), "cuda:1"),  # RANK and WORLD_SIZE only, 8 per host
        (8, world(1, 2), "cuda:1"),
        (8, world(0, 1), "cuda:0"),
        (0, world(9, 16, 1, 8), "cpu"),
    ],
)
def test_a_gpu_is_chosen_wherever_one_is_visible(
    see: See, count: int, place: World, device: str
) -> None:
    see(count)
    assert default_device(place, None) == torch.device(device)
    assert default_device(place, "gloo") == torch.device("cpu")
    if count:
        assert default_device(place, "nccl") == torch.device(device)


def test_the_current_gpu_without_a_local_rank(see: See) -> None:
    """torch.distributed over several hosts: the global rank says nothing about the host."""
    see(8, current=5)
    assert default_device(world(9, 16), None) == torch.device("cuda:5")
    assert default_device(world(9, 16, 3), None) == torch.device("cuda:3")
    see(8, current=0)
    assert default_device(world(9, 16), None) == torch.device("cuda:1")


def test_more_ranks_than_gpus(see: See, caplog: pytest.LogCaptureFixture) -> None:
    see(2)
    assert default_device(world(3, 4, 3, 4), None) == torch.device("cpu")
    assert "4 local ranks share 2 GPUs: all of them use the CPU" in caplog.text
    assert caplog.records[0].levelno == logging.WARNING
    with pytest.raises(DeviceError, match=r"local rank 3.*sees 2 GPUs.*device="):
        default_device(world(3, 4, 3, 4), "nccl")
    with pytest.raises(DeviceError, match=r"local rank 3.*sees 2 GPUs"):
        default_device(world(3, 4, 3), None)  # other ranks take a GPU
    see(1)
    assert default_device(world(1, 2, 1, 2), None) == torch.device("cuda:0")
    assert "2 local ranks, and this process sees one GPU: it uses cuda:0" in caplog.text
    see(1, host=1)  # a machine with one GPU
    assert default_device(world(1, 2, 1, 2), None) == torch.device("cpu")
    assert "2 local ranks share 1 GPU: all of them use the CPU" in caplog.text
    assert default_device(world(1, 2, 1, 2), "nccl") == torch.device("cuda:0")
    assert default_device(world(1, 2), None) == torch.device("cuda:0")  # a pod with one GPU


def test_wrong_backends(see: See) -> None:
    see(0)
    with pytest.raises(DeviceError, match=r"this process sees no GPU.*backend='gloo'"):
        default_device(world(0, 1), "nccl")
    wrong: Any = "mpi"
    with pytest.raises(ArgumentError, match="backend='mpi'"):
        default_device(world(0, 1), wrong)
