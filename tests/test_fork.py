"""Forked children: they forget all rings, end at once, and leave the parent's rings alone."""

from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.test_exit import BEGIN, FLAGS, pair

# ``fork(body)`` runs ``body`` in a child that ends through the interpreter's own exit.
FORK = (
    BEGIN + "from commlib import ops\n"
    "from commlib.errors import CommError, RingError\n"
    "import traceback\n"
    "manager = commlib.CommContextManager.instance()\n"
    "x = torch.ones(1000)\n"
    "ops.all_reduce(x); ring.exchange([1])\n"
    "def fork(body=lambda: None):\n"
    "    pid = os.fork()\n"
    "    if pid == 0:\n"
    "        try: body()\n"
    "        except SystemExit: raise\n"
    "        except BaseException: traceback.print_exc(); os._exit(9)\n"
    "        sys.exit(0)\n"
    "    end = time.monotonic() + 40\n"
    "    while time.monotonic() < end:\n"
    "        ended, status = os.waitpid(pid, os.WNOHANG)\n"
    "        if ended: return os.waitstatus_to_exitcode(status)\n"
    "        time.sleep(0.01)\n"
    "    os.kill(pid, 9); os.waitpid(pid, 0); return 'still there'\n"
    "def refused(call, *texts):\n"
    "    try: call()\n"
    "    except RingError as error:\n"
    "        missing = [text for text in texts if text not in str(error)]\n"
    "        assert not missing, (missing, str(error))\n"
    "    else: raise AssertionError('nothing was refused')\n"
)
AFTER = (
    "assert ops.all_reduce(x)[0] == 2 and ring.exchange([2]) == [[2], [2]]\n"
    "assert ops.all_reduce(x, 1)[0] == 2\n"
    "assert commlib.new_ring(2, [0, 1]) is not None\n"
    "ops.barrier(2)\n"
)


def ends_well(program: str, here: Path, flag: str, **more: str) -> None:
    more |= {"FLAGS_comm_close_timeout_s": "60", "PYTHONWARNINGS": "ignore::DeprecationWarning"}
    with pair(FORK + program + AFTER, here, flag, **more) as ranks:
        ends = [rank.communicate(timeout=100) for rank in ranks]
    assert ends == [("", "")] * 2
    assert [rank.returncode for rank in ranks] == [0, 0]


@FLAGS
def test_children_that_only_exit(tmp_path: Path, flag: str) -> None:
    """An exit handler or a destructor of the child would block, abort, or say goodbye."""
    pending = "work = ops.all_gather(x, 1, use_calc_stream=False, sync_op=False)\n"
    ends_well(
        pending + "codes = [fork() for _ in range(5)]\n"
        "assert codes == [0] * 5, codes\n"
        "work.wait()\n",
        tmp_path,
        flag,
    )


@FLAGS
def test_calls_in_a_child(tmp_path: Path, flag: str) -> None:
    ends_well(
        "work = ops.all_reduce(x, 1, use_calc_stream=False, sync_op=False)\n"
        "def body():\n"
        "    both = f'belongs to process {os.getppid()}; this is its fork {os.getpid()}', 'spawn'\n"
        "    for call in (commlib.comm, lambda: ops.all_reduce(x), lambda: manager.close(0)):\n"
        "        refused(call, 'ring 0 ' + both[0], both[1])\n"
        "    for call in (lambda: ring.all_reduce(x, x), lambda: ring.exchange([1]), ring.check,\n"
        "                 ring.barrier, ring.reset, lambda: ring.all_reduce(x, x, sync_op=False,\n"
        "                 use_calc_stream=False)):\n"
        "        refused(call, *both)\n"
        "    refused(work.wait, both[0], 'wait for it in the parent')\n"
        "    mine = 'set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT'\n"
        "    for call in (commlib.init, lambda: commlib.new_ring(1, [0, 1])):\n"
        "        refused(call, f'is process {os.getppid()}', f'its fork {os.getpid()}', mine)\n"
        "    assert manager.rings() == [] and manager.report() == []\n"
        "    commlib.shutdown(); commlib.shutdown(abort=True)\n"
        "    ring.abort(); ring.close(None)\n"
        "assert fork(body) == 0\n"
        "assert work.wait()[0] == 2\n",
        tmp_path,
        flag,
    )


@FLAGS
def test_locks_that_another_thread_held(tmp_path: Path, flag: str) -> None:
    ends_well(
        "held, free = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with manager._lock, ring._lock, ring._hosts._lock: held.set(); free.wait(60)\n"
        "thread = threading.Thread(target=hold); thread.start(); held.wait(60)\n"
        "def body():\n"
        "    refused(ring.check, 'belongs to process'); refused(ring.barrier, 'belongs')\n"
        "    refused(lambda: ring.exchange([1]), 'belongs')\n"
        "    commlib.shutdown()\n"
        "    assert commlib.new_ring(7, [ring.rank]).size == 1\n"
        "code = fork(body); free.set(); thread.join(); assert code == 0, code\n",
        tmp_path,
        flag,
    )


@FLAGS
def test_a_fork_while_a_ring_is_created(tmp_path: Path, flag: str) -> None:
    """The child has no creation; the parent's goes on."""
    ends_well(
        "got = []\n"
        "thread = threading.Thread(target=lambda: got.append(commlib.new_ring(3, [0, 1])))\n"
        "if ring.rank == 0:\n"
        "    thread.start()\n"
        "    while 3 not in manager._creating: time.sleep(0.001)\n"
        "    assert fork(lambda: refused(lambda: commlib.comm(3), 'ring 3 belongs')) == 0\n"
        "    (here / 'forked').touch()\n"
        "else:\n"
        "    await_file('forked'); thread.start()\n"
        "thread.join(60); assert got[0].size == 2\n",
        tmp_path,
        flag,
    )


@FLAGS
def test_a_child_with_its_own_rendezvous(tmp_path: Path, flag: str) -> None:
    ends_well(
        "def body():\n"
        "    os.environ['MASTER_PORT'] = os.environ['OTHER_PORT']\n"
        "    mine = commlib.init('gloo')\n"
        "    assert (mine.rank, mine.size) == (ring.rank, 2)\n"
        "    assert ops.all_reduce(x)[0] == 2 and mine.exchange([3]) == [[3], [3]]\n"
        "    theirs = f'ring 0 belongs to process {os.getpid()}; this is its fork'\n"
        "    assert fork(lambda: refused(commlib.comm, theirs)) == 0\n"
        "    ops.barrier()\n"
        "assert fork(body) == 0\n",
        tmp_path,
        flag,
        OTHER_PORT=str(free_port()),
    )


@FLAGS
def test_workers_of_a_data_loader(tmp_path: Path, flag: str) -> None:
    ends_well(
        "from torch.utils.data import DataLoader\n"
        "loader = DataLoader(list(range(8)), batch_size=2, num_workers=2,\n"
        "                    multiprocessing_context='fork')\n"
        "for _ in range(2):\n"
        "    for batch in loader: assert ops.all_reduce(batch).tolist() == (batch * 2).tolist()\n",
        tmp_path,
        flag,
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_other_start_methods(tmp_path: Path, method: str) -> None:
    ends_well(
        "import multiprocessing as mp\n"
        f"child = mp.get_context('{method}').Process(target=os.getpid)\n"
        "child.start(); child.join(60); assert child.exitcode == 0\n",
        tmp_path,
        "1",
    )
