"""Ctrl-C in real processes ends a wait on a CPU at once; the ring says what was interrupted."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.processes import ROOT, environment

LIMIT_S = 150.0  # The limit of each process.
SECONDS = 15.0  # A rank that waits for its deadline of 60 s is far above, a busy machine below.
# One ring per kind of wait. Rank 1 never comes; rank 0 is interrupted by its parent.
PROGRAM = """
import json, sys, threading, time
from pathlib import Path
import torch, commlib
from commlib import ops
from commlib.rendezvous import shared_memory

shared_memory._FOLDER = Path(sys.argv[1])
comm = commlib.init("gloo", timeout=60)
x = torch.ones(4)
ASYNC = {"use_calc_stream": False, "sync_op": False}

def group(ring):
    with ring.group():
        ring.send(x, peer=1)
        ring.recv(torch.zeros(4), peer=1)

kinds = {
    "all_reduce": lambda ring: ops.all_reduce(x, ring.ring_id),
    "strided": lambda ring: ring.all_reduce(torch.zeros(2, 2).t(), x.view(2, 2)),
    "barrier": lambda ring: ring.barrier(),
    "recv": lambda ring: ring.recv(torch.zeros(4), peer=1),
    "group": group,
    "exchange": lambda ring: ring.exchange([1]),
    "work": lambda ring: ops.all_reduce(x, ring.ring_id, **ASYNC).wait(),
}
rings = {kind: commlib.new_ring(n, [0, 1]) for n, kind in enumerate(kinds, 1)}

def interrupted(kind, ring):
    say = [json.dumps({"waiting": kind})]
    threading.Timer(0.3, print, say, {"flush": True}).start()  # by then the call is made
    try:
        kinds[kind](ring)
    except KeyboardInterrupt:
        pass
    try:
        ring.barrier() if kind != "work" else None
        after = "nothing"
    except commlib.errors.RingError as error:
        after = str(error)
    print(json.dumps({"kind": kind, "state": ring.report()["state"], "after": after}), flush=True)

if comm.rank == 0:
    for kind, ring in rings.items():
        interrupted(kind, ring)
sys.stdin.readline()  # from here on both ranks do the same
manager = commlib.CommContextManager.instance()
manager.close(1)
again = commlib.new_ring(1, [0, 1])
print(json.dumps({"again": ops.all_reduce(x, 1).tolist(), "ring 0": comm.exchange([comm.rank])}))
sys.stdout.flush()
sys.stdin.readline()
import os
os._exit(0)
"""
VERBS = {"strided": "all_reduce"}
KINDS = ("all_reduce", "strided", "barrier", "recv", "group", "exchange", "work")


class Rank:
    """One process of the program, and the lines that it prints."""

    def __init__(self, rank: int, flag: str, port: int, folder: Path) -> None:
        env = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
        env |= {"RANK": str(rank), "FLAGS_dynamic_static_unified_comm": flag}
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder)],
            env=environment(**env),
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        self.limit = threading.Timer(LIMIT_S, self.process.kill)
        self.limit.start()

    def line(self) -> dict[str, Any]:
        """Return the next line of its output."""
        assert self.process.stdout is not None
        text = self.process.stdout.readline()
        if not text:
            pytest.fail(f"ended: {self.process.communicate(timeout=10)[1]}")
        record: dict[str, Any] = json.loads(text)
        return record

    def go_on(self) -> None:
        """Let it read a line."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def end(self) -> None:
        """Kill it, if it still runs."""
        self.limit.cancel()
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("flag", ["1", "0"], ids=["unified", "legacy"])
def test_interrupts(flag: str, tmp_path: Path) -> None:
    port = free_port()
    ranks = [Rank(rank, flag, port, tmp_path) for rank in range(2)]
    try:
        for kind in KINDS:
            assert ranks[0].line() == {"waiting": kind}
            began = time.monotonic()
            ranks[0].process.send_signal(signal.SIGINT)
            said = ranks[0].line()
            assert time.monotonic() - began < SECONDS, said
            if kind == "work":
                assert said == {"kind": "work", "state": "ready", "after": "nothing"}
                continue
            verb = VERBS.get(kind, kind)
            expected = f"a signal interrupted {verb}, which this rank has never finished"
            assert expected in said["state"]
            assert said["state"] in said["after"], said
        assert list(tmp_path.iterdir()) == []
        for rank in ranks:
            rank.go_on()
        for rank in ranks:
            assert rank.line() == {"again": [2.0] * 4, "ring 0": [[0], [1]]}
    finally:
        for rank in ranks:
            rank.end()
