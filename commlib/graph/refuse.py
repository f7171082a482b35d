"""What can't stand in a graph: it is refused before it runs, with the line of the program."""

import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from commlib import _observers
from commlib.errors import GraphError

_aten = torch.ops.aten
_SYNCS = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_COPIES = {_aten._to_copy.default, _aten.copy_.default}
_INDEXED = {_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default}
_CALLED = {"_local_scalar_dense": "item"}  # what the user has typed
_NEEDED = "the host needs a value that the replay has not computed yet"
_READS = {
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.__array__,
    torch.Tensor.__dlpack__,
}
_REMEDY = {
    "item": "keep the value in a tensor (torch.where, clamp), or read it outside",
    "nonzero": "use a mask and torch.where, which keep the shape",
}


def refuse_sync(func: Any, args: Sequence[Any], kwargs: Any, device: torch.device) -> None:
    """Raise ``GraphError`` for an operator that waits for the GPU, or would if there were one."""
    why = _sync(func, args, kwargs, device)
    if why:
        name = func.name().removeprefix("aten::").partition(".")[0]
        name = _CALLED.get(name, name)
        hint = _REMEDY.get(name, "do it outside, or mark the part with commlib.graph.eager")
        raise _refusal(f"{name} can't stand in a graph: {why}", name, hint)


def refuse_stray(func: Any, touched: Iterable[torch.Tensor]) -> None:
    """Raise ``GraphError`` for an operator on a stream outside the capture under way.

    It would run once, and never again; ``touched`` is what it has made or written.
    """
    if any(tensor.is_cuda for tensor in touched) and not torch.cuda.is_current_stream_capturing():
        name = func.name().removeprefix("aten::")
        what = (
            f"{name} ran on a stream that is no part of the capture, so no replay would repeat it"
        )
        hint = "let it wait for the current stream first: stream.wait_stream(...)"
        raise _refusal(what, name, hint)


class Values(TorchFunctionMode):
    """Refuses, on a CPU, what reads values past torch's operators: a graph would keep them."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _READS and _observers.looking_on() and not _in_ours(sys._getframe(1)):
            name = func.__name__.strip("_")
            hint = _REMEDY.get(name, _REMEDY["item"])
            raise _refusal(f"{name} can't stand in a graph: {_NEEDED}", name, hint)
        return func(*args, **(kwargs or {}))


def refuse_reshaping(func: Any) -> None:
    """Raise ``GraphError`` for an operator that gives a tensor from outside another shape."""
    name = func.name().removeprefix("aten::").partition(".")[0]
    what = f"{name} can't stand in a graph: it changes the shape of a tensor from outside"
    raise _refusal(what, name, f"use {name.rstrip('_')}, which returns another tensor")


def refuse_borrowed(func: Any) -> None:
    """Raise ``GraphError`` for a write to an array that the function has made a tensor of."""
    name = func.name().removeprefix("aten::").partition(".")[0]
    what = f"{name} can't stand in a graph: it writes to an array, which may be another next time"
    raise _refusal(what, name, "make the tensor outside, or a new one: torch.tensor, torch.zeros")


def refuse_seeding() -> None:
    """Raise ``GraphError`` for a function that sets or makes a generator it draws from."""
    what = (
        "the function sets a generator (manual_seed, fork_rng, a checkpoint with dropout) or makes "
        "one, and a graph only draws on"
    )
    raise _refusal(what, "manual_seed", "set it before the call")


def _refusal(what: str, name: str, hint: str) -> GraphError:
    where = user_line()
    return GraphError(f"{what}; at {where}; {hint}", op=name, where=where, hint=hint)


def _sync(func: Any, args: Sequence[Any], kwargs: Any, device: torch.device) -> str | None:
    """Say why an operator waits for the GPU."""
    if func not in _INDEXED and any(tag in func.tags for tag in _SYNCS):
        return _NEEDED
    if func in _INDEXED:
        masks = (i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8))
        if any(True for _ in masks):
            return "the shape of an index by a mask depends on its values"
    if func in _COPIES:
        return _copy(func, args, kwargs, device)
    return None


def _copy(func: Any, args: Sequence[Any], kwargs: Any, device: torch.device) -> str | None:
    """Say why a copy between the host and the GPU can't be replayed."""
    if func is _aten.copy_.default:
        source, target = args[1].device, args[0].device
    else:
        source, target = args[0].device, kwargs.get("device") or args[0].device
    if device.type == "cpu" or source.type == target.type:
        return None
    host = args[1] if func is _aten.copy_.default else args[0]
    if source.type == "cpu" and host.is_pinned():
        return None
    return f"it copies from {source} to {target}, and the host waits for it"


_OURS = (str(Path(__file__).parent.parent), str(Path(torch.__file__ or "").parent))
_STANDARD = sysconfig.get_path("stdlib")


def _in_ours(frame: Any) -> bool:
    """Whether a frame is commlib's: it asks for numbers that are a part of the call."""
    return str(frame.f_code.co_filename).startswith(_OURS[0])


def user_line() -> str:
    """Return file and line of the innermost frame that is no library's: torch's, ours, Python's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((*_OURS, "<")) and os.path.dirname(file) != _STANDARD:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return traceback.format_stack(limit=1)[0].strip()
