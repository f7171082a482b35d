"""Literals in a function's code: GPU tensors that are created from Python values.

torch creates such a tensor on the host and copies it to the GPU invisibly, which ends a capture
with an error. While a run is observed, the copy is a separate operator.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from commlib.core import observers
from commlib.graph.operators.exchange import Exchange
from commlib.graph.operators.sequence_slots import KNOWN
from commlib.graph.operators.step import leaves_in
from commlib.graph.operators.unsupported import check_value
from commlib.graph.operators.value_reads import OF_A_LIST


def _shown(name: str, make: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``make`` with its copies to a GPU as separate operators."""
    replacement: Callable[..., Any] = _REPLACEMENTS.get(name, _made)

    @functools.wraps(make)
    def shown(*args: Any, **kwargs: Any) -> Any:
        if not observers.observers or not observers.looking_on():
            return make(*args, **kwargs)
        return replacement(make, *args, **kwargs)

    return shown


def _made(make: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    _check_list(data)
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
    for part in index if isinstance(index, tuple | list) else ():
        _check_list(part)
    if x.device.type != "cpu":
        each = map(_index, index) if isinstance(index, tuple) else [_index(index)]
        index = tuple(each) if isinstance(index, tuple) else next(iter(each))
    return make(x, index, *value)


def _check_list(data: Any) -> None:
    """Raise ``GraphError`` for tensors in lists, which torch would read one by one."""
    if not (isinstance(data, tuple | list) and observers.refusing()):
        return
    if any(isinstance(x, torch.Tensor) for x in leaves_in(data)):
        check_value(OF_A_LIST)


def _index(index: Any) -> Any:
    """Return a list or an array of integers as a host tensor; other indices unchanged."""
    numbers = isinstance(index, list) and index and all(type(i) is int for i in index)
    if numbers or (isinstance(index, np.ndarray) and index.dtype.kind in "iu" and index.ndim):
        return torch.tensor(index)
    return index


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "new_tensor": _like_another,
    "__getitem__": _indexed,
    "__setitem__": _indexed,
}
made_on_host = Exchange(  # torch's functions that create tensors from values
    [
        *[(torch, name) for name in ("tensor", "as_tensor", "asarray")],
        (torch.Tensor, "new_tensor"),
        *[(torch.Tensor, name) for name in ("__getitem__", "__setitem__") if KNOWN],
    ],
    _shown,
)
