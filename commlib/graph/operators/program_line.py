"""Lines of the program that messages name: outside torch, commlib and Python's library."""

import inspect
import os
import sys
import sysconfig
import traceback
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

_OURS = (str(Path(__file__).parents[2]), str(Path(torch.__file__ or "").parent))
_STANDARD = sysconfig.get_path("stdlib")


def in_ours(frame: Any) -> bool:
    """Return True if a frame is commlib's: it reads numbers that are a part of the call."""
    return str(frame.f_code.co_filename).startswith(_OURS[0])


def line_of(error: BaseException) -> str | None:
    """Return file and line of the program where an error came from."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [each for each in frames if not each.filename.startswith((*_OURS, "<"))]
    return f"{user_frames[-1].filename}:{user_frames[-1].lineno}" if user_frames else None


def user_line() -> str:
    """Return file and line of the innermost frame outside torch, commlib and Python's library."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_OURS, "<")) and os.path.dirname(file) != _STANDARD:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return traceback.format_stack(limit=1)[0].strip()


_ENGINE = os.path.join("torch", "autograd", "graph")  # the innermost file in a backward
_ANOMALY = "leave torch.autograd.set_detect_anomaly off, or set its check_nan=False"
_PACKED = "pass a padded tensor and a mask, and leave packed sequences outside"
_PLACES = {  # files of torch that read values, and what a program does: the first one counts
    os.path.join("torch", "optim", "swa_utils"): "call update_parameters() outside the function",
    os.path.join("torch", "optim", "lr_scheduler"): "call the scheduler outside the function",
    os.path.join("torch", "optim", "lbfgs"): "keep LBFGS outside the function",
    os.path.join("torch", "distributions", ""): "create the distribution with validate_args=False",
    os.path.join("torch", "amp", "grad_scaler"): "keep the GradScaler outside the function",
    os.path.join("torch", "nn", "modules", "rnn"): _PACKED,
    os.path.join("torch", "nn", "utils", "rnn"): _PACKED,
    os.path.join("torch", "nn", "utils", "clip_grad"): "pass error_if_nonfinite=False",
}


_OPTIMIZERS = os.path.join("torch", "optim", "")
_OF_OPTIMIZERS = {  # arguments with which an optimizer reads no value, where its class has them
    "fused": "create the optimizer with fused=True",
    "capturable": "on a GPU create the optimizer with capturable=True",
}


def remedy_here() -> str | None:
    """Return what to do where a part of torch reads a value that is known to."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        for path, remedy in _PLACES.items():
            if path in frame.f_code.co_filename:
                return remedy
        if _ENGINE in frame.f_code.co_filename and torch.is_anomaly_check_nan_enabled():
            return _ANOMALY
        if _OPTIMIZERS in frame.f_code.co_filename:
            return _of_optimizer(frame)
        frame = frame.f_back
    return None


def _of_optimizer(frame: Any) -> str:
    """Return what to do about the optimizer whose step is under way."""
    while frame is not None:
        optimizer = frame.f_locals.get("self")
        if isinstance(optimizer, torch.optim.Optimizer):
            takes = inspect.signature(type(optimizer)).parameters
            remedies = [text for name, text in _OF_OPTIMIZERS.items() if name in takes]
            return ", or ".join([*remedies, "call its step() outside the function"])
        frame = frame.f_back
    return "call the optimizer outside the function"


class ProgramLine(NamedTuple):
    """The line where a frame of the program was at one moment; Python looks for it in the text.

    Attributes:
        code: The code of the frame.
        instruction: The last instruction that had begun.
    """

    code: CodeType
    instruction: int

    @classmethod
    def of(cls, frame: FrameType) -> "ProgramLine":
        """Return the line where a frame is."""
        return cls(frame.f_code, frame.f_lasti)

    def __str__(self) -> str:
        """Return file and line."""
        lines = self.code.co_lines()
        matches = [line for begin, end, line in lines if begin <= self.instruction < end]
        return f"{self.code.co_filename}:{matches[0] if matches else self.code.co_firstlineno}"
