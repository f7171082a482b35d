"""`commlib doctor`, and the choice of packages that `make` makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commlib import flags
from commlib.tools import bootstrap_env

ROOT = Path(__file__).resolve().parent.parent


def doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    """Run the doctor in a process of its own: it loads NCCL where there is one."""
    return subprocess.run(
        [sys.executable, "-m", "commlib.tools.cli", "doctor"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_doctor_shows_the_machine() -> None:
    done = doctor(FLAGS_dynamic_static_unified_comm="yes")
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "torch",
        "numpy",
        "rendezvous",
        "complaints: 0",
        "no engine reduces 16-bit integers",
        *(r["name"] for r in flags.rows()),
    ):
        assert text in done.stdout
    unified = next(line for line in done.stdout.splitlines() if flags.UNIFIED in line)
    assert "True" in unified and "environment" in unified


def test_doctor_complains_of_half_a_rendezvous() -> None:
    done = doctor(RANK="0")
    assert done.returncode == 1
    assert "rendezvous: WORLD_SIZE is not set" in done.stdout
    assert "complaints: 1" in done.stdout


@pytest.mark.parametrize(
    ("driver", "torch", "extra"),
    [
        (None, None, None),  # no GPU
        (None, 13, None),
        (13, 13, "cuda13"),
        (13, 12, "cuda12"),
        (14, 13, "cuda13"),
    ],
)
def test_the_cuda_extra_follows_torch(
    driver: int | None, torch: int | None, extra: str | None
) -> None:
    assert bootstrap_env._cuda_extra(driver, torch) == extra


@pytest.mark.parametrize("torch", [None, 13])
def test_unusable_gpus_are_said(torch: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert bootstrap_env._cuda_extra(12, torch) is None
    assert "GPUs stay unused: the driver supports CUDA 12" in capsys.readouterr().out
