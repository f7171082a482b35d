"""Run a program eagerly or captured, and compare two such runs bit for bit.

Nothing here comes from the code under test but the call of `capture` itself.
"""

import dataclasses
import random
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from tests.models.program import SEED, Program, Start

_BY_TORCH = ("this output of a graph",)  # refusals that torch raises for commlib, as its own errors
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


@dataclass
class Record:
    """The results of one run of a program.

    Attributes:
        leaves: Everything that a user sees, by its path.
        error: Why the run ended before its last call.
        refused: Whether that was a ``GraphError``.
        replays: How many calls were replays.
        variant: Whether a graph holds what the program does when it asks and is captured.
        seconds: Time of the whole run.
    """

    leaves: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    refused: bool = False
    replays: int = 0
    variant: bool = False
    seconds: float = 0


@dataclass
class Outcome:
    """The result of comparing a program.

    Attributes:
        kind: equal; remedied (equal after the change that the program names); close (the program
            asks whether it is captured and takes another way then, whose last digits are others);
            refused; different; crashed; idle (equal, but no call was a replay); unsteady (two eager
            runs differ); or unfit (it fails eagerly with the libraries that are installed).
        text: The error, or the first difference.
    """

    name: str
    kind: str
    text: str = ""
    replays: int = 0
    seconds: float = 0


def record(program: Program, start: Start, device: torch.device, *, captured: bool) -> Record:
    """Run a program from its seed and return what it gave."""
    result = Record()
    began = time.perf_counter()
    graphed = None
    try:
        _seed()
        session = start(device)
        step = session.step
        if captured:
            from commlib import graph

            step = graphed = graph.capture(step)
        for number in range(program.calls):
            result.leaves.update(leaves(session.call(step, number), f"call {number}"))
        result.leaves.update(leaves(session.state(), "state"))
        result.leaves.update(leaves(_generators(device), "generator"))
        if graphed is not None:
            result.replays, result.variant = _replays(graphed)
    except Exception as error:
        _explain(result, error)
    result.seconds = time.perf_counter() - began
    return result


def _seed() -> None:
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)


def _replays(graphed: Any) -> tuple[int, bool]:
    from commlib import graph

    rows = [row for row in graph.report(graphed) if row["eager"] is None]
    return sum(row["replays"] for row in rows), any(row["captured_variant"] for row in rows)


def _explain(found: Record, error: BaseException) -> None:
    from commlib.errors import GraphError

    found.refused = isinstance(error, GraphError) or str(error).startswith(_BY_TORCH)
    frames = traceback.extract_tb(error.__traceback__)
    location = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "nowhere"
    found.error = str(error) if found.refused else f"{type(error).__name__}: {error}; at {location}"


def _generators(device: torch.device) -> dict[str, Any]:
    states: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": repr(random.getstate()),
        "numpy": repr(np.random.get_state()),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def leaves(value: Any, path: str) -> dict[str, Any]:
    """Return tensors (copies on the host) and plain values of any object by their path."""
    return dict(_leaves(value, path, set()))


def _leaves(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield path, value.detach().to("cpu", copy=True)
    elif isinstance(value, np.ndarray):
        yield path, torch.from_numpy(value.copy())
    elif isinstance(value, _PLAIN):
        yield path, repr(value)
    elif id(value) not in seen:
        parts = list(_parts(value))
        yield path, f"{type(value).__name__} of {len(parts)}"
        for name, part in parts:
            yield from _leaves(part, f"{path}.{name}", seen | {id(value)})


def _parts(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, (list, tuple)):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value):
        yield from ((each.name, getattr(value, each.name)) for each in dataclasses.fields(value))
    elif not callable(value):
        yield from getattr(value, "__dict__", {}).items()


def first_difference(eager: Record, captured: Record) -> str:
    """Say where two runs differ first, or return an empty text."""
    paths = [*eager.leaves, *(path for path in captured.leaves if path not in eager.leaves)]
    for path in paths:
        if path not in eager.leaves or path not in captured.leaves:
            side = "eager" if path in eager.leaves else "captured"
            return f"{path} is in the {side} run alone"
        text = _difference(eager.leaves[path], captured.leaves[path])
        if text:
            return f"{path}: {text}"
    return ""


def nearly(eager: Record, captured: Record) -> bool:
    """Return True if floating numbers have half of their digits in common, and all else is equal.

    That is what is left of a program that takes another way in a capture, for the same results.
    """
    if eager.leaves.keys() != captured.leaves.keys():
        return False
    pairs = ((one, captured.leaves[path]) for path, one in eager.leaves.items())
    return all(_near(one, other) or not _difference(one, other) for one, other in pairs)


def _near(one: Any, other: Any) -> bool:
    if not (isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)):
        return False
    if (one.dtype, one.shape) != (other.dtype, other.shape) or not one.is_floating_point():
        return False
    largest = one.double().nan_to_num(posinf=0, neginf=0).abs().max().item() if one.numel() else 0
    within = torch.finfo(one.dtype).eps ** 0.5 * largest
    return torch.allclose(one.double(), other.double(), 0, within, equal_nan=True)


def _difference(one: Any, other: Any) -> str:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        same = type(one) is type(other) and one == other
        return "" if same else f"{_short(one)} eagerly, {_short(other)} captured"
    kinds = [(str(x.dtype), tuple(x.shape)) for x in (one, other)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} eagerly, {kinds[1]} captured"
    bits, others = _bits(one), _bits(other)
    if np.array_equal(bits, others):
        return ""
    per_element = max(1, bits.size // max(1, one.numel()))
    apart = np.unique(np.flatnonzero(bits != others) // per_element)
    first = int(apart[0])
    values = [x.reshape(-1)[first].item() for x in (one, other)]
    return (
        f"{len(apart)} of {one.numel()} elements differ, first {values[0]!r} eagerly and "
        f"{values[1]!r} captured"
    )


def _bits(x: torch.Tensor) -> np.ndarray[Any, Any]:
    flat = x.contiguous().reshape(-1)
    if flat.is_sparse or not flat.numel():
        return np.zeros(0, np.uint8)
    return flat.view(torch.uint8).numpy()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 100 else f"{text[:97]}..."


def outcome(program: Program, eager: Record, captured: Record) -> Outcome:
    """Compare a captured run with an eager one."""
    result = Outcome(program.name, "equal", "", captured.replays, eager.seconds + captured.seconds)
    if eager.error:
        result.kind, result.text = "unfit", eager.error
    elif captured.refused:
        result.kind, result.text = "refused", captured.error
    elif captured.error:
        result.kind, result.text = "crashed", captured.error
    else:
        result.text = first_difference(eager, captured)
        result.kind = "different" if result.text else "equal"
        if result.text and captured.variant and nearly(eager, captured):
            result.kind = "close"
    if result.kind == "equal" and not captured.replays:
        result.kind, result.text = "idle", "no call was a replay"
    return result
