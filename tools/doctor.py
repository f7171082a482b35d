"""`commlib doctor`: the state of this machine and process, with complaints about both."""

import ctypes
import json
import os
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata, util
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from commlib import flags, torch_allocator
from commlib.engines import libnccl
from commlib.engines.c10d.gloo import GlooEngine
from commlib.engines.c10d.torch_distributed import TorchNCCLEngine
from commlib.engines.nccl.engine import NCCLEngine
from commlib.engines.reductions import refusals
from commlib.errors import CommError
from commlib.rendezvous import environment
from commlib.version import __version__

Row = tuple[str, ...]

PACKAGES = (
    "torch",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
LIBRARIES = ("libnccl.so", "libcudart.so", "libnvrtc.so", "libcuda.so")


def run_doctor(*, as_json: bool = False) -> int:
    """Print the complaints, then one table per subject; return 1 if there are complaints, else 0.

    Args:
        as_json: Print one JSON object instead: complaints, notes, and a list per subject.
    """
    complaints, notes = list(_complaints()), list(_notes())
    subjects = {
        title: [dict(zip(columns, row, strict=True)) for row in rows]
        for title, columns, rows in _subjects()
    }
    if as_json:
        print(json.dumps({"complaints": complaints, "notes": notes, **subjects}, indent=2))
        return 1 if complaints else 0
    console = Console(markup=False, highlight=False)
    console.print(f"complaints: {len(complaints)}")
    for complaint in complaints:
        console.print(complaint, style="red", soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True)
    for title, rows in subjects.items():
        _show(console, title, rows)
    return 1 if complaints else 0


def _subjects() -> Iterator[tuple[str, Row, Iterable[Row]]]:
    """Yield title, columns and rows of each subject."""
    yield "features", ("name", "here", "why not"), _features()
    yield "machine", ("name", "value"), machine()
    yield "versions", ("name", "version"), versions()
    yield "GPUs", ("index", "name", "memory GiB", "capability"), gpus()
    yield "peer access", ("from", "reaches"), _peers()
    yield "rendezvous", ("name", "value"), _rendezvous()
    yield "flags", ("name", "type", "default", "value", "source"), _flags()
    yield "libraries in this process", ("library", "file"), _libraries()
    yield "unsupported reductions", ("engines", "dtypes", "operations", "reason"), _unsupported()


def _notes() -> Iterator[str]:
    """Yield remarks about names of flags that may belong to another library."""
    for name, flag in flags.unknown():
        if flag is None:
            yield flags.unknown_text(name, flag)


def _show(console: Console, title: str, rows: list[dict[str, str]]) -> None:
    if not rows:
        console.print(f"{title}: none")
        return
    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def _complaints() -> Iterator[str]:
    """Yield the problems found; loads libnccl, so that the table of libraries shows it."""
    if torch.cuda.is_available():
        try:
            libnccl.library()
        except CommError as error:
            yield f"nccl engine: {error}"
    elif _driver() is not None:
        yield (
            f"the driver supports CUDA {_driver()}, but torch {torch.__version__} can't use it; "
            f"install a torch built for that CUDA"
        )
    for subject, read in (("rendezvous", environment.world), ("flags", flags.check)):
        try:
            read()
        except CommError as error:
            yield f"{subject}: {error}"
    for name, flag in flags.unknown():
        if flag is not None:
            yield f"flags: {flags.unknown_text(name, flag)}"


def _features() -> Iterator[Row]:
    """Yield what commlib can do on this machine, and why not the rest."""
    count = torch.cuda.device_count()
    no_gpu = "" if count else "no GPU that torch can use"
    cupy = (
        "" if util.find_spec("cupy") else "CuPy is not installed: take the extra cuda13 or cuda12"
    )
    several = "" if count > 1 else "fewer than two GPUs"
    reached = [peers for _, peers in _peers()]
    peers = "none of the GPUs reaches another one's memory" if set(reached) == {"none"} else ""
    no_graph = no_gpu and f"{no_gpu}; replays run the operators again"
    needs: dict[str, Row] = {
        "gloo engine, on CPUs": (),
        "nccl engine, on GPUs": (no_gpu, cupy),
        "push kernels, between GPUs": (no_gpu, cupy, several, peers),
        "CUDA graphs": (no_graph,),
    }
    for name, reasons in needs.items():
        why = next(filter(None, reasons), "")
        yield name, "no" if why else "yes", why


def machine() -> Iterator[Row]:
    """Yield the operating system and the processor."""
    libc = " ".join(platform.libc_ver()).strip()
    yield "system", f"{platform.system()} {platform.machine()}{libc and f', {libc}'}"
    yield "CPU", _cpu()
    yield "cores", str(os.cpu_count())


def _cpu() -> str:
    """Return the processor's model, which ``platform.processor`` knows on few systems only."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def versions() -> Iterator[Row]:
    """Yield the names and versions of the software that decides how commlib runs."""
    yield "python", platform.python_version()
    yield "commlib", __version__
    for package in PACKAGES:
        version = _version(package)
        if version:
            yield package, version
    yield "driver supports CUDA", _driver() or "no driver"
    yield "torch was built for CUDA", torch.version.cuda or "no: CPU build"
    yield "torch takes GPU memory from", torch_allocator.current() or "none: CPU build"
    if torch.cuda.is_available():
        yield "NCCL of torch", ".".join(map(str, torch.cuda.nccl.version()))
    if util.find_spec("cupy"):
        yield "NCCL of CuPy", _cupy_nccl()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Return the newest CUDA version that the driver supports; None without a driver."""
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _cupy_nccl() -> str:
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        return str(error)
    number = nccl.get_version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _libraries() -> Iterator[Row]:
    for library in LIBRARIES:
        for path in sorted(set(_mapped(library))):
            yield library, path


def _mapped(library: str) -> Iterable[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.split()[-1]
        if Path(path).name.startswith(library):
            yield path


def gpus() -> Iterator[Row]:
    """Yield index, name, memory and compute capability of every visible GPU."""
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.1f}"
        yield str(index), gpu.name, memory, f"{gpu.major}.{gpu.minor}"


def _peers() -> Iterator[Row]:
    indices = range(torch.cuda.device_count())
    for index in indices:
        peers = [p for p in indices if p != index and torch.cuda.can_device_access_peer(index, p)]
        if len(indices) > 1:
            yield str(index), ", ".join(map(str, peers)) or "none"


def _flags() -> Iterator[Row]:
    try:
        rows = flags.rows()
    except CommError:  # the complaints show it
        return
    for row in rows:
        yield tuple(str(row[column]) for column in ("name", "type", "default", "value", "source"))


def _rendezvous() -> Iterator[Row]:
    try:
        world = environment.world()
    except CommError as error:
        yield "unusable", str(error)
        return
    yield "rank", f"{world.rank} of {world.size}"
    yield "local rank", "unknown" if world.local_rank is None else str(world.local_rank)
    address = world.address
    yield "store", f"{address[0]}:{address[1]}" if address else "none: single rank"


def _unsupported() -> Iterator[Row]:
    """Yield one row per reason: engines, dtypes and operations that it excludes."""
    reasons: dict[str, tuple[dict[str, None], ...]] = {}  # dicts keep the order, sets do not
    for engine in (NCCLEngine, GlooEngine, TorchNCCLEngine):
        for (dtype, op), reason in refusals(engine.reducer).items():
            names = engine.name, str(dtype).removeprefix("torch."), op
            for column, name in zip(reasons.setdefault(reason, ({}, {}, {})), names, strict=True):
                column[name] = None
    for reason, columns in reasons.items():
        yield (*(", ".join(column) for column in columns), reason)
