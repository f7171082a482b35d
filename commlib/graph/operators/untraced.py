"""Functions that Dynamo does not trace."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch._C._dynamo import eval_frame

Function = TypeVar("Function", bound=Callable[..., Any])


def untraced(function: Function) -> Function:
    """Return a function that Dynamo does not trace, nor what it calls.

    A dispatch mode whose ``__torch_dispatch__`` is such a function returns False from
    ``_should_skip_dynamo``: the wrapper that torch puts around the others takes several
    microseconds at every operator. A mark on the code takes nothing; some builds of torch lack it.
    """
    try:
        skip = eval_frame._FrameAction.SKIP
        mark = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, mark)
    except AttributeError:
        return cast(Function, torch._disable_dynamo(function))
    return function
