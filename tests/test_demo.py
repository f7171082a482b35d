"""`commlib demo`: its verdict on doctored results, its exit codes, and one whole run."""

import copy
import importlib.util
import io
import json
import math
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import commlib
from commlib.tools.demo.command import conclude, run_demo
from commlib.tools.demo.compare import compare
from commlib.tools.demo.runs import MODES, PROGRAM, Launch, Mode, Report
from commlib.tools.demo.truth import FORMULAS
from commlib.tools.launch import LaunchError, environment, launch

RANKS = 2
OFF, ON, OFF_COMPILED, ON_COMPILED = MODES
Reports = dict[Mode, Report]


def record(values: Any) -> dict[str, Any]:
    return {
        "shape": list(values.shape),
        "dtype": str(values.dtype),
        "values": [value.hex() for value in values.flatten().tolist()],
    }


@pytest.fixture
def reports() -> Reports:
    """Reports of four runs that agree."""
    x = np.random.default_rng(0).integers(1, 9, (RANKS, 2 * RANKS, 4)).astype(np.float32)
    operators = {name: record(formula(x)) for name, formula in FORMULAS.items()}
    one = {
        "ranks": RANKS,
        "device": "cpu",
        "operators": operators,
        "training": {
            "loss": [(2.0).hex(), (1.0).hex()],
            "gradient norm": [(0.5).hex(), (0.25).hex()],
        },
        "first_step_s": 1.0,
        "step_s": 0.01,
        "seconds": 5.0,
        "memory_bytes": 2**20,
        "communicators": [{"communicator": True, "bytes": 2**20}],
    }
    engine = {True: "gloo", False: "c10d"}
    return {mode: copy.deepcopy(one) | {"engine": engine[mode.unified]} for mode in MODES}


def failures(reports: Reports) -> list[str]:
    return [failure for row in compare(reports, "gloo") for failure in row.failures]


def test_equal_results_agree(reports: Reports, capsys: pytest.CaptureFixture[str]) -> None:
    assert failures(reports) == []

    assert conclude(reports, "gloo") == 0

    assert "all results agree" in capsys.readouterr().out


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.label)
@pytest.mark.parametrize("name", [name for name in FORMULAS if name != "input"])
def test_one_wrong_bit_of_a_collective_is_named(reports: Reports, name: str, mode: Mode) -> None:
    values = reports[mode]["operators"][name]["values"]
    values[-1] = np.nextafter(np.float32(float.fromhex(values[-1])), np.float32(9)).item().hex()

    errors = failures(reports)

    assert errors and all(failure.startswith(name) for failure in errors)
    assert any(mode.label in failure for failure in errors)


def test_a_collective_that_is_wrong_everywhere_is_found(reports: Reports) -> None:
    for report in reports.values():
        report["operators"]["c_allreduce_sum"] = report["operators"]["c_allreduce_max"]

    (failure,) = failures(reports)

    assert "c_allreduce_sum, flag off, eager against the formula" in failure


def test_zero_and_negative_zero_are_other_bits(reports: Reports) -> None:
    values = reports[ON]["operators"]["c_embedding"]["values"]
    values[values.index((0.0).hex())] = (-0.0).hex()

    (failure,) = failures(reports)

    assert "c_embedding, flag on, eager" in failure


def test_a_missing_collective_is_a_failure(reports: Reports) -> None:
    del reports[ON]["operators"]["alltoall"]

    assert failures(reports) == ["alltoall, flag on, eager against flag off, eager: missing"]


@pytest.mark.parametrize("change", ["shape", "dtype"])
def test_another_shape_or_dtype_is_a_failure(reports: Reports, change: str) -> None:
    other = {"shape": [RANKS, 2, 8], "dtype": "float64"}
    reports[ON]["operators"]["c_split"][change] = other[change]

    (failure,) = failures(reports)

    assert "expected float32 of shape (2, 4, 4)" in failure


@pytest.mark.parametrize("mode", [ON, ON_COMPILED], ids=lambda mode: mode.label)
def test_a_last_bit_between_the_engines_is_a_failure(reports: Reports, mode: Mode) -> None:
    reports[mode]["training"]["loss"][-1] = math.nextafter(1, 2).hex()

    (failure,) = failures(reports)

    assert failure.startswith(f"loss, {mode.label} against flag off, ")


def test_the_compiler_may_change_last_bits(reports: Reports) -> None:
    for mode in (OFF_COMPILED, ON_COMPILED):
        reports[mode]["training"]["loss"][-1] = (1 + 2**-20).hex()

    assert failures(reports) == []


@pytest.mark.parametrize("value", [1.1, math.nan, math.inf])
def test_the_compiler_may_not_change_more(reports: Reports, value: float) -> None:
    reports[OFF_COMPILED]["training"]["loss"][-1] = value.hex()
    reports[ON_COMPILED]["training"]["loss"][-1] = value.hex()

    assert any("flag off, compiled against flag off, eager" in text for text in failures(reports))


def test_both_runs_on_one_engine_prove_nothing(reports: Reports) -> None:
    reports[ON]["engine"] = "c10d"

    assert failures(reports) == ["flag on, eager: ran on engine c10d, expected gloo"]


def test_a_mismatch_is_exit_code_1(
    reports: Reports, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    reports[ON]["operators"]["c_allgather"]["values"][0] = (99.0).hex()
    written = tmp_path / "demo.json"

    assert conclude(reports, "gloo", str(written)) == 1

    shown = capsys.readouterr().out
    assert "apart" in shown and "1 mismatches" in shown and "expected" in shown
    document = json.loads(written.read_text())
    assert document["agree"] is False
    (row,) = (row for row in document["rows"] if row["name"] == "c_allgather")
    assert row["failures"] and not row["cells"]["flag on, eager"]["equal"]


@pytest.mark.parametrize("ranks", [0, 1, 3, 16])
def test_ranks_that_the_program_cannot_use(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(ranks) == 2

    assert "--nproc 2, 4 or 8" in capsys.readouterr().err


def test_an_installed_package_has_no_examples(tmp_path: Path) -> None:
    shutil.copytree(Path(commlib.__file__).parent, tmp_path / "commlib")
    start = "import sys; from commlib.tools.demo.command import run_demo; sys.exit(run_demo())"

    ended = subprocess.run(
        [sys.executable, "-c", start], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )

    assert ended.returncode == 2
    assert "from a checkout: `pip install -e .[tools]`" in ended.stderr


@pytest.mark.usefixtures("warm_launches")
def test_a_failed_run_shows_what_its_ranks_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLAGS_comm_timeout_s", "soon")

    with pytest.raises(LaunchError) as caught:
        Launch(RANKS, "gloo", steps=2, folder=tmp_path).run(OFF)

    said = str(caught.value)
    assert "flag off, eager: exit code 1" in said
    # The first rank that fails ends the others, which may not have said anything yet.
    assert "--- rank " in said and "FLAGS_comm_timeout_s='soon'" in said


@pytest.mark.usefixtures("warm_launches")
def test_a_rank_that_a_signal_has_ended_is_named(tmp_path: Path) -> None:
    """It says nothing itself, and the words of the others are of what came after."""
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal, sys, time\n"
        "os.environ['RANK'] == '1' and os.kill(os.getpid(), signal.SIGKILL)\n"
        "print('rank 0 waits', file=sys.stderr, flush=True)\n"
        "time.sleep(60)\n"
    )

    with pytest.raises(LaunchError) as caught:
        launch("two ranks", [str(script)], RANKS, environment(unified=True), tmp_path, 60)

    said = str(caught.value)
    assert "two ranks: exit code 1" in said and "--- launcher, last lines:" in said
    assert "rank      : 1" in said and "SIGKILL" in said


@pytest.mark.usefixtures("warm_launches")
def test_a_run_past_its_deadline_shows_where_its_ranks_are(tmp_path: Path) -> None:
    with pytest.raises(LaunchError) as caught:
        Launch(RANKS, "gloo", steps=2, folder=tmp_path, deadline=0.001).run(OFF)

    said = str(caught.value)
    assert "flag off, eager: exit code" in said
    assert "Timeout (0:00:00.001000)!" in said and "legacy_tp_block.py" in said


def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("legacy_tp_block", PROGRAM)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_process_losses(example: Any, steps: int) -> list[float]:
    """Train the same model as plain torch would: no ranks, no collectives."""
    w = {name: weight.requires_grad_() for name, weight in example.drawn(0).items()}
    ids, after = example.batch(torch.device("cpu"))
    losses = []
    for _ in range(steps):
        x = w["embedding"][ids] + w["position"]
        heads = F.linear(example.norm(x, w["norm_attention"]), w["qkv"])
        q, k, v = heads.unflatten(-1, (example.HEADS, 3, -1)).permute(3, 0, 2, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.linear(seen.transpose(1, 2).flatten(2), w["projection"])
        hidden = F.gelu(F.linear(example.norm(x, w["norm_mlp"]), w["up"]))
        x = x + F.linear(hidden, w["down"])
        logits = F.linear(example.norm(x, w["norm_output"]), w["embedding"])
        loss = F.cross_entropy(logits.flatten(0, 1), after.flatten())
        grads = torch.autograd.grad(loss, list(w.values()))
        length = torch.stack([g.norm() for g in grads]).norm()
        scale = example.LEARNING_RATE * min(1.0, example.LARGEST_NORM / length.item())
        with torch.no_grad():
            for weight, grad in zip(w.values(), grads, strict=True):
                weight.sub_(scale * grad)
        losses.append(loss.item())
    return losses


@pytest.mark.usefixtures("warm_launches")
def test_the_demo_agrees_and_trains_as_one_process_would(tmp_path: Path) -> None:
    written, shown = tmp_path / "demo.json", io.StringIO()

    with redirect_stdout(shown):
        # Traced and differentiated as with the compiler, whose C++ takes most of the demo's time.
        code = run_demo(RANKS, str(written), steps=3, compiler="aot_eager")

    assert code == 0, shown.getvalue()
    assert "all results agree" in shown.getvalue() and "bits equal" in shown.getvalue()
    document = json.loads(written.read_text())
    assert document["agree"] and set(document["runs"]) == {mode.label for mode in MODES}
    expected = one_process_losses(program(), steps=3)
    for report in document["runs"].values():
        losses = [float.fromhex(value) for value in report["training"]["loss"]]
        assert losses == pytest.approx(expected, rel=1e-4)
        assert sum(row["communicator"] for row in report["communicators"]) == 1
