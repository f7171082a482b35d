"""The folder with libraries of other projects' kernels."""

import ctypes
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from commlib.tools.bench.peers.flashinfer import FlashInfer
from commlib.tools.bench.peers.memory import PeerMemory
from commlib.tools.bench.peers.sglang import SGLang
from commlib.tools.bench.peers.vllm import VLLM

ADAPTERS: Mapping[str, Callable[[ctypes.CDLL, PeerMemory, int], Any]] = {
    "libsgl.so": SGLang,
    "libfi.so": FlashInfer,
    "libvllm.so": VLLM,
}
PAGE = "docs/benchmark_peers.md"


def refusal(folder: str) -> str | None:
    """Return why ``folder`` can't be used, or None if it can."""
    if not Path(folder).is_dir():
        return f"--peers {folder}: there is no such folder; pass one with {_names()} ({PAGE})"
    if not libraries(folder):
        return (
            f"--peers {folder}: none of {_names()} is in it; "
            f"build one or more of them as {PAGE} says, or remove --peers"
        )
    return None


def libraries(folder: str) -> dict[str, Path]:
    """Return the libraries in ``folder`` that have an adapter."""
    found = {name: Path(folder, name).resolve() for name in ADAPTERS}
    return {name: path for name, path in found.items() if path.is_file()}


def contents(folder: str) -> str:
    """Say which libraries are in ``folder``, each with a digest, and which are not."""
    found = libraries(folder)
    present = (
        f"{name} (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]})"
        for name, path in found.items()
    )
    absent = ", ".join(name for name in ADAPTERS if name not in found)
    return f"libraries of peers: {', '.join(present)}" + (f"; absent: {absent}" if absent else "")


def load(path: str, memory: PeerMemory, most: int) -> Any:
    """Load one library and set its peers up, together with the other ranks."""
    return ADAPTERS[Path(path).name](ctypes.CDLL(path), memory, most)


def _names() -> str:
    return ", ".join(ADAPTERS)
