"""Operators that take functions of the program (cond, flex_attention), which no graph can hold."""

import os
import sys
from typing import Any

from torch._C._dynamo.eval_frame import reset_code
from torch._ops import HigherOrderOperator

from commlib.errors import GraphError
from commlib.graph.operators.program_line import user_line

_PLACES = os.path.join("torch", "_higher_order_ops", ""), "flex_attention.py"
_HINTS = {"flex_attention": "use torch.nn.functional.scaled_dot_product_attention"}


def check_higher_order(func: HigherOrderOperator) -> None:
    """Raise ``GraphError`` for an operator that takes functions; it has no schema."""
    _forget_frames()
    name, line = str(func.name()), user_line()
    hint = _HINTS.get(name, "use operators on tensors (torch.where)")
    raise GraphError(
        f"{name} can't be captured: torch compiles the functions that it takes when it is "
        f"called; at {line}; {hint}, or mark the part with commlib.graph.eager",
        op=name,
        where=line,
        hint=hint,
    )


def _forget_frames() -> None:
    """Let Dynamo compile the callers in torch again, which it never does after a call under a mode.

    An eager call would then fail: torch compiles such an operator as a whole, or not at all.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if any(part in frame.f_code.co_filename for part in _PLACES):
            reset_code(frame.f_code)
        frame = frame.f_back
