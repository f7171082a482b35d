"""Launch of ranks on this machine, through torch's elastic launcher over loopback."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import commlib
from commlib import flags

MARGIN_S = 60  # for the imports before a rank's deadline and the launcher's exit after it
TAIL_LINES = 20


class LaunchError(RuntimeError):
    """Ranks ended without results; the message has the last lines of their logs."""


def launch(
    label: str,
    program: Sequence[str],
    ranks: int,
    environment: dict[str, str],
    folder: Path,
    deadline: float,
) -> None:
    """Run ``program`` (a script or ``-m module``, with arguments) on ``ranks`` ranks to its end.

    Logs are written into ``folder``. Raises ``LaunchError``, which begins with ``label``, if a
    rank fails or the program runs longer than ``deadline`` seconds plus a margin.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks)]
    command += ["--redirects", "3", "--log-dir", str(folder / "logs"), *program]
    code = _execute(command, environment, folder / "launcher.log", deadline + MARGIN_S)
    if code != 0:
        ended = "still running at the deadline" if code is None else f"exit code {code}"
        raise LaunchError(f"{label}: {ended}\n{_last_lines(folder)}")


def environment(unified: bool, **more: str) -> dict[str, str]:
    """Return the environment of a rank: this commlib, one thread, loopback and the flag."""
    root = str(Path(commlib.__file__).resolve().parent.parent)
    ours = {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
        flags.UNIFIED: str(int(unified)),
    }
    loopback = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**loopback, **os.environ, **ours, **more}


def one_gpu_for_all(rank: int) -> dict[str, str]:
    """Return the environment that lets ranks share a GPU.

    NCCL refuses two ranks of one host on one GPU, so each rank gets its own host id, and NCCL
    connects them by sockets. Push kernels map the memory of the other ranks as on several GPUs.
    """
    return {
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "NCCL_HOSTID": f"rank {rank}",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
    }


def _execute(
    command: list[str], environment: dict[str, str], log: Path, seconds: float
) -> int | None:
    """Return the exit code, or None if the command ran longer than ``seconds``."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _terminate(process)


def _terminate(process: "subprocess.Popen[bytes]") -> None:
    """Stop the launcher and, through it, its ranks; also after Ctrl-C."""
    process.terminate()
    try:
        process.wait(40)  # the launcher gives its ranks 30 s
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_lines(folder: Path) -> str:
    """Return the end of every rank's stderr, and of the launcher's log: who ended first, and how.

    A rank that a signal has ended says nothing itself.
    """
    logs = sorted(folder.glob("logs/**/stderr.log"))
    written = [log for log in logs if log.stat().st_size]
    return "\n".join(_tail(log) for log in (*written, folder / "launcher.log"))


def _tail(log: Path) -> str:
    source = f"rank {log.parent.name}" if log.name == "stderr.log" else "launcher"
    lines = log.read_text(errors="replace").splitlines()
    stacks = [number for number, line in enumerate(lines) if line.startswith("Timeout (")]
    if not stacks:
        return "\n".join([f"--- {source}, last lines:", *lines[-TAIL_LINES:]])
    # A rank past its deadline prints every thread: the main thread last, innermost calls first.
    threads = [
        number for number, line in enumerate(lines) if line.endswith("(most recent call first):")
    ]
    main = lines[threads[-1] :][:TAIL_LINES] if threads else []
    return "\n".join([f"--- {source}, last lines:", lines[stacks[-1]], *main])
