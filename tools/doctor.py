"""`commlib doctor`: what this machine and process have, and what of it will not work."""

import ctypes
import platform
from collections.abc import Iterable, Iterator
from importlib import metadata, util
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from commlib import flags
from commlib.engines import libnccl, nccl
from commlib.engines.gloo import GlooEngine
from commlib.engines.reductions import refusals
from commlib.engines.torch_distributed import TorchDistributedEngine
from commlib.errors import CommError
from commlib.rendezvous import environment

Row = tuple[str, ...]

PACKAGES = (
    "commlib",
    "torch",
    "numpy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cuda-bindings",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
)
LIBRARIES = ("libnccl.so", "libcudart.so", "libnvrtc.so", "libcuda.so")


def run_doctor() -> int:
    """Print one table a subject, then every complaint; return 0 without one, else 1."""
    console = Console(markup=False, highlight=False)
    complaints = list(_complaints())
    for title, columns, rows in (
        ("versions", ("what", "version"), _versions()),
        ("libraries in this process", ("library", "file"), _libraries()),
        ("GPUs", ("index", "name", "memory GiB", "capability"), _gpus()),
        ("peer access", ("from", "reaches"), _peers()),
        ("flags", ("name", "type", "default", "value", "source"), _flags()),
        ("rendezvous", ("what", "value"), _rendezvous()),
        ("reductions refused", ("engines", "dtypes", "operations", "reason"), _refused()),
    ):
        _show(console, title, columns, list(rows))
    for name, flag in flags.unknown():
        if flag is None:  # perhaps of another library
            console.print(f"note: {flags.unknown_text(name, flag)}", soft_wrap=True)
    for complaint in complaints:
        console.print(complaint, style="red", soft_wrap=True)
    console.print(f"complaints: {len(complaints)}")
    return 1 if complaints else 0


def _show(console: Console, title: str, columns: Row, rows: list[Row]) -> None:
    if not rows:
        console.print(f"{title}: none")
        return
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _complaints() -> Iterator[str]:
    """Say what will not work; loads the NCCL engine on the way, so that its libraries show."""
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
    for what, look in (("rendezvous", environment.world), ("flags", flags.rows)):
        try:
            look()
        except CommError as error:
            yield f"{what}: {error}"
    for name, flag in flags.unknown():
        if flag is not None:
            yield f"flags: {flags.unknown_text(name, flag)}"


def _versions() -> Iterator[Row]:
    yield "python", platform.python_version()
    for package in PACKAGES:
        version = _version(package)
        if version:
            yield package, version
    yield "driver supports CUDA", _driver() or "no driver"
    yield "torch was built for CUDA", torch.version.cuda or "no: CPU build"
    if torch.cuda.is_available():
        yield "NCCL of torch", ".".join(map(str, torch.cuda.nccl.version()))
    if util.find_spec("cupy"):
        yield "NCCL of CuPy", _cupy_nccl()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed: this checkout" if package == "commlib" else None


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
        for file in sorted(set(_mapped(library))):
            yield library, file


def _mapped(library: str) -> Iterable[str]:
    for line in Path("/proc/self/maps").read_text().splitlines():
        file = line.split()[-1]
        if Path(file).name.startswith(library):
            yield file


def _gpus() -> Iterator[Row]:
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        memory = f"{gpu.total_memory / 2**30:.1f}"
        yield str(index), gpu.name, memory, f"{gpu.major}.{gpu.minor}"


def _peers() -> Iterator[Row]:
    gpus = range(torch.cuda.device_count())
    for one in gpus:
        peers = [p for p in gpus if p != one and torch.cuda.can_device_access_peer(one, p)]
        if len(gpus) > 1:
            yield str(one), ", ".join(map(str, peers)) or "none"


def _flags() -> Iterator[Row]:
    try:
        rows = flags.rows()
    except CommError:  # which is among the complaints
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
    yield "local rank", "not known" if world.local_rank is None else str(world.local_rank)
    place = world.address
    yield "store", f"{place[0]}:{place[1]}" if place else "none: one rank alone"


def _refused() -> Iterator[Row]:
    """One row a reason: which reductions of which dtypes an engine does not take."""
    found: dict[str, tuple[dict[str, None], ...]] = {}  # dicts keep the order, sets do not
    for engine in (nccl.NCCLEngine, GlooEngine, TorchDistributedEngine):
        for (dtype, op), reason in refusals(engine.reducer).items():
            names = engine.name, str(dtype).removeprefix("torch."), op
            for known, name in zip(found.setdefault(reason, ({}, {}, {})), names, strict=True):
                known[name] = None
    for reason, columns in found.items():
        yield (*(", ".join(column) for column in columns), reason)
