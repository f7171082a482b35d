"""Torch's warning of a gradient that comes from another stream, off in our backwards."""

import threading
from typing import Any

import torch

# Older versions of torch have no such warning.
_is_on: Any = getattr(torch._C, "_warn_on_accumulate_grad_stream_mismatch", lambda: True)
_set: Any = getattr(torch._C, "_set_warn_on_accumulate_grad_stream_mismatch", lambda is_on: None)


class _Off:
    """Turns the warning off in a ``with`` block, for all threads: torch has one switch.

    A captured backward runs on another stream than the nodes of its parameters, in order with it.
    """

    def __init__(self) -> None:
        self._lock, self._blocks, self._was_on = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if self._blocks == 0:
                self._was_on = _is_on()
                _set(False)
            self._blocks += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0:
                _set(self._was_on)


without_stream_warning = _Off()
