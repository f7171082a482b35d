"""The eager path is short: few functions of the library run in a warm all_reduce."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import commlib
from commlib import ops
from tests.support.checks import same
from tests.support.ranks import Ranks

PACKAGE = Path(commlib.__file__).parent
# torch.distributed also looks its process group up, which it may not have yet.
MOST = {"gloo": (8, 5), "c10d": (9, 6)}  # functions, and files that they are in


def functions_of(call: Callable[[], object]) -> list[tuple[str, str]]:
    """Return the file and the name of every function of the package that ``call`` runs."""
    seen = []

    def watch(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(PACKAGE):
            seen.append((frame.f_code.co_filename, frame.f_code.co_name))

    sys.setprofile(watch)
    try:
        call()
    finally:
        sys.setprofile(None)
    return seen


def short(comm: Any) -> None:
    x = torch.ones(64)
    calls: dict[str, Callable[[], object]] = {
        "in place": lambda: ops.all_reduce(x, out=x),
        "a new output": lambda: ops.all_reduce(x),
    }
    most, files = MOST[comm.engine]
    for name, call in calls.items():
        for _ in range(3):
            call()
        found = functions_of(call)
        listed = "\n".join(f"{file}: {function}" for file, function in found)
        same(len(found) <= most, True, f"{name}, {len(found)} functions:\n{listed}")
        same(len({file for file, _ in found}) <= files, True, f"{name}, files:\n{listed}")
        same("dispatch" in {function for _, function in found}, True, listed)


def test_few_functions_run_in_an_eager_call(cpu_ranks: Ranks) -> None:
    cpu_ranks(short)
