"""Methods of tensors that read values on the host, and that no operator shows.

While a run is observed, they ask the observers first.
"""

import functools
import sys
from typing import Any

import torch

from commlib.core import observers
from commlib.graph.operators.exchange import Exchange
from commlib.graph.operators.program_line import in_ours
from commlib.graph.operators.step import tensors_in

OF_A_LIST = "a list of tensors"  # how messages call a read of ``torch.tensor([x, 1])``
_NUMBERS = ("__float__", "__int__", "__index__", "__bool__", "__complex__")
_LED = ("tensor_split", "_pad_packed_sequence")  # by the values of tensors; no operator says so
_hides = torch._C._dispatch_tls_is_dispatch_key_excluded


def _checked(name: str, read: Any) -> Any:
    """Return a method that reads values after asking the observers."""

    @functools.wraps(read)
    def checked(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if observers.observers and not in_ours(sys._getframe(1)):
            for observer in observers.looking_on():
                if observer.refuses:
                    observer.before_read(self, name.strip("_"))
        return read(self, *args, **kwargs)

    return checked


def _checked_number(name: str, read: Any) -> Any:
    """Return a method that reads one number after asking the observer, where no mode sees it.

    Torch hides its modes where it makes a tensor of a list: ``torch.tensor([x.sum(), 1])``, and
    ``x[[[n, 0]]]``.
    """

    @functools.wraps(read)
    def checked(self: torch.Tensor) -> Any:
        observer = observers.inside.recording if observers.observers else None
        if observer is not None and _hides(torch._C.DispatchKey.Python):
            observer.before_read(self, OF_A_LIST)
        return read(self)

    return checked


def _checked_arguments(name: str, function: Any) -> Any:
    """Return a function that asks the observers before it reads all tensors but the first one."""

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for observer in observers.looking_on() if observers.observers else ():
            others = [args[1:], [x for key, x in kwargs.items() if key != "input"]]
            for tensor in tensors_in(others) if observer.refuses else ():
                observer.before_read(tensor, name.strip("_"))
        return function(*args, **kwargs)

    return checked


def _watched(name: str, read: Any) -> Any:
    """Return the method that takes the place of ``read``."""
    if name in _NUMBERS:
        return _checked_number(name, read)
    return (_checked_arguments if name in _LED else _checked)(name, read)


watching_reads = Exchange(
    [
        *[(torch.Tensor, name) for name in ("tolist", "numpy", "__array__", "__dlpack__")],
        *[(torch.Tensor, name) for name in (*_NUMBERS, "tensor_split")],
        *[(torch, "tensor_split"), (torch._VF, "_pad_packed_sequence")],
    ],
    _watched,
)
