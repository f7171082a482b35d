"""Values of Python as arguments of C functions."""

import ctypes
from collections.abc import Callable, Sequence

import torch

INT, UINT, SIZE, POINTER = ctypes.c_int, ctypes.c_uint, ctypes.c_ulonglong, ctypes.c_void_p
ADDRESSES = ctypes.POINTER(ctypes.c_uint64)


def function(library: ctypes.CDLL, name: str, *arguments: type) -> Callable[..., None]:
    """Return a function of ``library`` that raises ``RuntimeError`` if it doesn't return 0."""
    symbol = library[name]
    symbol.argtypes, symbol.restype = arguments, INT

    def call(*values: object) -> None:
        code = symbol(*values)
        if code:
            raise RuntimeError(f"{name} returned {code}; expected 0")

    return call


def addresses(values: Sequence[int]) -> ctypes.Array[ctypes.c_uint64]:
    """Return addresses as an array of the host."""
    return (ctypes.c_uint64 * len(values))(*values)


def table(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return addresses as an array of the device."""
    return torch.tensor(values, dtype=torch.int64, device=device)
