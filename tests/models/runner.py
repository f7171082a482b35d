"""Run programs in forked processes, so that the crash of one does not reach the others.

On a CPU each run has its own process, forked from one that has loaded the libraries. On GPUs a
process runs one program after the other until something goes wrong.
"""

import functools
import multiprocessing as mp
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tests.models.compare import Outcome, Record, first_difference, outcome, record
from tests.models.program import Program, Start
from tests.support.ranks import alone_on_a_host, return_unused_memory, torchrun_environment
from tests.support.stores import loopback_store

DEADLINE_S = 120
_fork = mp.get_context("fork")


def quiet() -> None:
    """Keep libraries from the network and from printing; run before they are imported."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["DIFFUSERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


class Worker:
    """A forked process that runs jobs one after the other."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._jobs, theirs = _fork.Pipe()
        self._process = _fork.Process(target=_serve, args=(theirs, environment), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, job: Callable[[], Record]) -> None:
        """Begin a job."""
        self._jobs.send(job)

    def receive(self) -> Record:
        """Return what the job gave, or why there is nothing."""
        try:
            if self._jobs.poll(DEADLINE_S):
                result = self._jobs.recv()
                assert isinstance(result, Record)
                return result
            return Record(error=f"not done after {DEADLINE_S} s")
        except (EOFError, ConnectionError):
            self._process.join(5)
            return Record(error=f"the process died with exit code {self._process.exitcode}")

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self._jobs.close()


def _serve(jobs: Any, environment: dict[str, str]) -> None:
    os.environ.update(environment)
    sys.stdin.close()
    os.dup2(2, 1)  # what programs print is not an answer
    # The first thread that uses torch's pool of threads after a fork replaces it, without a lock.
    # Of autograd's threads, which begin together, one may find no pool, and ends the process.
    torch.set_num_threads(1)
    while True:
        try:
            job = jobs.recv()
        except EOFError:
            os._exit(0)
        try:
            result = job()
            return_unused_memory()
        except BaseException:
            result = Record(error=traceback.format_exc())
        jobs.send(result)


class Runner:
    """Runs programs on one kind of device and compares their runs."""

    def __init__(self, device: str, programs: dict[str, Program]) -> None:
        self._device, self._programs = device, programs
        self._kept: Worker | None = None

    def run(self, name: str) -> Outcome:
        """Run a program eagerly and captured, and say what the comparison came to."""
        program = self._programs[name]
        if program.ranks > 1:
            return self._on_ranks(program)
        result = self._compared(program, program.start)
        if result.kind == "refused" and program.remedied is not None:
            changed = self._compared(program, program.remedied)
            if changed.kind == "equal":
                return replace(changed, kind="remedied", text=result.text)
            return replace(changed, text=f"{result.text}. With the change: {changed.text}")
        return result

    def _compared(self, program: Program, start: Start) -> Outcome:
        eager = self._record(program, start, captured=False)
        captured = self._record(program, start, captured=True)
        result = outcome(program, eager, captured)
        if result.kind == "different":
            again = self._record(program, start, captured=False)
            if first_difference(eager, again):
                result.kind = "unsteady"
        if result.kind not in ("equal", "close", "refused", "idle"):
            self._end()
        return result

    def _record(self, program: Program, start: Start, *, captured: bool) -> Record:
        worker = self._kept or Worker({})
        remedied = start is program.remedied
        job = functools.partial(_recorded, program.name, self._device, remedied, captured)
        worker.send(job)
        result = worker.receive()
        self._kept = worker
        if self._device == "cpu" or (result.error and not result.refused):
            self._end()
        return result

    def _end(self) -> None:
        if self._kept is not None:
            self._kept.stop()
            self._kept = None

    def _on_ranks(self, program: Program) -> Outcome:
        """Compare on each rank; the first rank that is not equal speaks for all."""
        runs = []
        for captured in (False, True):
            store = loopback_store()
            shared = self._device != "cpu" and torch.cuda.device_count() < program.ranks
            workers = [
                Worker(_rank(store.port, i, program.ranks) | (alone_on_a_host(i) if shared else {}))
                for i in range(program.ranks)
            ]
            for rank, worker in enumerate(workers):
                gpu = f"{self._device}:{0 if shared else rank}"
                device = self._device if self._device == "cpu" else gpu
                worker.send(functools.partial(_recorded, program.name, device, False, captured))
            runs.append([worker.receive() for worker in workers])
            for worker in workers:
                worker.stop()
        results = [outcome(program, eager, captured) for eager, captured in zip(*runs, strict=True)]
        return next((each for each in results if each.kind != "equal"), results[0])


def _rank(port: int, rank: int, size: int) -> dict[str, str]:
    return {**torchrun_environment(port, rank, size), "FLAGS_dynamic_static_unified_comm": "1"}


def _recorded(name: str, device: str, remedied: bool, captured: bool) -> Record:
    """Run one program; the process was forked after all programs were known."""
    from tests.models.catalog import programs

    program = programs()[name]
    start = program.start
    if remedied:
        assert program.remedied is not None
        start = program.remedied
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        os.chdir(folder)
        torch_device = torch.device(device)
        if torch_device.type == "cuda":
            torch.cuda.set_device(torch_device.index or 0)
        result = record(program, start, torch_device, captured=captured)
        os.chdir("/")
    return result
