"""Run torch's own distributed_test.py on rings: ``python -m tests.torch_distributed_tests``.

Every test runs in forked processes: with stock gloo, and with groups for "gloo" that are groups of
rings, with FLAGS_dynamic_static_unified_comm off and on. Tests of torch's profiler are left out.
Torch's file needs the package expecttest.
"""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import click
import torch

SEATS = {"stock gloo": "", "flag off": "0", "flag on": "1"}
_WORDS = "the words of gloo in the error of a barrier"
# Words of an error, and what is refused. The last ones are differences of names and messages.
REFUSALS = {
    "recv without src": "`recv` from any source",
    "x.to_dense()": "sparse tensors",
    "'commlib' != 'gloo'": "the name of the backend",
    'does not match "barrier on ring': _WORDS,
    'does not match "monitored_barrier on ring': _WORDS,
}
DEADLINE_S = 60


@dataclass
class Outcome:
    """The outcome of a test: "passed", "skipped" or "failed"; then the reason or the error."""

    name: str
    kind: str
    text: str = ""


# -- one run ---------------------------------------------------------------------------------------


def cases() -> Any:
    """Return torch's class of tests, whose processes are forked from this one."""
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    common_distributed.TIMEOUT_OVERRIDE.clear()
    stock: Any = distributed_test.TestDistBackend
    tests: Any = distributed_test.DistributedTest._DistTestBase

    class TorchTests(stock, tests):
        """The tests of torch's file for every backend."""

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(get_context("fork").Process)

    return TorchTests


def run(kind: Any, name: str) -> Outcome:
    """Run one test on all ranks."""
    result = unittest.TestResult()
    kind(name).run(result)
    if result.skipped:
        return Outcome(name, "skipped", result.skipped[0][1])
    wrong = result.errors + result.failures
    return Outcome(name, "failed", wrong[0][1]) if wrong else Outcome(name, "passed")


def run_all(only: tuple[str, ...], rings: bool) -> Iterator[Outcome]:
    """Run the tests whose name has one of the words; all without words."""
    if rings:
        from commlib.compat import torch_distributed

        torch_distributed.replace_torch()
    torch.set_num_threads(1)
    kind = cases()
    for name in unittest.TestLoader().getTestCaseNames(kind):
        if "profil" in name or (only and not any(word in name for word in only)):
            continue
        yield run(kind, name)


# -- all runs --------------------------------------------------------------------------------------


def environment(flag: str, ranks: int) -> dict[str, str]:
    """Return the environment of a run; ``flag`` is empty for stock gloo."""
    return {
        **os.environ,
        "BACKEND": "gloo",
        "WORLD_SIZE": str(ranks),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(DEADLINE_S),
        "PYTORCH_PRINT_REPRO_ON_FAILURE": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "FLAGS_dynamic_static_unified_comm": flag or "0",
    }


def outcomes_of(seat: str, ranks: int, only: tuple[str, ...]) -> dict[str, Outcome]:
    """Run the tests in a process of the given seat, and print a line for each."""
    words = [word for one in only for word in ("--only", one)]
    command = [sys.executable, "-m", "tests.torch_distributed_tests", "one", *words]
    command += ["--rings"] if SEATS[seat] else []
    outcomes: dict[str, Outcome] = {}
    kwargs: Any = {"env": environment(SEATS[seat], ranks), "stdout": subprocess.PIPE, "text": True}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stderr=errors, **kwargs)
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"name"'):  # what a test prints
                continue
            one = Outcome(**json.loads(line))
            outcomes[one.name] = one
            last = one.text.strip().splitlines()[-1:] or [""]
            click.echo(f"{seat:10} {one.kind:8} {one.name} {last[0][:150]}")
        if process.wait():
            errors.seek(0)
            raise click.ClickException(f"the run with {seat} failed:\n{errors.read()[-2000:]}")
    return outcomes


def refusal(outcome: Outcome) -> str | None:
    """Return what commlib refuses in a failed test; None if that is not known."""
    return next((reason for words, reason in REFUSALS.items() if words in outcome.text), None)


def row_of(outcome: Outcome, stock: Outcome | None) -> str:
    """Return the row of the table that a test counts in."""
    if outcome.kind != "failed":
        return outcome.kind
    if stock is not None and stock.kind == "failed":
        return "failed with stock gloo too"
    reason = refusal(outcome)
    return f"refused: {reason}" if reason else "failed"


def table(found: dict[str, dict[str, Outcome]]) -> str:
    """Return the counts of all runs as a table in Markdown."""
    stock = found.get("stock gloo", {})
    counts = {
        seat: Counter(row_of(one, stock.get(one.name)) for one in outcomes.values())
        for seat, outcomes in found.items()
    }
    first = ["passed", "skipped"]
    rows = first + sorted({row for each in counts.values() for row in each} - {*first})
    lines = [f"| outcome | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    lines += [f"| {row} | {' | '.join(str(counts[s][row]) for s in found)} |" for row in rows]
    return "\n".join(lines)


@click.group(invoke_without_command=True)
@click.option("--only", multiple=True, help="Tests whose name contains this.")
@click.option("--ranks", default=4, help="CPU ranks of each test.")
@click.option("--seat", multiple=True, type=click.Choice([*SEATS]), default=[*SEATS])
@click.option("--out", type=click.Path(path_type=Path), help="Write the outcomes as JSON here.")
@click.pass_context
def main(
    context: click.Context,
    only: tuple[str, ...],
    ranks: int,
    seat: tuple[str, ...],
    out: Path | None,
) -> None:
    """Run all tests with each backend, and print the table of docs/torch_distributed.md."""
    if context.invoked_subcommand is not None:
        return
    outcomes = {}
    for one in seat:
        outcomes[one] = outcomes_of(one, ranks, only)
        if out is not None:
            rows = {name: [asdict(each) for each in x.values()] for name, x in outcomes.items()}
            out.write_text(json.dumps(rows, indent=1))
    click.echo(f"torch {torch.__version__}, {ranks} CPU ranks, {date.today()}\n\n{table(outcomes)}")


@main.command("one")
@click.option("--only", multiple=True)
@click.option("--rings", is_flag=True)
def one_run(only: tuple[str, ...], rings: bool) -> None:
    """Run the tests in this process, and print each outcome as a line of JSON."""
    for outcome in run_all(only, rings):
        print("\n" + json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    main(prog_name="python -m tests.torch_distributed_tests")
