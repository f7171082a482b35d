"""Blocks that torch.compile must not trace."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import torch

Entered = TypeVar("Entered")


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
