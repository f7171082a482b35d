"""Fork pairs of ranks that use a ring and simply end; print what each of them said at its exit.

``python -m tests.programs.exits ROUNDS`` forks after torch has been imported, so that fifty exits
take seconds. Each child leaves through the interpreter's own exit, with its ring still open.
"""

import gc
import os
import sys

import torch

import commlib
from commlib import ops
from commlib.core import reporter
from commlib.deadlines import Deadline
from commlib.rendezvous import connection as connections
from tests.support.ports import free_port


def child(rank: int, port: int) -> None:
    """Use ring 0 and another one, leave a Work unwaited, and end without closing anything."""
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    commlib.init("gloo")
    commlib.new_ring(1, [1, 0])
    ops.all_reduce(torch.ones(1000))
    ops.all_gather(torch.ones(10), 1, use_calc_stream=False, sync_op=False)


def settle() -> None:
    """Wait until the store has answered all that this rank's threads have asked of it."""
    for reports in list(reporter.reporter._rings):
        reports.round()  # the next round finds nothing new
    for connection in list(connections._connections):
        connection.run("settling", lambda store: store.num_keys(), Deadline(30))


def pair() -> None:
    """Fork two ranks and wait for both."""
    children, port = [], free_port()
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            child(rank, port)
            sys.exit(0)  # the interpreter's exit: atexit, threads, destructors
        children.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
    if codes != [0, 0]:
        sys.exit(f"exit codes {codes}")


if __name__ == "__main__":
    # What torch has made stays out of each child's last collection, which would copy its pages.
    gc.freeze()
    for _ in range(int(sys.argv[1])):
        pair()
    print("all ended well")
