"""The fixtures that give tests live ranks on every engine and device of this machine."""

import functools
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commlib.tools import launch
from tests.support.processes import warm_ranks
from tests.support.ranks import UNIFIED, NewRanks, Place, Ranks, fresh

# NVML counts the GPUs: no CUDA context is made in the parent.
GPUS = torch.cuda.device_count()
# Fixtures of tests that only GPUs can run.
ON_GPUS = {
    "all_gpu_ranks", "compared_on_gpu", "gpu_ranks", "legacy_gpu_ranks", "new_gpu_ranks",
    "new_cpu_ranks_with_gpus",
}  # fmt: skip


def _visible() -> list[str]:
    """Return the GPUs of this xdist worker. Each begins at another one, so that all are used."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(GPUS)))
    visible = named.split(",")[:GPUS]  # CUDA stops at the first name that it does not know
    first = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % len(visible)
    return visible[first:] + visible[:first]


if GPUS:
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(_visible())  # also for programs of one rank


def _gpus() -> tuple[str, ...]:
    """Return the pair of GPUs of this xdist worker; the only GPU of a machine has both ranks."""
    return tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[:2])


def _places() -> Iterator[Any]:
    for engine in UNIFIED:
        yield pytest.param(Place(engine), id=engine)
    if GPUS:
        for engine in UNIFIED:
            config = Place(engine, "gpu", _gpus())
            yield pytest.param(config, id=f"{engine}-gpu", marks=pytest.mark.gpu)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the long form of the mixed calls be asked for: --mixed-calls 1000000."""
    parser.addoption("--mixed-calls", type=int, default=1500, help="calls of the mixed tests")


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers of the cases that need GPUs; set what programs of tests inherit.

    Ctrl-C reaches them: a shell starts its background jobs with SIGINT ignored. All of them compile
    into one folder of this run, so that no other run decides on cache hits.
    """
    config.addinivalue_line("markers", "gpu: runs on a pair of GPUs, or on one that ranks share")
    config.addinivalue_line("markers", "two_gpus: each rank needs its own GPU")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):  # workers of xdist inherit it too
        folder = tempfile.TemporaryDirectory(prefix="commlib-tests-", ignore_cleanup_errors=True)
        config.add_cleanup(folder.cleanup)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
        # Trying the vector instructions costs 7 s, and compiling with them costs more: the
        # generated loops are Inductor's, the collectives between them are ours.
        os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "0"
        # No measurement chooses kernels of sums: code that is compiled twice has the same bits.
        os.environ["TORCHINDUCTOR_FORCE_FILTER_REDUCTION_CONFIGS"] = "1"
        # Dozens of processes share a GPU; each communicator takes 700 MiB with all its channels.
        os.environ.setdefault("NCCL_MAX_NCHANNELS", "4")
        # Else each process that compiles starts others, which load torch.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
        # Hundreds of programs import commlib: from byte code, in half the time.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        # torch asks for the name of each peer of a store. Where the name server loses a request,
        # the resolver repeats it after 5 s, which is the deadline of many a test.
        os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:5")


def pytest_collection_finish() -> None:
    """Take the collected tests out of the collections of garbage, which else walk all of them."""
    gc.collect()
    gc.freeze()


def pytest_report_header() -> str:
    """Say which devices the ranks of this run use."""
    more = "and on pairs of GPUs" if GPUS >= 2 else "and on one GPU, which they share"
    also = more if GPUS else "only: no gpu cases without a GPU"
    return f"commlib: {GPUS} GPUs; ranks run on the CPU {also}"


@pytest.fixture(scope="session")
def _live() -> Iterator[Callable[[int, Place], Ranks]]:
    """The live ranks of this process, from their first use to the end of the session."""
    live: dict[tuple[int, Place], Ranks] = {}
    yield lambda size, place: live.setdefault((size, place), Ranks(size, place))
    for ranks in live.values():
        ranks.stop()


@pytest.fixture(params=_places())
def ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """``ranks(fn, *args, deadline=60)`` runs ``fn(comm, *args)`` on two live ranks."""
    return _live(2, request.param)


@pytest.fixture(params=[param for param in _places() if "legacy" not in param.id])
def unified_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """The same on one engine, for what takes long and knows no engine: generated code."""
    return _live(2, request.param)


@pytest.fixture
def warm_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the launchers of commlib.tools, and their ranks, from a process that loaded torch."""
    programs = warm_ranks()
    for name, value in programs.items():
        monkeypatch.setenv(name, value)
    python = SimpleNamespace(executable=programs["PYTHON_EXEC"], platform=sys.platform)
    monkeypatch.setattr(launch, "sys", python)


def _gpu_places(*engines: str) -> list[Any]:
    if not GPUS:
        return [None]  # such tests are not collected
    return [
        pytest.param(Place(engine, "gpu", _gpus()), id=f"{engine}-gpu", marks=pytest.mark.gpu)
        for engine in engines
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out tests that only GPUs can run where there are not enough of them."""
    items[:] = [item for item in items if _gpus_needed(item) <= GPUS]


def _gpus_needed(item: pytest.Item) -> int:
    fixtures = {*getattr(item, "fixturenames", ())}
    if "many_gpu_ranks" in fixtures:
        return 3
    if item.get_closest_marker("two_gpus") is not None:
        return 2
    return 1 if fixtures & ON_GPUS or item.get_closest_marker("gpu") is not None else 0


@pytest.fixture(params=_gpu_places("unified"))
def gpu_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """Two live ranks on a pair of GPUs, with the NCCL engine of commlib."""
    return _live(2, request.param)


@pytest.fixture(params=_gpu_places("legacy"))
def legacy_gpu_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """Two live ranks on a pair of GPUs, with torch.distributed."""
    return _live(2, request.param)


@pytest.fixture(params=_gpu_places("unified", "legacy"))
def all_gpu_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """Two live ranks on a pair of GPUs, with each engine."""
    return _live(2, request.param)


@pytest.fixture(params=_gpu_places("unified"))
def new_gpu_ranks(request: pytest.FixtureRequest) -> NewRanks:
    """``with new_gpu_ranks(4) as ranks:`` starts that many ranks, which share a pair of GPUs."""
    return functools.partial(fresh, place=request.param)


@pytest.fixture(params=_gpu_places("unified"))
def new_cpu_ranks_with_gpus(request: pytest.FixtureRequest) -> NewRanks:
    """The same for ranks whose ring 0 is on the CPU; each sees the pair of GPUs."""
    return functools.partial(fresh, place=replace(request.param, shared=False))


@pytest.fixture(params=UNIFIED)
def cpu_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """The same on the CPU alone, where the host itself waits for a collective."""
    return _live(2, Place(request.param))


@pytest.fixture(params=UNIFIED)
def three_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """The same with three ranks on the CPU."""
    return _live(3, Place(request.param))


@pytest.fixture(params=UNIFIED)
def four_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """The same with four ranks on the CPU."""
    return _live(4, Place(request.param))


def _many_ranks() -> Iterator[Any]:
    """More than two ranks: on as many GPUs as there are, else three on the CPU."""
    if GPUS < 3:
        yield pytest.param((3, Place()), id="3")
    for size in range(3, min(GPUS, 8) + 1):
        gpus = tuple(os.environ["CUDA_VISIBLE_DEVICES"].split(",")[:size])
        yield pytest.param(
            (size, Place("unified", "gpu", gpus)), id=f"{size}-gpu", marks=pytest.mark.gpu
        )


@pytest.fixture(params=_many_ranks())
def many_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """The same on one engine with three and more ranks."""
    return _live(*request.param)


@pytest.fixture(params=[param for param in _many_ranks() if param.marks] or [None])
def many_gpu_ranks(request: pytest.FixtureRequest, _live: Callable[[int, Place], Ranks]) -> Ranks:
    """The same on GPUs alone."""
    return _live(*request.param)


@pytest.fixture(params=UNIFIED)
def new_ranks(request: pytest.FixtureRequest) -> NewRanks:
    """``with new_ranks(3) as ranks:`` starts that many CPU ranks for one test."""
    return functools.partial(fresh, place=Place(request.param))
