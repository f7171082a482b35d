"""`commlib doctor`, and the choice of packages that `make` makes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from commlib import flags
from commlib.tools import bootstrap_env
from tests.support.processes import run

CLI = ("-m", "commlib.tools.cli")
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


def test_doctor_complains_of_a_flag_that_cannot_be_read() -> None:
    done = doctor(FLAGS_comm_timeout_s="abc")
    assert done.returncode == 1
    assert done.stderr == ""
    assert "flags: FLAGS_comm_timeout_s='abc' is not a duration" in done.stdout
    assert "complaints: 1" in done.stdout


def test_other_commands_refuse_it_in_one_line() -> None:
    code, out, err = run(*CLI, "bench", "import", FLAGS_comm_timeout_s="abc")
    assert (code, out) == (2, "")
    assert err.startswith("commlib: FLAGS_comm_timeout_s='abc' is not") and err.count("\n") == 1


@pytest.mark.parametrize("package", ["click", "rich"])
def test_a_missing_package_is_said_in_one_line(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None\n" + (
        "from commlib.tools.cli import main; sys.exit(main())"
    )
    said = f"commlib: no {package} here; type pip install 'commlib[tools]'\n"
    assert run("-c", program) == (2, "", said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("demo", "--json", "{}"), "is a folder: expected a file"),
        (("demo", "--json", "{}/none/x.json"), "there is no folder {}/none; type mkdir -p {}/none"),
        (("bench", "import", "--out", "{}/file/below"), "{}/file is no folder"),
        (("bench", "--tune", "gloo"), "--tune takes only --nproc: given gloo"),
        (
            ("bench", "--tune", "--rounds", "3", "--out", "{}", "--rows", "2"),
            "given --rounds, --out, --rows; leave",
        ),
    ],
)
def test_refused_before_anything_runs(
    arguments: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, out, err = run(*CLI, *(word.format(tmp_path) for word in arguments))
    assert (code, out) == (2, "")
    assert said.format(*[tmp_path] * 2) in err and err.count("\n") == 1


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
