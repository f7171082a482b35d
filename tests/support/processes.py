"""Run a small program in its own process, from the root of the checkout.

Programs are forked from a process that has imported torch (``warm_server.py``), also the ranks of
a launcher among them. ``fresh`` starts another interpreter instead.
"""

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
RENDEZVOUS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_USE_AGENT_STORE", "PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM"),
    *("PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS", "FLAGS_dynamic_static_unified_comm"),
)
START_S = 60
# What a process gets that loads Inductor and is forked from then on.
LOADING = {
    "OMP_NUM_THREADS": "1",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # else Inductor starts CUDA, which no fork survives
}
WHOLE_EXIT = {"COMMLIB_WHOLE_EXIT": "1"}  # for tests of the exit itself: `warm_server.py`
_servers: list["subprocess.Popen[bytes]"] = []  # alive while this process is
LAUNCHERS = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MV2_")


def environment(**more: str) -> dict[str, str]:
    """Return this process's environment without any rendezvous, plus ``more``."""
    base_env = {
        name: value
        for name, value in os.environ.items()
        if name not in RENDEZVOUS and not name.startswith(LAUNCHERS)
    }
    return {**base_env, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **more}


def start(*arguments: str, fresh: bool = False, **more: str) -> "subprocess.Popen[str]":
    """Start ``python <arguments>``; output is kept apart."""
    return subprocess.Popen(
        [sys.executable if fresh else _warm_python(), *arguments],
        env={**environment(), **({} if fresh else warm_ranks()), **more},
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(
    *arguments: str, seconds: float = 120, fresh: bool = False, **more: str
) -> tuple[int, str, str]:
    """Run ``python <arguments>`` to its end; return exit code, output and error output."""
    process = start(*arguments, fresh=fresh, **more)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, out, err


def warm_ranks() -> dict[str, str]:
    """Return the variables that make torchrun fork its ranks from the loaded process too."""
    return {"COMMLIB_WARM_SERVER": _warm_server(), "PYTHON_EXEC": _warm_python()}


@functools.cache
def _warm_python() -> str:
    """Write the executable that represents Python in these programs; return its path."""
    client = _folder() / "python"
    source = (Path(__file__).parent / "warm_client.py").read_text()
    client.write_text(f"#!{sys.executable} -IS\n{source}")
    client.chmod(0o700)
    return str(client)


@functools.cache
def _warm_server() -> str:
    """Start the process from which programs are forked; return the path of its socket.

    It ends with this process, which holds the other end of its standard input.
    """
    path = _folder() / "socket"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.support.warm_server", str(path)],
        env=environment(**LOADING),
        cwd=ROOT,
        stdin=subprocess.PIPE,
    )
    _servers.append(server)
    end = time.monotonic() + START_S
    while not path.exists():
        if server.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the server of programs did not start: {server.poll()}")
        time.sleep(0.01)
    return str(path)


@functools.cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="commlib-tests-")
    atexit.register(shutil.rmtree, folder)
    return Path(folder)
