"""What a mode that watches a run does with each operator: its ``__torch_dispatch__``."""

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch._ops import HigherOrderOperator, OpOverload

from commlib.graph.operators.higher_order import check_higher_order
from commlib.graph.operators.schema import OpCall
from commlib.graph.operators.step import FAKE, mode_of


def handler(run: Callable[[Any, OpCall, Any], Any]) -> Callable[..., Any]:
    """Return a ``__torch_dispatch__`` that calls ``run`` with each operator and the types.

    An operator that computes shapes and no values is called as it is. The class returns False from
    ``_should_skip_dynamo``, for this keeps Dynamo away already.
    """

    def handle(
        self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if mode_of(FAKE) is not None:
            return func(*args, **(kwargs or {}))
        if not isinstance(func, OpOverload) and isinstance(func, HigherOrderOperator):
            check_higher_order(func)
        return run(self, OpCall(func, args, kwargs or {}), types)

    return _untraced(handle)


def _untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that Dynamo does not trace, nor what it calls.

    The wrapper that torch puts around the handler of each mode takes several microseconds at every
    operator. A mark on the code takes nothing; some builds of torch lack it.
    """
    try:
        skip = eval_frame._FrameAction.SKIP
        mark = eval_frame._FrameExecStrategy(skip, skip)
        eval_frame.set_code_exec_strategy(function.__code__, mark)
    except AttributeError:
        wrapped: Callable[..., Any] = torch._disable_dynamo(function)
        return wrapped
    return function
