"""What a program is told that asks whether it is captured: in a capture as in the runs before."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from commlib._streams import hearing, stream_captures


@contextmanager
def telling(captured: bool) -> Iterator[None]:
    """Have ``torch.cuda.is_current_stream_capturing()`` answer ``captured`` in a ``with`` block.

    A program that reads a value only where it is not captured then does in the runs before a
    capture what it does in the capture. Other threads get the answer of the driver.
    """
    before: bool | None = getattr(hearing, "told", None)
    hearing.told = captured
    try:
        yield
    finally:
        hearing.told = before


def _answer() -> bool:
    told: bool | None = getattr(hearing, "told", None)
    return bool(_driver()) if told is None else told


# torch's function looks this name up at each call: programs have that function under many names.
_driver: Callable[[], bool] = getattr(
    torch.cuda.graphs, "_cuda_isCurrentStreamCapturing", stream_captures
)
torch.cuda.graphs._cuda_isCurrentStreamCapturing = _answer
