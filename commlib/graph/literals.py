"""Values that a function has typed: tensors of a GPU that are made from them, operator by operator.

Torch makes such a tensor on the host and copies it to the GPU out of sight, which ends a capture
with an error. While somebody looks on, the copy is an operator of its own.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from commlib.core import observers
from commlib.graph.exchange import Exchange


def _shown(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``make`` with its copies to a GPU shown."""
    how: Callable[..., Any] = _HOW.get(name, _made)

    @functools.wraps(make)
    def shown(*args: Any, **kwargs: Any) -> Any:
        if not observers.observers or not observers.looking_on():
            return make(*args, **kwargs)
        return how(make, *args, **kwargs)

    return shown


def _made(make: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    device = torch.device(kwargs.pop("device", None) or torch.get_default_device())
    if device.type == "cpu" or isinstance(data, torch.Tensor):
        return make(data, *args, device=device, **kwargs)
    grad = kwargs.pop("requires_grad", False)
    made = make(data, *args, device="cpu", **kwargs).to(device)
    return made.requires_grad_() if grad else made


def _like_another(make: Callable[..., Any], other: torch.Tensor, data: Any, **kwargs: Any) -> Any:
    device = torch.device(kwargs.pop("device", None) or other.device)
    kwargs["dtype"] = kwargs.get("dtype") or other.dtype
    return _made(lambda data, **kw: make(other, data, **kw), data, device=device, **kwargs)


def _indexed(make: Callable[..., Any], x: torch.Tensor, index: Any, *value: Any) -> Any:
    if x.device.type != "cpu":
        each = map(_index, index) if isinstance(index, tuple) else [_index(index)]
        index = tuple(each) if isinstance(index, tuple) else next(iter(each))
    return make(x, index, *value)


def _index(index: Any) -> Any:
    """Return a list or an array of whole numbers as a tensor of the host."""
    numbers = isinstance(index, list) and index and all(type(i) is int for i in index)
    if numbers or (isinstance(index, np.ndarray) and index.dtype.kind in "iu" and index.ndim):
        return torch.tensor(index)
    return index


_HOW: dict[str, Callable[..., Any]] = {
    "new_tensor": _like_another,
    "__getitem__": _indexed,
    "__setitem__": _indexed,
}
made_on_host = Exchange(  # where torch has what makes tensors from values
    [
        *[(torch, name) for name in ("tensor", "as_tensor", "asarray")],
        *[(torch.Tensor, name) for name in ("new_tensor", "__getitem__", "__setitem__")],
    ],
    _shown,
)
