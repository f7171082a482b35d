"""Programs that are forked from a loaded process behave as those of a fresh interpreter."""

import os
import signal
from pathlib import Path

import pytest

from tests.support.checks import until
from tests.support.processes import WHOLE_EXIT, run, start

PROGRAMS = {
    "arguments": "import sys; print(sys.argv, repr(sys.path[0]), __name__)",
    "environment": "import os; print(os.getcwd(), os.environ['ANSWER'])",
    "module": "import sys; print(hasattr(sys.modules['__main__'], '__file__'))",
    "exit handlers": "import atexit; atexit.register(print, 'last'); print('first')",
    "exit code": "import sys; sys.exit(7)",
    "exit text": "import sys; sys.exit('no such thing')",
    "exception": "raise ValueError('of the program')",
    "abort": "import os; os.abort()",
    "killed by itself": "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "commlib": "import commlib; print(commlib.init('gloo').size)",
}


@pytest.mark.parametrize("what", PROGRAMS)
def test_it_ends_as_a_fresh_one(what: str) -> None:
    fresh, warm, full = (
        run("-c", PROGRAMS[what], "a", "b c", ANSWER="42", **kwargs)
        for kwargs in ({"fresh": True}, {}, WHOLE_EXIT)
    )
    assert warm[:2] == full[:2] == fresh[:2]
    (*_, last) = fresh[2].splitlines() or [""]
    assert [text.splitlines()[-1:] or [""] for text in (warm[2], full[2])] == [[last], [last]]


def test_files_and_modules(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import sys; print(sys.argv[1:], sys.path[0], __name__)\n")
    assert run(str(program), "x") == run(str(program), "x", fresh=True)
    assert run("-m", "commlib", "--version") == run("-m", "commlib", "--version", fresh=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)
def test_signals_reach_the_program(tmp_path: Path, number: signal.Signals) -> None:
    # Short sleeps: a signal just before a sleep is handled after it.
    wait = (
        "import pathlib, sys, time; pathlib.Path(sys.argv[1]).touch()\n"
        "for _ in range(600): time.sleep(0.1)"
    )
    codes = []
    for fresh in (False, True):
        ready = tmp_path / str(fresh)
        process = start("-c", wait, str(ready), fresh=fresh)
        until(ready.exists, "the program runs", 60)
        process.send_signal(number)
        process.communicate(timeout=60)
        codes.append(process.returncode)
    assert codes == [-number, -number]


def test_a_killed_program_is_gone() -> None:
    process = start("-c", "import os, time; print(os.getpid(), flush=True); time.sleep(60)")
    assert process.stdout is not None
    program = Path(f"/proc/{int(process.stdout.readline())}")
    assert program.exists()
    process.kill()
    process.communicate(timeout=60)
    until(lambda: not program.exists(), "the program ended", 20)


def test_torch_is_there_and_commlib_is_not() -> None:
    show = "import os, sys; print('torch' in sys.modules, 'commlib' in sys.modules, os.getppid())"
    code, out, _ = run("-c", show)
    loaded, ours, parent = out.split()
    assert (code, loaded, ours) == (0, "True", "False")
    assert int(parent) != os.getpid()


def test_the_exit_takes_down_what_the_program_made() -> None:
    """Also what a library refers to that keeps objects of programs."""
    program = (
        "import os, sys, torch, torch.distributed as dist\n"
        "class Last:\n"
        "    def __init__(self, name): self.name = name\n"
        "    def __del__(self, write=os.write, ending=sys.is_finalizing):\n"
        "        write(1, f'{self.name} {ending()}\\n'.encode())\n"
        "own, dist.kept, sys.kept = Last('its own'), Last('of torch.distributed'), Last('of sys')\n"
        "cycle = [Last('in a cycle')]; cycle.append(cycle)\n"
    )
    fresh, warm = (run("-c", program, fresh=fresh) for fresh in (True, False))
    assert (warm[0], sorted(warm[1].splitlines()), warm[2]) == (
        0,
        sorted(fresh[1].splitlines()),
        "",
    )
    assert len(warm[1].splitlines()) == 4
