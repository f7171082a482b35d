"""Type checkers accept the right lines of a user's program and refuse the wrong ones."""

import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from commlib import ops

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = ROOT / "tests" / "typed" / "user_program.py"
CHECKERS = {
    "mypy": ["mypy", "--hide-error-context", PROGRAM],
    "pyright": ["basedpyright", "-p", PROGRAM.parent, "--pythonpath", sys.executable],
}
ERROR = re.compile(rf"{PROGRAM.name}:(\d+):.*\berror: ")
DEADLINE_S = 180


def errors_of(command: Sequence[object]) -> dict[int, str]:
    """Return the errors that a checker finds in the program, by their lines."""
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 1, done.stdout  # 0: no error; above 1: the checker failed
    return {
        int(match[1]): line for line in done.stdout.splitlines() if (match := ERROR.search(line))
    }


@pytest.mark.parametrize("checker", CHECKERS)
def test_user_program(checker: str) -> None:
    program = PROGRAM.read_text().splitlines()
    wrong = {number for number, line in enumerate(program, 1) if "# refused" in line}

    errors = errors_of(CHECKERS[checker])

    assert not [error for line, error in errors.items() if line not in wrong]
    assert not [program[line - 1].strip() for line in wrong - errors.keys()], "not refused"


def test_the_program_calls_every_operator() -> None:
    called = set(re.findall(r"\bops\.(\w+)", PROGRAM.read_text()))
    assert {*ops.__all__} <= called
