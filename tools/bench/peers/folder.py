"""The folder with libraries of other projects' kernels, and the benchmarks that call them."""

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from commlib.tools.bench.peers.flashinfer import FlashInfer
from commlib.tools.bench.peers.flashinfer_experts import FlashInferExperts
from commlib.tools.bench.peers.memory import PeerMemory
from commlib.tools.bench.peers.sglang import SGLang
from commlib.tools.bench.peers.vllm import VLLM

ADAPTERS: Mapping[str, Mapping[str, Callable[[ctypes.CDLL, PeerMemory, Any], Any]]] = {
    "allreduce": {"libsgl.so": SGLang, "libfi.so": FlashInfer, "libvllm.so": VLLM},
    "dispatch": {"libmoe.so": FlashInferExperts},
}
PAGE = "docs/benchmark_peers.md"


def refusal(folder: str, benchmarks: Iterable[str] = ()) -> str | None:
    """Return why ``folder`` can't be used, or None if it has a library of any benchmark named.

    Benchmarks without peers of other projects don't count; none named is all.
    """
    named = [name for name in benchmarks if name in ADAPTERS] or list(ADAPTERS)
    files = ", ".join(file for name in named for file in ADAPTERS[name])
    if not Path(folder).is_dir():
        return f"--peers {folder}: there is no such folder; pass one with {files} ({PAGE})"
    if not any(libraries(folder, name) for name in named):
        return (
            f"--peers {folder}: none of {files} is in it; "
            f"build one or more of them as {PAGE} says, or remove --peers"
        )
    return None


def libraries(folder: str, benchmark: str) -> dict[str, Path]:
    """Return the libraries in ``folder`` that have an adapter for ``benchmark``."""
    paths = {name: Path(folder, name).resolve() for name in ADAPTERS[benchmark]}
    return {name: path for name, path in paths.items() if path.is_file()}


def contents(folder: str, benchmark: str) -> str:
    """Say which libraries are in ``folder``, each with a digest, and which are not."""
    paths = libraries(folder, benchmark)
    present = [
        f"{name} (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"
        for name, path in paths.items()
    ]
    absent = ", ".join(name for name in ADAPTERS[benchmark] if name not in paths)
    said = f"libraries of peers: {', '.join(present) or 'none'}"
    return said + (f"; absent: {absent}" if absent else "")


def load(path: str, memory: PeerMemory, work: Any) -> Any:
    """Load one library and set its peers up, together with the other ranks.

    Args:
        path: The file.
        memory: The memory of this rank.
        work: What its adapter takes: the most bytes of a sum, or the tokens of this rank.
    """
    adapters = {name: one for files in ADAPTERS.values() for name, one in files.items()}
    return adapters[Path(path).name](ctypes.CDLL(path), memory, work)
