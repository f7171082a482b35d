"""CUDA C++ of this package, compiled at first use and launched through the driver."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

from commlib.errors import EngineError

_THREADS = 512


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


@cache
def kernel(file: str, name: str, device: int, *options: str) -> int:
    """Return function ``name`` of ``file`` for a device; what NVRTC makes of it is kept on disk.

    Raises ``EngineError`` when CuPy, cuda-bindings or the compiler is missing.
    """
    source = (Path(__file__).parent / file).read_text()
    try:
        import cupy

        _driver()
        with cupy.cuda.Device(device):
            module = cupy.RawModule(code=source, options=("--std=c++17", *options))
            return int(module.get_function(name).kernel.ptr)
    except Exception as error:
        raise EngineError(f"compiling {file}: {type(error).__name__}: {error}") from error


def launch(function: int, blocks: int, stream: int, arguments: ctypes.Structure) -> None:
    """Launch ``function``, whose one parameter is ``arguments`` by value; never blocks."""
    place = ctypes.c_void_p(ctypes.addressof(arguments))
    grid, block, shared, extra = (blocks, 1, 1), (_THREADS, 1, 1), 0, 0
    (status,) = _driver().cuLaunchKernel(
        function, *grid, *block, shared, stream, ctypes.addressof(place), extra
    )
    if int(status) != 0:
        raise EngineError(f"cuLaunchKernel: {status}")


class HostWord:
    """Eight bytes of pinned host memory that kernels write to and the host reads."""

    def __init__(self) -> None:
        import cupy

        self._memory = cupy.cuda.alloc_pinned_memory(8)
        self.address = int(self._memory.ptr)
        self._word = ctypes.c_uint64.from_address(self.address)
        self._word.value = 0

    @property
    def value(self) -> int:
        """What stands there now."""
        return self._word.value
