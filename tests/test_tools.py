"""The command `commlib`, its doctor, and the choice of packages that `make` makes."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest
import torch

import commlib
from commlib import flags
from commlib.tools import bootstrap_env
from commlib.tools.bench.command import BENCHMARKS
from tests.support.processes import run

CLI = ("-m", "commlib")
ROOT = Path(__file__).resolve().parent.parent


def doctor(**environment: str) -> tuple[int, str, str]:
    """Run the doctor in a separate process: it loads NCCL if there is one."""
    return run(*CLI, "doctor", **{"COLUMNS": "200", **environment})


def test_doctor_shows_the_machine() -> None:
    code, out, err = doctor(FLAGS_dynamic_static_unified_comm="yes")
    assert code == 0, out + err
    for text in (
        "torch",
        "numpy",
        "rendezvous",
        "complaints: 0",
        "no engine reduces 16-bit integers",
        *(r["name"] for r in flags.rows()),
    ):
        assert text in out
    unified = next(line for line in out.splitlines() if flags.UNIFIED in line)
    assert "True" in unified and "environment" in unified


def test_doctor_says_what_is_wrong_first() -> None:
    code, out, _ = doctor(FLAGS_comm_timeout_s="abc")
    assert code == 1
    first, second = out.splitlines()[:2]
    assert first == "complaints: 1" and second.startswith("flags: FLAGS_comm_timeout_s='abc'")


def test_doctor_as_json() -> None:
    code, out, err = run(*CLI, "doctor", "--json")
    assert (code, err) == (0, "")
    report = json.loads(out)
    assert report["complaints"] == []
    features = {row["name"].split()[0]: (row["here"], row["why not"]) for row in report["features"]}
    assert features["gloo"] == ("yes", "")
    if not torch.cuda.is_available():
        assert features["nccl"] == features["push"] == ("no", "no GPU that torch can use")
    assert {row["name"] for row in report["flags"]} == {row["name"] for row in flags.rows()}
    assert {"name": "commlib", "version": commlib.__version__} in report["versions"]
    assert {"name": "cores", "value": str(os.cpu_count())} in report["machine"]
    assert [row["name"] for row in report["machine"]] == ["system", "CPU", "cores"]


def test_help_of_bench_names_every_benchmark() -> None:
    code, out, _ = run(*CLI, "bench", "--help")
    names = " ".join(out.split()).split("NAMES are: ")[1].split(".")[0]
    assert code == 0 and names.split(", ") == list(BENCHMARKS)


def test_doctor_complains_of_a_flag_that_cannot_be_read() -> None:
    code, out, err = doctor(FLAGS_comm_timeout_s="abc")
    assert (code, err) == (1, "")
    assert "flags: FLAGS_comm_timeout_s='abc' is not a duration" in out
    assert "complaints: 1" in out


def test_other_commands_reject_it_in_one_line() -> None:
    code, out, err = run(*CLI, "bench", "import", FLAGS_comm_timeout_s="abc")
    assert (code, out) == (2, "")
    assert err.startswith("commlib: FLAGS_comm_timeout_s='abc' is not") and err.count("\n") == 1


@pytest.mark.parametrize("package", ["click", "rich"])
def test_a_missing_package_is_reported_in_one_line(package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None\n" + (
        "from commlib.tools.cli import main; sys.exit(main())"
    )
    error = f"commlib: {package} is not installed; run pip install '/path/to/commlib[tools]'\n"
    assert run("-c", program) == (2, "", error)


def test_version() -> None:
    assert run(*CLI, "--version") == (0, f"commlib {commlib.__version__}\n", "")


def test_flags() -> None:
    code, out, err = run(*CLI, "flags", FLAGS_comm_timeout_s="7")
    assert (code, err) == (0, "")
    timeout = next(line for line in out.splitlines() if "FLAGS_comm_timeout_s" in line)
    assert timeout.split() == ["FLAGS_comm_timeout_s", "seconds", "600.0", "7.0", "environment"]


def test_a_narrow_terminal_cuts_nothing_off() -> None:
    _, out, _ = doctor(COLUMNS="80", FLAGS_comm_close_timeout_s="123456789")
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80
    letters = Counter(out)
    texts = [name for row in flags.rows() for name in (row["name"], row["type"])]
    assert not Counter("".join(texts)) - letters


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("demo", "--json", "{}"), "is a folder: expected a file"),
        (("demo", "--json", "{}/none/x.json"), "there is no folder {}/none; run mkdir -p {}/none"),
        (("bench", "import", "--out", "{}/file/below"), "{}/file is not a folder"),
        (("bench", "--tune", "gloo"), "--tune takes only --nproc: given gloo"),
        (
            ("bench", "--tune", "--rounds", "3", "--out", "{}", "--rows", "2"),
            "given --rounds, --out, --rows; remove",
        ),
    ],
)
def test_rejected_before_anything_runs(
    arguments: tuple[str, ...], error: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    code, out, err = run(*CLI, *(word.format(tmp_path) for word in arguments))
    assert (code, out) == (2, "")
    assert error.format(*[tmp_path] * 2) in err and err.count("\n") == 1


def test_doctor_complains_of_half_a_rendezvous() -> None:
    code, out, _ = doctor(RANK="0")
    assert code == 1
    assert "rendezvous: WORLD_SIZE is not set" in out
    assert "complaints: 1" in out


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
def test_unusable_gpus_are_reported(torch: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    assert bootstrap_env._cuda_extra(12, torch) is None
    assert "GPUs stay unused: the driver supports CUDA 12" in capsys.readouterr().out
