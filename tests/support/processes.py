"""Run a small program in its own process, from the root of the checkout."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RENDEZVOUS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    *("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS", "FLAGS_dynamic_static_unified_comm"),
)
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without any rendezvous, plus ``more``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in RENDEZVOUS and not name.startswith(LAUNCHERS)
    }
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def start(*arguments: str, **more: str) -> "subprocess.Popen[str]":
    """Start ``python <arguments>``; output is kept apart."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        env=environment(**more),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(*arguments: str, seconds: float = 120, **more: str) -> tuple[int, str, str]:
    """Run ``python <arguments>`` to its end; return exit code, output and error output."""
    process = start(*arguments, **more)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err
