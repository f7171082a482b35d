"""Fork processes that end right after a verified backward on a GPU; print how each has ended.

``python -m tests.programs.backward_exits COUNT``. A thread of autograd frees what the backward has
left while the process ends. All threads share a core and the main thread keeps the interpreter, so
without a wait at the exit that thread comes too late.
"""

import os
import sys
from contextlib import suppress

import torch

from commlib import graph

NEVER_S = 1000.0  # no thread has to give up the interpreter within it


def child(core: int) -> None:
    """End after the backward of a captured layer, whose last turn all threads make on ``core``."""
    layer, x = torch.nn.Linear(64, 64, device="cuda"), torch.ones(8, 64, device="cuda")
    g = graph.capture(layer, outputs="copy", verify=True)
    for turn in range(4):
        if turn == 3:
            for thread in os.listdir("/proc/self/task"):
                with suppress(ProcessLookupError):  # it has just ended
                    os.sched_setaffinity(int(thread), {core})
            sys.setswitchinterval(NEVER_S)
        g(x).sum().backward()


def main(count: int) -> None:
    """Fork ``count`` processes at the same time."""
    children, cores = [], sorted(os.sched_getaffinity(0))
    for number in range(count):
        pid = os.fork()
        if pid == 0:
            child(cores[number % len(cores)])
            sys.exit(0)  # the interpreter's exit: atexit, threads, destructors
        children.append(pid)
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children))


if __name__ == "__main__":
    main(int(sys.argv[1]))
