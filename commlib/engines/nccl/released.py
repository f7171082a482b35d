"""Communicators of closed rings that CUDA graphs still hold."""

import ctypes
from typing import Any

from commlib.engines.graph_holds import GraphHolds

_released: list[tuple[list[Any], GraphHolds]] = []


def release(comms: list[Any], holds: GraphHolds) -> None:
    """Keep communicators until no graph holds their calls: NCCL destroys none before that."""
    for comm in comms:  # its destructor would wait for the graphs at the end of the process
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(comm))
    _released.append((comms, holds))


def destroy_released() -> None:
    """Destroy the communicators that no graph holds any more."""
    for each in [each for each in _released if each[1].count == 0]:
        _released.remove(each)
        for comm in each[0]:
            comm.destroy()
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(comm))
