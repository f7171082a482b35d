"""Blocks and functions that torch.compile must not trace."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FunctionType
from typing import Any, TypeVar, cast

import torch

Class = TypeVar("Class", bound=type)
Entered = TypeVar("Entered")
Function = TypeVar("Function", bound=Callable[..., Any])


def leave_to_eager(reason: str) -> None:
    """Leave the function that is being traced to eager code; an error with ``fullgraph=True``.

    Args:
        reason: What can't be traced and what to call instead, for torch's message.
    """
    if hasattr(torch._dynamo, "skip_frame"):
        torch._dynamo.skip_frame(msg=reason)
    else:  # torch then traces what follows; the block itself runs in untraced()
        torch._dynamo.graph_break(msg=reason)


# Sets what torch.compile calls for each function that begins (None: nothing); returns the last one.
switch: Callable[[Any], Any] = getattr(
    getattr(torch._C._dynamo, "eval_frame", None), "set_eval_frame", lambda before: before
)


@contextmanager
def untraced(block: AbstractContextManager[Entered]) -> Iterator[Entered]:
    """Enter ``block``, and don't let torch.compile trace the functions that are called in it."""
    before = switch(None)
    try:
        with block as entered:
            yield entered
    finally:
        switch(before)


def untraced_function(function: Function) -> Function:
    """Return a function that Dynamo does not trace, nor what it calls.

    A dispatch mode whose ``__torch_dispatch__`` is such a function returns False from
    ``_should_skip_dynamo``: the wrapper that torch puts around the others takes several
    microseconds at every operator. A mark on the code takes nothing; some builds of torch lack it.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        mark = frames._FrameExecStrategy(skip, skip)
        frames.set_code_exec_strategy(function.__code__, mark)
    except AttributeError:
        return cast(Function, torch._disable_dynamo(function))
    return function


def untraced_methods(kind: Class) -> Class:
    """Return a class whose own methods and properties Dynamo does not trace."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType):
            setattr(kind, name, untraced_function(member))
        elif isinstance(member, property) and isinstance(member.fget, FunctionType):
            setattr(kind, name, member.getter(untraced_function(member.fget)))
    return kind
