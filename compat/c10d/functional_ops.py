"""Two functional collectives that C++ makes without asking a group that is written in Python.

``all_gather_into_tensor_out`` and ``batch_p2p_ops`` look for a backend in C++. Before torch 2.14
our groups have none, so these operators get kernels that call the group.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from commlib.compat.c10d.backend import takes_subclasses
from commlib.compat.c10d.bridges import calls_of

Tensor = torch.Tensor

_DEVICES = ("CPU", "CUDA")
_COMPOSITE: Any = torch._C.DispatchKey.CompositeExplicitAutograd  # torch's own kernels
_ops = torch.ops._c10d_functional
_library = torch.library.Library("_c10d_functional", "IMPL")
_register_work: Any = c10d._register_work


def _calls(group: Any) -> Any:
    """Return what carries the calls of a group or of its name; None for another backend's."""
    resolve: Any = c10d._resolve_process_group
    return calls_of(resolve(group) if isinstance(group, str) else group)


def _all_gather_out(x: Tensor, size: int, group: Any, *, out: Tensor) -> Tensor:
    calls = _calls(group)
    if calls is None:
        stock: Tensor = _ops.all_gather_into_tensor_out.default._op_dk(
            _COMPOSITE, x, size, group, out=out
        )
        return stock
    _register_work(out, calls.all_gather_single(out, x))
    return out


def _batch(
    names: list[str], peers: list[int], tags: list[int], tensors: list[Tensor], group: Any
) -> list[Tensor]:
    """Launch sends and receives as one operation; a send gives an empty tensor to wait for."""
    calls = _calls(group)
    if calls is None:
        stock: list[Tensor] = _ops.batch_p2p_ops.default._op_dk(
            _COMPOSITE, names, peers, tags, tensors, group
        )
        return stock
    results = []
    calls.start_coalescing()
    try:
        for name, peer, tag, x in zip(names, peers, tags, tensors, strict=True):
            sends = name == "isend"
            (calls.send if sends else calls.recv)([x], peer, tag)
            results.append(x.new_empty(0) if sends else x)
    except BaseException:
        calls.drop_coalescing()
        raise
    work = calls.end_coalescing()
    for result in results:
        _register_work(result, work)
    return results


def install() -> None:
    """Give torch these kernels where it needs them; groups of other backends keep torch's."""
    kernels: dict[str, Callable[..., Any]] = {
        "all_gather_into_tensor_out": _all_gather_out,
        "batch_p2p_ops": _batch,
    }
    if takes_subclasses():
        return
    for name, kernel in kernels.items():
        if hasattr(_ops, name):  # batch_p2p_ops is new in torch 2.13
            for device in _DEVICES:
                _library.impl(name, kernel, device)
