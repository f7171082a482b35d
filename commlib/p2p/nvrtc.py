"""CUDA C++ of this package, compiled at first use, kept on disk and launched through the driver."""

import ctypes
import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from commlib.errors import EngineError
from commlib.p2p import kernel_cache


@cache
def _driver() -> Any:
    from cuda.bindings import driver

    return driver


# -- compiling -------------------------------------------------------------------------------------


def sources(file: Path) -> dict[str, bytes]:
    """Return the text of ``file`` and of the headers next to it, by name, ``file`` first."""
    headers = sorted(file.parent.glob("*.cuh"))
    return {path.name: path.read_bytes() for path in (file, *headers)}


def binary(file: Path, architecture: str, options: Sequence[str] = ()) -> bytes:
    """Return the machine code of ``file`` for an architecture like "sm_90".

    What NVRTC makes is kept by ``kernel_cache``. The ranks of a host need the same code at the same
    time: one of them compiles it. Raises ``EngineError`` with the compiler's words, or when
    cuda-bindings or NVRTC is missing.
    """
    try:
        from cuda.bindings import nvrtc

        version = str(nvrtc.nvrtcVersion()[1:])
    except Exception as error:  # ImportError, or what the loader says of a missing library
        raise EngineError(
            f"compiling {file.name} needs cuda-bindings and NVRTC ({error}); "
            f"run pip install '/path/to/commlib[cuda13]' or '/path/to/commlib[cuda12]'"
        ) from error
    texts = sources(file)
    words = (architecture, version, *options, *texts)
    key = hashlib.sha256(b"\0".join([*(word.encode() for word in words), *texts.values()]))
    cache_dir = kernel_cache.folder()
    path = None if cache_dir is None else cache_dir / f"{file.stem}-{key.hexdigest()[:32]}.cubin"
    flags = [f"--gpu-architecture={architecture}", *options]
    if path is None:
        return _compile(nvrtc, texts, flags)
    code = kernel_cache.read(path)
    if code is None:
        with kernel_cache.turn(path.parent):
            code = kernel_cache.read(path)  # another process may have compiled it meanwhile
            if code is None:
                code = _compile(nvrtc, texts, flags)
                kernel_cache.write(path, code)
    return code


def _compile(nvrtc: Any, texts: dict[str, bytes], options: Sequence[str]) -> bytes:
    (name, source), *headers = texts.items()
    texts_of, names = [text for _, text in headers], [name.encode() for name, _ in headers]
    status, program = nvrtc.nvrtcCreateProgram(source, name.encode(), len(headers), texts_of, names)
    _succeed("nvrtcCreateProgram", status)
    try:
        words = [option.encode() for option in ("--std=c++17", *options)]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(words), words)
        if int(status) != 0:
            raise EngineError(f"compiling {name}: {status}\n{_text(nvrtc, program)}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        code = bytearray(size)
        _succeed("nvrtcGetCUBIN", *nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(nvrtc: Any, program: Any) -> str:
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    text = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, text)
    return text.decode(errors="replace").rstrip("\0")


def _succeed(what: str, status: Any) -> None:
    if int(status) != 0:
        raise EngineError(f"{what}: {status}")


# -- loading and launching -------------------------------------------------------------------------


@cache
def module(file: Path, device: int, *options: str) -> Any:
    """Return ``file``, compiled and loaded on a device; nothing of it is loaded later.

    Raises ``EngineError``.
    """
    major, minor = torch.cuda.get_device_capability(device)
    code = binary(file, f"sm_{major}{minor}", options)
    with torch.cuda.device(device):
        torch.cuda.current_stream(device).query()  # makes the device's context the current one
        status, loaded = _driver().cuModuleLoadData(code)
        _succeed(f"loading {file.name}", status)
        return loaded


_MOST_SHARED = (
    100  # percent of a multiprocessor's memory as shared memory, the rest as its L1 cache
)


def function(modules: Sequence[Any], name: str, device: int) -> Any:
    """Return function ``name`` of one of ``modules``, ready to be launched in a capture too.

    It prefers shared memory to L1 cache, also if it uses none: as long as one of its blocks waits
    on a multiprocessor, that division stays, and a block that needs more can't start there.
    """
    driver = _driver()
    with _current(device):
        found_in = (driver.cuModuleGetFunction(module, name.encode()) for module in modules)
        status, kernel = next((kernel for kernel in found_in if int(kernel[0]) == 0), (name, None))
        if kernel is None:
            raise EngineError(f"no kernel is called {status}")
        division = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _succeed(f"dividing {name}", *driver.cuFuncSetAttribute(kernel, division, _MOST_SHARED))
        if hasattr(driver, "cuFuncLoad"):
            _succeed(f"cuFuncLoad {name}", *driver.cuFuncLoad(kernel))
    return kernel


@cache
def _context(device: int) -> Any:
    """The context of a device that all libraries of this process share."""
    status, context = _driver().cuDevicePrimaryCtxRetain(device)
    _succeed("cuDevicePrimaryCtxRetain", status)
    return context


@contextmanager
def _current(device: int) -> Iterator[None]:
    """Make a device's context the thread's current one; a new thread has none."""
    _succeed("cuCtxPushCurrent", *_driver().cuCtxPushCurrent(_context(device)))
    try:
        yield
    finally:
        _driver().cuCtxPopCurrent()


MOST_BLOCKS = 8191  # of a push kernel: its counters hold no more, see channel.cuh


def resident_blocks(function: Any, device: int, threads: int) -> int:
    """Return how many blocks of a kernel a GPU holds at the same time."""
    driver = _driver()
    with _current(device):
        status, blocks = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(function, threads, 0)
    _succeed("cuOccupancyMaxActiveBlocksPerMultiprocessor", status)
    return int(blocks) * torch.cuda.get_device_properties(device).multi_processor_count


_ELSEWHERE = (201, 400)  # CUDA_ERROR_INVALID_CONTEXT, _HANDLE: the current context is another one


class Grid(NamedTuple):
    """Blocks of a launch, threads of each, and how many blocks each cluster of them has."""

    blocks: int
    threads: int
    cluster: int = 1

    def within(self, most: int) -> "Grid":
        """Return the grid with at most so many blocks, but at least one cluster."""
        clusters = max(1, min(self.blocks, most) // self.cluster)
        return self._replace(blocks=clusters * self.cluster)


class Launch:
    """One kernel, its grid and its one argument, which it is given by value; ready to go.

    Attributes:
        stream: Where ``run`` launches.
        run: Launches with what the argument holds now, and returns the driver's status in a tuple.
    """

    __slots__ = ("_config", "_device", "_keep", "run", "stream")

    def __init__(self, function: Any, device: int, grid: Grid, argument: ctypes.Structure) -> None:
        driver, self._device = _driver(), device
        pointer = ctypes.c_void_p(ctypes.addressof(argument))
        self._config, self._keep = _config(driver, grid), (argument, pointer)
        parameters = ctypes.addressof(pointer)
        self.run = partial(driver.cuLaunchKernelEx, self._config, function, parameters, 0)
        self.stream: int | None = None

    def __call__(self, stream: int) -> None:
        """Launch on a stream with what the argument holds now; never blocks."""
        if stream != self.stream:
            self.move(stream)
        (status,) = self.run()
        if status:
            self.retry(status)

    def move(self, stream: int) -> None:
        """Let ``run`` launch on a stream."""
        self._config.hStream = self.stream = stream

    def retry(self, status: Any) -> None:
        """Launch once more where a thread is new, or works on another device."""
        if int(status) in _ELSEWHERE:
            with _current(self._device):
                (status,) = self.run()
        _succeed("cuLaunchKernelEx", status)


def _config(driver: Any, grid: Grid) -> Any:
    """A launch that may begin before its predecessor on the stream has ended.

    Kernels that are launched so wait for that end themselves (griddepcontrol.wait); on devices
    that don't know it the attribute changes nothing.
    """
    early = driver.CUlaunchAttribute()
    early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    early.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid.blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = grid.threads, 1, 1
    attributes = [early]
    if grid.cluster > 1:
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        size = cluster.value.clusterDim
        size.x, size.y, size.z = grid.cluster, 1, 1
        attributes.append(cluster)
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


class HostWord:
    """Pinned host memory that kernels write to and the host reads; ``word`` is its begin."""

    def __init__(self, nbytes: int = 8) -> None:
        import cupy

        self._memory = cupy.cuda.alloc_pinned_memory(nbytes)
        self.address = int(self._memory.ptr)
        self.word = ctypes.c_uint64.from_address(self.address)  # the value is there now
        ctypes.memset(self.address, 0, nbytes)
