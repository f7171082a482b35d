"""The line of the program that makes a call."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch
import typing_extensions

_NOT_THE_PROGRAM = (
    f"{Path(__file__).parent}/",
    f"{Path(torch.__file__).parent}/",
    contextlib.__file__,
    # Torch renames functions with it: Python 3.13 and newer have it in "warnings".
    typing_extensions.deprecated.__call__.__code__.co_filename,
    "<frozen",
)


def call_line() -> str:
    """Return ``file:line`` of the program's call: the first frame outside commlib and torch."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_NOT_THE_PROGRAM):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "a thread without a line of the program"
