"""The way of a first call through the code is bounded, so that a reader can follow it."""

import gc
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

import torch

import commlib
from commlib import graph

PACKAGE = Path(commlib.__file__).parent
MOST_CALLS = 468  # of functions; comprehensions, which Python 3.12 calls no more, don't count
MOST_FILES = 70
MOST_CHANGES = 350  # of file, from one call to the next


def functions_of(call: Callable[[], object]) -> list[str]:
    """Return the file of every function of the package that ``call`` runs."""
    seen = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<") or code.co_name == "<lambda>"
        if event == "call" and named and Path(code.co_filename).is_relative_to(PACKAGE):
            seen.append(code.co_filename)

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def test_functions_of_a_first_call() -> None:
    x = torch.ones(4)
    graph.capture(lambda y: y * 2)(x)  # what is loaded and cached once
    gc.collect()  # what earlier tests left: functions that run as it is freed would count

    funcs = functions_of(lambda: graph.capture(lambda y: y * 3)(x))

    assert len(funcs) <= MOST_CALLS
    assert len(set(funcs)) <= MOST_FILES
    assert sum(one != other for one, other in pairwise(funcs)) <= MOST_CHANGES
