"""Bytes in arrays, and attributes of tensors, recorded to restore them and to find changes."""

from array import array
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from commlib.graph.python.changes import GONE, NO_PLACE, Change, Place, is_plain

BUFFERS = (np.ndarray, bytearray, array)
_MOST_BYTES = 1 << 24  # of all that are kept; those near the function come first


class Buffers:
    """Arrays of NumPy and Python, as far as they are small."""

    def __init__(self, targets: Sequence[Any]) -> None:
        self._kept: list[tuple[Any, Any]] = []
        free_bytes = _MOST_BYTES
        for x in targets:
            size = _size(x)
            if 0 < size <= free_bytes:
                free_bytes -= size
                self._kept.append((x, x[...].copy() if isinstance(x, np.ndarray) else x[:]))

    def restore(self) -> None:
        """Give all of them what they held."""
        for x, saved in self._kept:
            if not _same(x, saved):
                x[... if isinstance(x, np.ndarray) else slice(None)] = saved

    def changes(self) -> Iterator[Change]:
        """Yield the arrays that hold something else."""
        for x, saved in self._kept:
            if not _same(x, saved):
                text, memory = f"the content of an array ({type(x).__name__})", _address(x)
                yield Change(id(x), text, _words(saved), _words(x), NO_PLACE, memory)


class OfTensor:
    """Plain values that the program keeps in attributes of a tensor.

    Names that begin with an underscore are those of libraries.
    """

    def __init__(self, x: torch.Tensor, *, bare: bool = False) -> None:
        """``bare``: it had no attributes."""
        self._x, self._kept = x, {} if bare else _plain_values(x)

    def restore(self) -> None:
        """Give the tensor its attributes again."""
        held = vars(self._x)
        for name in _plain_values(self._x).keys() - self._kept.keys():
            del held[name]
        held.update(self._kept)

    def changes(self) -> Iterator[Change]:
        """Yield attributes that are others."""
        present = _plain_values(self._x)
        for name in {**self._kept, **present}:
            before, now = self._kept.get(name, GONE), present.get(name, GONE)
            if now is not before:
                location = Place(
                    partial(getattr, self._x, name, None), partial(setattr, self._x, name)
                )
                yield Change(id(self._x), f"{type(self._x).__name__}.{name}", before, now, location)


def _plain_values(x: torch.Tensor) -> dict[str, Any]:
    return {name: v for name, v in vars(x).items() if not name.startswith("_") and is_plain(v)}


def _size(x: Any) -> int:
    """Return the bytes of an array; 0 for one that nothing can write."""
    if isinstance(x, np.ndarray):
        return x.nbytes if x.flags.writeable else 0
    return memoryview(x).nbytes


def _same(x: Any, kept: Any) -> bool:
    if isinstance(x, np.ndarray):
        return bool(x.shape == kept.shape and x.tobytes() == kept.tobytes())
    return bool(x == kept)


def _words(x: Any) -> str:
    return repr(x if isinstance(x, np.ndarray) else x[:40])


def _address(x: Any) -> range:
    """Return the addresses of the elements of an array of NumPy."""
    if not isinstance(x, np.ndarray):
        return range(0)
    first = x.__array_interface__["data"][0]
    return range(first, first + x.nbytes)
