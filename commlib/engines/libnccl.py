"""The one libnccl of this process: the one that torch has loaded."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch

from commlib.errors import EngineError


@cache
def library() -> Any:
    """Return ``cupy.cuda.nccl`` over the libnccl that torch has loaded.

    Raises ``EngineError`` when CuPy is missing or the process holds two copies of libnccl.
    """
    try:
        from cupy.cuda import nccl
    except ImportError as error:
        raise EngineError(
            f"the nccl engine needs CuPy ({error}); "
            f"run pip install '/path/to/commlib[cuda13]' or '/path/to/commlib[cuda12]'"
        ) from error
    paths = library_paths()
    if len(paths) != 1:
        raise EngineError(
            f"expected one libnccl in this process, found {len(paths)}: {paths}; two copies crash. "
            f"Import torch before cupy, and remove the extra nvidia-nccl package or LD_PRELOAD"
        )
    ours, theirs = nccl.get_version(), _version_number(torch.cuda.nccl.version())
    if ours != theirs:
        raise EngineError(f"CuPy sees NCCL {ours}, torch {theirs}; install one NCCL for both")
    return nccl


@cache
def raw() -> ctypes.CDLL:
    """The functions of the same libnccl that CuPy does not bind."""
    nccl = ctypes.CDLL(library_paths()[0])
    pointers, number = ctypes.c_void_p, ctypes.c_int
    nccl.ncclRedOpCreatePreMulSum.argtypes = [pointers, pointers, number, number, pointers]
    nccl.ncclRedOpDestroy.argtypes = [number, pointers]
    return nccl


def library_paths() -> list[str]:
    """Return the files of libnccl that are mapped into this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sorted({line.split()[-1] for line in maps if "libnccl.so" in line})


def _version_number(version: tuple[int, ...]) -> int:
    major, minor, patch = version[:3]
    return major * 10000 + minor * 100 + patch
