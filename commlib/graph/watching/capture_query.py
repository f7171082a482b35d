"""The answer to ``torch.cuda.is_current_stream_capturing()``: the same in a capture and before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from commlib.streams import query, stream_captures


@contextmanager
def reporting(captured: bool) -> Iterator[None]:
    """Have ``torch.cuda.is_current_stream_capturing()`` answer ``captured`` in a ``with`` block.

    A program may read a value only where it is not captured. Then it does in the runs before a
    capture what it does in the capture. Other threads get the answer of the driver.
    """
    before: bool | None = getattr(query, "answer", None)
    query.answer = captured
    try:
        yield
    finally:
        query.answer = before


def _answer() -> bool:
    answer: bool | None = getattr(query, "answer", None)
    return bool(_driver()) if answer is None else answer


# torch's function looks this name up at each call: programs have that function under many names.
_driver: Callable[[], bool] = getattr(
    torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", stream_captures
)
torch.cuda.graphs._cuda_isCurrentStreamCapturing = _answer
