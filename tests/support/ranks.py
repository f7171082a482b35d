"""Live ranks: processes that stay up and run one function after another, all of them at once."""

import faulthandler
import functools
import gc
import multiprocessing as mp
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch

import commlib
from commlib.tools.launch import one_gpu_for_all
from tests.support.processes import LOADING, ROOT
from tests.support.stores import loopback_store

UNIFIED = {"unified": "1", "legacy": "0"}
_KILLED = f"died with exit code {-signal.SIGKILL}"
START_S = 120  # The time to connect several processes on a busy machine.
GRACE_S = 3  # A rank still gets this once another rank has failed: it is likely stuck.
UNUSED_BYTES = 2**27  # A process may keep that much GPU memory between two tests.
WHERE = signal.SIGRTMAX  # LLVM, which compilers of kernels bring, takes SIGUSR1.
SIGNAL_S = 5.0  # The time until a busy machine runs the handler of a signal.


def torchrun_environment(port: int, rank: int, size: int) -> dict[str, str]:
    """Return what torchrun would give a rank that meets the others at a local port."""
    return {
        "FLAGS_comm_timeout_s": "30",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
    }


@dataclass(frozen=True)
class Place:
    """The place of ranks: the engine, the kind of device and the GPUs they see.

    More ranks than GPUs share them, or use the CPU where ``shared`` is False.
    """

    engine: str = "unified"
    device: str = "cpu"
    gpus: tuple[str, ...] = ()
    shared: bool = True

    def environment(self, port: int, rank: int, size: int) -> dict[str, str]:
        """Return what torchrun would give this rank, with the flag of the engine."""
        return {
            **torchrun_environment(port, rank, size),
            **self._gpu(rank, size),
            "FLAGS_dynamic_static_unified_comm": UNIFIED[self.engine],
        }

    def _gpu(self, rank: int, size: int) -> dict[str, str]:
        """Return what gives a rank its own GPU, or the one that it shares."""
        if not self.shared or size <= len(self.gpus) or not self.gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        gpu = self.gpus[rank % len(self.gpus)]
        return {**alone_on_a_host(rank), "CUDA_VISIBLE_DEVICES": gpu}


def alone_on_a_host(rank: int) -> dict[str, str]:
    """Return what lets ranks share a GPU, as far as NCCL knows on a host each."""
    # Dozens of processes connect to one GPU.
    return {**one_gpu_for_all(rank), "FLAGS_comm_timeout_s": "45"}


@functools.cache
def _forkserver() -> Any:
    """Return what ranks are forked from: a process that has imported ``loaded.py``."""
    forks = mp.get_context("forkserver")
    forks.set_forkserver_preload(["tests.support.loaded"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in LOADING.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)  # it ignores what it can't find
        forkserver.ensure_running()
    return forks


class Ranks:
    """Processes of one ring 0; ``ranks(fn, *args)`` runs ``fn(comm, *args)`` on every one.

    They start at the first call. A failure shows every rank's traceback and ends them, for what is
    left of a broken pair would make the next test fail too; the next call starts fresh ones.
    """

    def __init__(self, size: int = 2, place: Place | None = None) -> None:
        self.size, self.place = size, place or Place()
        self.members: list[_Member] = []

    def __call__(
        self,
        fn: Callable[..., None],
        *args: object,
        deadline: float = 60,
        lost: frozenset[int] = frozenset(),
    ) -> None:
        """Run ``fn`` on every rank; those in ``lost`` must die of SIGKILL in it.

        On GPUs, which dozens of processes share, ``deadline`` is twice as long.
        """
        if not self.alive():
            self._start()
        self._run(fn, args, 2 * deadline if self.place.gpus else deadline, lost)
        if lost:
            self.kill()

    def _start(self) -> None:
        self.kill()
        # Their own store, on a port that the system chose: nothing to race for.
        self.store = loopback_store()
        self.members = [self._spawn(rank) for rank in range(self.size)]
        self._run(_arrive, (), START_S)

    def _spawn(self, rank: int) -> "_Member":
        server = _forkserver()
        jobs, their_jobs = server.Pipe()
        stacks, their_where = server.Pipe(duplex=False)
        environment = self.place.environment(self.store.port, rank, self.size)
        process = server.Process(
            target=_worker,
            name=f"rank {rank} ({self.place.engine}, {self.place.device})",
            args=(their_jobs, their_where, environment),
            daemon=True,
        )
        process.start()
        their_jobs.close()  # so that the end of the process is the end of the pipe
        their_where.close()
        return _Member(process, jobs, stacks)

    def _run(
        self,
        fn: Callable[..., None],
        args: tuple[object, ...],
        deadline: float,
        lost: frozenset[int] = frozenset(),
    ) -> None:
        job = bytes(ForkingPickler.dumps((fn, args)))  # views of it in cycles crash Python 3.12
        for member in self.members:
            member.jobs.send_bytes(job)
        reports = self._collect(deadline, frozenset(self.members[rank].name for rank in lost))
        wanted = {self.members[rank].name: _KILLED for rank in lost}
        if any(reports[member.name] != wanted.get(member.name) for member in self.members):
            self.kill()
            texts = (f"{name}: {text or 'finished'}" for name, text in sorted(reports.items()))
            pytest.fail("\n".join(texts), pytrace=False)

    def _collect(self, deadline: float, lost: frozenset[str]) -> dict[str, str | None]:
        """Return each rank's traceback, or None where it finished."""
        reports: dict[str, str | None] = {}
        begin = time.monotonic()
        end = begin + deadline
        waiting = {member.jobs: member for member in self.members}
        while waiting and (left := end - time.monotonic()) > 0:
            for pipe in wait(list(waiting), left):
                assert isinstance(pipe, Connection)
                member = waiting.pop(pipe)
                reports[member.name] = report = member.report()
                if report is not None and member.name not in lost:
                    end = min(end, time.monotonic() + GRACE_S)
        spent = time.monotonic() - begin
        for member in waiting.values():
            reports[member.name] = f"still inside after {spent:.0f} s:\n{member.whereabouts()}"
        return reports

    def alive(self) -> bool:
        """Return True if every process is alive."""
        return bool(self.members) and all(member.process.is_alive() for member in self.members)

    def kill(self) -> None:
        """End the processes at once."""
        for member in self.members:
            member.process.kill()
            member.process.join()
        self.members = []

    def stop(self) -> None:
        """Let live processes shut down; raise when one of them does not end well."""
        if not self.alive():
            return
        for member in self.members:
            member.jobs.send_bytes(b"")
        for member in self.members:
            member.process.join(20)
        codes = {member.name: member.process.exitcode for member in self.members}
        self.kill()
        if set(codes.values()) != {0}:
            raise RuntimeError(f"exit codes {codes}; expected 0 from every rank (None: no exit)")


@dataclass(frozen=True)
class _Member:
    """One rank as its parent sees it."""

    process: Any
    jobs: "Connection[bytes, Any]"
    where: "Connection[Any, Any]"

    @property
    def name(self) -> str:
        return str(self.process.name)

    def report(self) -> str | None:
        """Return what the rank says of its job: a traceback, or None for success."""
        try:
            said = self.jobs.recv()
        except (EOFError, ConnectionError):
            self.process.join(5)
            return f"died with exit code {self.process.exitcode}"
        return said if said is None else str(said)

    def whereabouts(self) -> str:
        """Return the stack of every thread, also of one that is stuck inside a library.

        A process that runs no signal handler is stuck in the kernel, which says where.
        """
        os.kill(self.process.pid, WHERE)
        text, patience = b"", SIGNAL_S
        while self.where.poll(patience):
            chunk = os.read(self.where.fileno(), 65536)
            if not chunk:
                break
            text, patience = text + chunk, 0.5
        return text.decode(errors="replace") or self._in_the_kernel()

    def _in_the_kernel(self) -> str:
        """Return the state of every thread, and where the kernel holds it."""
        tasks = sorted(Path(f"/proc/{self.process.pid}/task").glob("*"))
        return "\n".join(
            f"thread {task.name}: "
            + " ".join((task / name).read_text().strip() for name in ("stat", "wchan"))
            for task in tasks
        )


def _worker(
    jobs: "Connection[Any, bytes]", where: "Connection[Any, Any]", environment: dict[str, str]
) -> None:
    faulthandler.register(WHERE, file=where.fileno(), all_threads=True)
    os.environ.update(environment)
    while job := _next(jobs):
        jobs.send(_outcome(job))
    commlib.shutdown()
    gc.freeze()  # else the interpreter walks all that torch.compile left, a second a rank


def _next(jobs: "Connection[Any, bytes]") -> bytes:
    try:
        return jobs.recv_bytes()
    except EOFError:  # the parent is gone
        os._exit(1)


def _outcome(job: bytes) -> str | None:
    """Run one job, then meet: a test that leaves the ranks out of step fails itself."""
    try:
        fn, args = pickle.loads(job)
        manager = commlib.CommContextManager.instance()
        fn(commlib.comm() if manager.has(0) else _init(), *args)
        for ring_id in [ring for ring in reversed(manager.rings()) if ring]:
            manager.close(ring_id)  # the next test finds ring 0 alone
        return_unused_memory()  # it waits for the GPU, where the barrier of a lost peer never ends
        if manager.has(0):
            commlib.comm().barrier()
    except BaseException:  # the parent must learn of every failure
        return traceback.format_exc()
    finally:
        faulthandler.cancel_dump_traceback_later()  # the guard of a benchmark would end the rank
    return None


def return_unused_memory() -> None:
    """Free the GPU memory that torch keeps for later: dozens of processes share a GPU."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > UNUSED_BYTES:
        torch.cuda.empty_cache()


def _init() -> Any:
    torch.set_num_threads(1)
    return commlib.init()


def _arrive(comm: Any) -> None:
    """Come up; the barrier after every job proves that the others did."""


@contextmanager
def fresh(size: int, place: Place | None = None) -> Iterator[Ranks]:
    """Give ``size`` separate ranks to a test that needs more than two, or that breaks them."""
    ranks = Ranks(size, place)
    try:
        yield ranks
        ranks.stop()
    finally:
        ranks.kill()


NewRanks = Callable[[int], AbstractContextManager[Ranks]]
