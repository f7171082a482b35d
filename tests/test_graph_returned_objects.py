"""Objects that a captured function returns: the program's own, and those that each call makes."""

import dataclasses
import threading
from collections import Counter, UserDict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

LEAVES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "new memory": lambda x, _: (x * 2).requires_grad_(),
    "a view of an argument": lambda x, _: x.detach()[:1].requires_grad_(),
    "memory from outside": lambda _, held: held.detach().requires_grad_(),
}


@pytest.mark.parametrize("made", LEAVES)
@pytest.mark.parametrize("differentiable", [False, True])
@runs_on("unified_ranks")
def test_leaves(comm: Any, made: str, differentiable: bool) -> None:
    """A leaf that each call makes wants a gradient, and begins without one."""
    weight = torch.ones(2, device=comm.device, requires_grad=differentiable)
    held, x = torch.ones(2, device=comm.device), torch.ones(2, device=comm.device)
    captured = graph.capture(lambda x: (x * weight, LEAVES[made](x, held)), verify=False)
    for turn in range(4):
        product, leaf = captured(x)
        (leaf.sum() + product.sum()).backward() if differentiable else leaf.sum().backward()
        assert_equal((leaf.is_leaf, product.requires_grad), (True, differentiable), f"turn {turn}")
        assert_bits_equal(leaf.grad, torch.ones_like(leaf), f"turn {turn}")
        if differentiable:
            assert_bits_equal(weight.grad, x * (turn + 1), f"turn {turn}")


@runs_on("unified_ranks")
def test_a_leaf_of_an_argument_with_a_history(comm: Any) -> None:
    """No gradient goes back through it."""
    captured = graph.capture(lambda x: (x * 2, x.detach().requires_grad_()), verify=False)
    for turn in range(4):
        x = torch.ones(2, device=comm.device, requires_grad=True)
        doubled, leaf = captured(x)
        (doubled + leaf).sum().backward()
        assert_bits_equal(x.grad, torch.full((2,), 2.0), f"turn {turn}")
        assert_bits_equal(leaf.grad, torch.ones(2), f"turn {turn}")


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "unsqueeze_": lambda y: y.unsqueeze_(0),
    "t_": torch.Tensor.t_,
    "requires_grad_": torch.Tensor.requires_grad_,
    "data": lambda y: setattr(y, "data", torch.ones(1, device=y.device)),
    "an attribute": lambda y: setattr(y, "tag", 1),
}


@pytest.mark.parametrize("change", CHANGES)
@runs_on("unified_ranks")
def test_views_that_the_caller_changes(comm: Any, change: str) -> None:
    """Each replay returns another tensor over memory from outside; the program's own stay."""
    held, weight = torch.zeros(3, 2, device=comm.device), torch.nn.Parameter(torch.ones(2))
    captured = graph.capture(lambda x: (held.add_(x), held[:2], held, weight), verify=False)
    for turn in range(4):
        _, view, output, parameter = captured(torch.ones(2, device=comm.device))
        assert_bits_equal(view, held[:2], f"turn {turn}")
        assert_equal((view.requires_grad, hasattr(view, "tag")), (False, False), f"turn {turn}")
        assert output is held
        assert parameter is weight
        CHANGES[change](view)


class Stats:
    """An object without ``__eq__``, around plain values and an object of the program."""

    def __init__(self, shared: Any = None) -> None:
        self.count, self.shared = 0, shared


@dataclasses.dataclass
class Step:
    """An object around a tensor."""

    loss: torch.Tensor
    stats: Stats


class OwnDict(dict[int, int]):
    """A dict that pytree does not open."""


class OwnList(list[int]):
    """A list that pytree does not open."""


def _count(x: Any) -> Any:
    x.count += 1
    return x.count


def _add(x: Any) -> Any:
    x[len(x)] = 1
    return len(x)


def _append(x: Any) -> Any:
    x.append(1)
    return len(x)


MADE: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "object": (Stats, _count),
    "namespace": (lambda: SimpleNamespace(count=0), _count),
    "counter": (Counter, _add),
    "dict": (OwnDict, _add),
    "user dict": (UserDict, _add),
    "list": (OwnList, _append),
    "set": (set, lambda x: x.add(len(x)) or len(x)),
    "bytes": (bytearray, _append),
    "array": (lambda: np.zeros(2), lambda x: x.__iadd__(1).tolist()),
}


@pytest.mark.parametrize("name", MADE)
@runs_on("unified_ranks")
def test_made_objects(comm: Any, name: str) -> None:
    """What a call makes is another object at each replay."""
    make, change = MADE[name]

    def fn(x: torch.Tensor) -> Any:
        made = make()
        return x * 2, made, made

    captured, x = graph.capture(fn, verify=False), torch.ones(2, device=comm.device)
    for turn in range(4):
        _, made, same = captured(x)
        assert_equal(change(made), change(make()), f"turn {turn}")
        assert made is same


@runs_on("unified_ranks")
def test_objects_in_objects(comm: Any) -> None:
    """Objects of the program stay what they are, in objects that each call makes."""
    stats = Stats()
    captured = graph.capture(lambda x: (Step(x.sum(), Stats(stats)), stats), verify=False)
    for turn in range(4):
        step, same = captured(torch.ones(2, device=comm.device))
        assert_bits_equal(step.loss, torch.tensor(2.0), f"turn {turn}")
        assert_equal((_count(step.stats), _count(stats)), (1, turn + 1), f"turn {turn}")
        assert step.stats.shared is stats
        assert same is stats


@runs_on("unified_ranks")
def test_arrays_over_memory_of_the_program(comm: Any) -> None:
    """What the program writes there, the caller sees."""
    array, x = np.zeros(2), torch.ones(2, device=comm.device)
    captured = graph.capture(lambda x: (x * 2, array[:1], Stats(array[1:])), verify=False)
    for turn in range(4):
        _, view, stats = captured(x)
        array += 1
        assert_equal((view[0], stats.shared[0]), (turn + 1, turn + 1), f"turn {turn}")


@runs_on("unified_ranks")
def test_objects_that_are_made_once(comm: Any) -> None:
    """What the first call keeps, all others return."""
    cache: dict[str, Stats] = {}

    def fn(x: torch.Tensor) -> Any:
        if "stats" not in cache:
            cache["stats"] = Stats()
        return x * 2, cache["stats"]

    captured = graph.capture(fn, verify=False)
    for _ in range(4):
        assert captured(torch.ones(2, device=comm.device))[1] is cache["stats"]


@runs_on("unified_ranks")
def test_objects_that_can_not_be_copied(comm: Any) -> None:
    """They are refused where a call makes them, and not where the program has them."""
    x, stats = torch.ones(2, device=comm.device), Stats(threading.Lock())
    with raises(GraphError, "each call makes (Stats)", "return what it holds"):
        graph.capture(lambda x: (x * 2, Stats(threading.Lock())), verify=False)(x)
    captured = graph.capture(lambda x: (x * 2, stats), verify=False)
    for _ in range(3):
        assert captured(x)[1] is stats
