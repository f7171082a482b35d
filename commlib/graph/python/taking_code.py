"""Code that takes an element from an iterator or uses a queue at each call: found beforehand."""

import dis
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import torch

from commlib.graph.python.iterators import (
    check_arguments,
    check_puts,
    check_takes,
    is_iterator,
    is_queue,
)
from commlib.graph.python.reach import attributes, content, forward_of

_SCOPES = {  # opcode -> which of the variables it loads
    "LOAD_FAST": "local",
    "LOAD_FAST_BORROW": "local",
    "LOAD_DEREF": "closure",
    "LOAD_GLOBAL": "global",
    "LOAD_NAME": "global",
}
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_RETURNS = ("RETURN_VALUE", "RETURN_CONST")
_RAISES = ("RAISE_VARARGS", "RERAISE")
_TAKES = ("get", "get_nowait")  # methods of queues
_USES = (*_TAKES, "put", "put_nowait")
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


class _Loaded(NamedTuple):
    """A variable, or an attribute of one, that code has just loaded."""

    name: str
    value: Any
    puts: bool = False  # code puts an element into it


def check_consumed(
    fn: Callable[..., Any], leaves: list[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> None:
    """Raise ``GraphError`` for iterators and queues that a call is going to take elements from.

    Queues that it puts elements into count too. Only those count that its code names, and that each
    call uses: not in a branch. Others are
    found by their positions after the call.
    """
    check_arguments(leaves)
    method = _method(fn)
    if isinstance(method, MethodType):
        args, method = (method.__self__, *args), method.__func__
    if isinstance(method, FunctionType):
        for loaded in _taken(method.__code__, _variables(method, args, kwargs)):
            (check_puts if loaded.puts else check_takes)(loaded.name, loaded.value)


def _method(fn: Any) -> Any:
    """Return the function or method that a call of ``fn`` calls."""
    if isinstance(fn, torch.nn.Module):
        kind: Any = type(fn)
        forward = forward_of(kind)
        return None if forward is None else MethodType(forward, fn)
    if isinstance(fn, FunctionType | MethodType):
        return fn
    call = type(fn).__call__
    return MethodType(call, fn) if isinstance(call, FunctionType) else None


def _variables(
    fn: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the variables at the beginning of a call that its code keeps as they are."""
    code = fn.__code__
    stored = {x.argval for x in dis.get_instructions(code) if x.opname.startswith("STORE_")}
    cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
    names = code.co_varnames[: code.co_argcount]
    scopes = {
        "local": {**kwargs, **dict(zip(names, args, strict=False))},
        "closure": {name: content(cell) for name, cell in cells},
        "global": {"next": next, **fn.__globals__},
    }
    return {
        scope: {name: x for name, x in held.items() if name not in stored}
        for scope, held in scopes.items()
    }


def _taken(code: CodeType, variables: dict[str, dict[str, Any]]) -> Iterator[_Loaded]:
    """Yield the iterators that code takes elements from, and the queues that it uses."""
    loaded: _Loaded | None = None
    by_next = False  # whether ``next`` was loaded before
    for step in _always(code):
        scope = _SCOPES.get(step.opname)
        if scope is not None:
            by_next = loaded is not None and loaded.value is next
            name = str(step.argval)
            loaded = _Loaded(name, variables[scope].get(name))
        elif loaded is None:
            continue
        elif step.opname in _ATTRIBUTES:
            name = str(step.argval)
            if name in _USES and is_queue(loaded.value) and _is_called(step):
                yield loaded._replace(puts=name not in _TAKES)
            loaded = _Loaded(f"{loaded.name}.{name}", attributes(loaded.value).get(name))
        else:
            takes = by_next or step.opname == "GET_ITER"
            if takes and is_iterator(loaded.value):
                yield loaded
            loaded, by_next = None, False


def _is_called(step: dis.Instruction) -> bool:
    """Return True if the attribute that a step loads is a method that is called."""
    flag = sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)
    return step.opname == "LOAD_METHOD" or flag


def _always(code: CodeType) -> list[dis.Instruction]:
    """Return the steps that each call makes: up to the first return, and not in a branch."""
    steps, end = list[dis.Instruction](), 0  # of the branch
    for step in dis.get_instructions(code):
        if step.opcode in _JUMPS and isinstance(step.argval, int):
            end = max(end, step.argval)
        if step.opname in _RETURNS or (step.opname in _RAISES and step.offset >= end):
            break
        if step.offset < end and step.opcode not in _JUMPS:
            continue
        if step.opname not in ("PUSH_NULL", "PRECALL", "CACHE", "EXTENDED_ARG", "NOP"):
            steps.append(step)
    return steps
