"""The interpreter's exit with rings still open: no hang, no abort, nothing printed."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import pytest

from tests.support.checks import until
from tests.support.ports import free_port
from tests.support.processes import WHOLE_EXIT, run, start

FLAGS = pytest.mark.parametrize("flag", ["1", "0"], ids=["unified", "legacy"])
BEGIN = (
    "import atexit, os, sys, threading, time, pathlib, torch, commlib\n"
    "here = pathlib.Path(os.environ['HERE'])\n"
    "ring = commlib.init('gloo'); commlib.new_ring(1, [1, 0])\n"
    "commlib.ops.barrier(); (here / f'ready{ring.rank}').touch()\n"
    "def await_file(name):\n"
    "    end = time.monotonic() + 60\n"
    "    while not (here / name).exists() and time.monotonic() < end: time.sleep(0.01)\n"
)
QUIET = [(0, "", "")] * 2  # both ranks end well and say nothing
STAY = "if ring.rank == 1: await_file('go'); sys.exit(0)\n"


@contextmanager
def pair(program: str, here: Path, flag: str = "1", **more: str) -> Iterator[list["Popen[str]"]]:
    """Start two ranks of ``program`` and end them afterwards."""
    more = {**WHOLE_EXIT, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "HERE": str(here), **more}
    more |= {"MASTER_PORT": str(free_port()), "FLAGS_dynamic_static_unified_comm": flag}
    ranks = [start("-c", program, **{"RANK": str(rank), **more}) for rank in range(2)]
    try:
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()


def outcomes(
    program: str, here: Path, flag: str = "1", **more: str
) -> list[tuple[int | None, str, str]]:
    """Run two ranks of ``program`` to their ends: exit code, output and error output of each."""
    with pair(program, here, flag, **more) as ranks:
        texts = [rank.communicate(timeout=60) for rank in ranks]
    return [(rank.returncode, *text) for rank, text in zip(ranks, texts, strict=True)]


@pytest.mark.parametrize(("flag", "rounds"), [("1", 25), ("0", 5)], ids=["unified", "legacy"])
def test_exits_in_a_row(flag: str, rounds: int) -> None:
    code, out, err = run(
        "-m",
        "tests.programs.exits",
        str(rounds),
        FLAGS_dynamic_static_unified_comm=flag,
        seconds=240,
        fresh=True,  # its children take down torch alone, without the compiler
    )
    assert (code, out, err) == (0, "all ended well\n", "")


@FLAGS
def test_a_rank_that_dies_does_not_hold_the_other(tmp_path: Path, flag: str) -> None:
    """Rank 1 dies; rank 0, which serves the store, names it and ends within its close deadline."""
    program = BEGIN + "if ring.rank == 1: os._exit(3)\n"
    first, second = outcomes(program, tmp_path, flag, FLAGS_comm_close_timeout_s="4")
    assert first == (0, "", "waiting for ranks [1] to leave, at most 4 s\n")
    assert second[0] == 3


@FLAGS
def test_rank_0_waits_for_the_others_to_leave(tmp_path: Path, flag: str) -> None:
    with pair(BEGIN + STAY, tmp_path, flag, FLAGS_comm_close_timeout_s="60") as ranks:
        assert ranks[0].stderr is not None
        line = ranks[0].stderr.readline()
        assert line == "waiting for ranks [1] to leave, at most 60 s\n"
        (tmp_path / "go").touch()
        ends = [rank.communicate(timeout=50) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert ends == [("", ""), ("", "")]


FAILURES = {
    "exception": ("raise ValueError('of the program')\n", 1, "of the program"),
    "sys.exit": ("sys.exit(1)\n", 1, ""),
    "SIGINT": ("(here / 'idle').touch(); time.sleep(60)\n", -signal.SIGINT, "KeyboardInterrupt"),
    "SIGTERM": ("(here / 'idle').touch(); time.sleep(60)\n", -signal.SIGTERM, ""),
}


@FLAGS
@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_exit_waits_for_nobody(tmp_path: Path, flag: str, how: str) -> None:
    """Rank 0 fails and ends while rank 1 stays; rank 1 then finds no store and says nothing.

    torch itself prints a warning if the store ends while it answers a request. So rank 0 fails
    when rank 1 has no request under way.
    """
    program, code, text = FAILURES[how]
    settled = (
        "if ring.rank == 1: tests.programs.exits.settle(); (here / 'settled').touch()\n"
        "else: await_file('settled')\n"
    )
    program = "import tests.programs.exits\n" + BEGIN + settled + STAY + program
    with pair(program, tmp_path, flag, FLAGS_comm_close_timeout_s="600") as ranks:
        if how.startswith("SIG"):
            until((tmp_path / "idle").exists, "rank 0 is idle", 60)
            ranks[0].send_signal(getattr(signal, how))
        _, err = ranks[0].communicate(timeout=30)
        assert ranks[0].returncode == code, err
        assert text in err
        assert "waiting for" not in err
        assert ranks[1].poll() is None
        (tmp_path / "go").touch()
        assert ranks[1].communicate(timeout=60) == ("", "")
        assert ranks[1].returncode == 0


def test_a_failing_exit_with_a_call_under_way(tmp_path: Path) -> None:
    """The peer never joins the collective; rank 0 fails and ends long before its timeout."""
    call = (
        "x = torch.ones(4)\n"
        "work = ring.all_reduce(x, x, use_calc_stream=False, sync_op=False)\n"
        "raise ValueError('of the program')\n"
    )
    more = {"FLAGS_comm_close_timeout_s": "600", "FLAGS_comm_timeout_s": "600"}
    with pair(BEGIN + STAY + call, tmp_path, **more) as ranks:
        _, err = ranks[0].communicate(timeout=30)
        assert "of the program" in err
        assert ranks[0].returncode == 1


@FLAGS
def test_exit_closes_everything_without_new_threads(tmp_path: Path, flag: str) -> None:
    """From Python 3.12 on no thread can be started once the interpreter exits."""
    program = (
        "import atexit, sys\n"
        "def last():\n"  # registered before commlib's handler, so it runs after it
        "    gone = [(one._engine.pg, one._health.ended, one._errors()) for one in rings]\n"
        "    print(gone)\n"
        "atexit.register(last)\n" + BEGIN + "rings = [ring, commlib.comm(1)]\n"
        "commlib.ops.all_reduce(torch.ones(1000)); ring.exchange([1])\n"
        "commlib.ops.all_gather(torch.ones(10), 1, use_calc_stream=False, sync_op=False)\n"
        "def no_threads():\n"
        '    def start(self): raise RuntimeError("can\'t create new thread at interpreter "\n'
        "                                        'shutdown')\n"
        "    threading.Thread.start = start\n"
        "atexit.register(no_threads)\n"
    )
    closed = (0, "[(None, True, []), (None, True, [])]\n", "")
    assert outcomes(program, tmp_path, flag) == [closed] * 2


def test_exit_without_new_threads_and_with_stuck_steps(tmp_path: Path) -> None:
    """More steps block than threads are left: the exit still ends, within the deadlines."""
    program = (
        BEGIN + "from commlib.worker_threads import SPARES, workers\n"
        "from commlib.deadlines import Deadline, bounded\n"
        "def stuck():\n"
        "    try: bounded(threading.Event().wait, Deadline(0.1), 'a stuck step')\n"
        "    except commlib.errors.CommTimeout: pass\n"
        "def no_threads():\n"
        "    def start(self): raise RuntimeError('no')\n"
        "    threading.Thread.start = start\n"
        "    for _ in range(SPARES + 2): stuck()\n"
        "atexit.register(no_threads)\n"
    )
    assert outcomes(program, tmp_path, FLAGS_comm_close_timeout_s="20") == QUIET


def test_exit_without_the_rendezvous_environment(tmp_path: Path) -> None:
    gone = "for name in ('RANK', 'MASTER_PORT', 'MASTER_ADDR'): os.environ.pop(name)\n"
    assert outcomes(BEGIN + gone, tmp_path) == QUIET


@FLAGS
def test_exit_while_another_thread_creates_a_ring(tmp_path: Path, flag: str) -> None:
    program = (
        BEGIN + "def create():\n"
        "    try: commlib.new_ring(2, [0, 1], timeout=600)\n"
        "    except commlib.errors.RingError as error: print('given up' in str(error))\n"
        "manager = commlib.CommContextManager.instance()\n"
        "if ring.rank == 0:\n"
        "    threading.Thread(target=create, daemon=True).start()\n"
        "    while 2 not in manager._creating: time.sleep(0.001)\n"
    )
    assert outcomes(program, tmp_path, flag) == [(0, "True\n", ""), (0, "", "")]


LATE = {
    "worker": (
        "try: bounded(many_waits, Deadline(0.05), 'waiting')\n"
        "except commlib.errors.CommTimeout: pass\n"
    ),
    "store": (
        "[(_, room)] = program_store._run_stores.values()\n"
        "other = room.apart()\n"
        "other.connection.post(lambda store: many_waits())\n"
    ),
}


@FLAGS
@pytest.mark.parametrize("thread", LATE)
def test_exit_while_a_step_that_nobody_waits_for_is_in_c(
    tmp_path: Path, flag: str, thread: str
) -> None:
    """A thread that comes back from C++ into a dying interpreter would abort the process."""
    program = (
        BEGIN + "import torch.distributed as dist\n"
        "from datetime import timedelta\n"
        "from commlib.rendezvous import program_store\n"
        "from commlib.deadlines import Deadline, bounded\n"
        "never = dist.HashStore()\n"
        "def many_waits():\n"
        "    end = time.monotonic() + 0.8\n"
        "    while time.monotonic() < end:\n"
        "        try: never.wait(['never'], timedelta(milliseconds=2))\n"
        "        except RuntimeError: pass\n"
    )
    assert outcomes(program + LATE[thread], tmp_path, flag) == QUIET


@pytest.mark.gpu
def test_exits_right_after_a_backward() -> None:
    """Each one waits for the thread of autograd that frees what the backward has left."""
    code, out, err = run("-m", "tests.programs.backward_exits", "6", fresh=True)
    assert (code, out) == (0, "0 0 0 0 0 0\n"), err
