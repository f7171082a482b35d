"""Facts about the machine of a benchmark, which a reader needs to judge and repeat its figures."""

import os
import time
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec

import torch

from commlib.tools.doctor import gpus, machine, versions

Fact = tuple[str, str]


def facts() -> tuple[Fact, ...]:
    """Return date, CPU, GPUs, load and versions, without names of the host or its folders."""
    return tuple(_facts())


def _facts() -> Iterator[Fact]:
    yield "date", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    yield from ((name, value) for name, value in machine())
    yield "load at the start", f"{os.getloadavg()[0]:.1f} over the last minute"
    names = Counter(name for _, name, *_ in gpus())
    yield "GPUs", ", ".join(f"{count} x {name}" for name, count in names.items()) or "none"
    yield from ((name, version) for name, version in versions() if version != "no driver")


def gpu_refusal(nproc: int, least: int = 2, *, shares: bool = False) -> str | None:
    """Return why a benchmark with one GPU per rank can't run here; None if it can.

    ``shares``: all ranks may share the only GPU.
    """
    if nproc < least:
        return f"{nproc} ranks: expected {least} or more; pass --nproc 2"
    if torch.cuda.device_count() < nproc and not (shares and shares_gpu(nproc)):
        either = f"{nproc} GPUs{', or one that they share' if shares else ''}"
        return f"{nproc} ranks need {either}; this machine shows {torch.cuda.device_count()}"
    if find_spec("cupy") is None:
        return (
            "CuPy is not installed; "
            "run pip install '/path/to/commlib[cuda13]' or '/path/to/commlib[cuda12]'"
        )
    return None


def shares_gpu(nproc: int) -> bool:
    """Return True if ``nproc`` ranks have one GPU together."""
    return nproc > 1 and torch.cuda.device_count() == 1
