"""Settings that are replaced, reordered or set again, and objects whose look-ups raise."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from commlib import graph
from commlib.graph.surroundings.modules import ModuleWatch
from tests.support.checks import assert_bits_equal, assert_equal

ONE = torch.ones(2)


class Trainer:
    """A step, and what a loop around it counts."""

    def __init__(self) -> None:
        self.net = nn.Linear(2, 2)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.global_step = 0

    def step(self, x: torch.Tensor) -> torch.Tensor:
        """Make a step and return the loss."""
        self.opt.zero_grad()
        loss: torch.Tensor = self.net(x).sum()
        loss.backward()
        self.opt.step()
        return loss.detach()


@pytest.mark.parametrize("of_trainer", [False, True])
def test_counters_of_a_loop_with_a_scheduler(of_trainer: bool) -> None:
    """A scheduler wraps the optimizer's step; what the loop counts still makes no new graph."""
    trainer = Trainer()
    scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.opt, lambda epoch: 1.0)
    if of_trainer:
        trainer.scheduler = scheduler  # type: ignore[attr-defined]
    captured = graph.capture(trainer.step, verify=False)
    for _ in range(8):
        captured(ONE)
        trainer.global_step += 1
        scheduler.step()
    assert_equal(len(captured.entries), 1, "graphs")


def test_an_import_in_code_with_many_names() -> None:
    """The number of a name above 255 takes two steps of Python's code."""
    tests = "\n".join(f"    if x is None: x.attribute_{number}" for number in range(300))
    names: dict[str, Any] = {}
    exec(f"def fn(x):\n{tests}\n    from math import sqrt as root\n    return x * root(4.0)", names)
    captured = graph.capture(names["fn"])
    for _ in range(3):
        assert_bits_equal(captured(ONE), ONE * 2)


def rows(x: torch.Tensor, held: Mapping[str, Any]) -> Any:
    return x * held["m"].shape[0]


def bits(x: torch.Tensor, held: Mapping[str, Any]) -> Any:
    return x * held["m"].dtype.itemsize


def first(x: torch.Tensor, held: Mapping[str, Any]) -> torch.Tensor:
    return x * float(held["m"][0])


CHANGES: dict[str, tuple[Any, Any, Any]] = {
    "shape": (rows, np.ones((2, 3)), np.ones((3, 2))),
    "dtype": (bits, np.zeros(2, "float32"), np.zeros(1, "float64")),
    "numpy": (first, [np.float64(1)], [np.int64(3)]),
    "items": (first, [1.0, object()], [3.0, object()]),
    "object": (first, np.array([1.0, None], object), np.array([3.0, None], object)),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("mixed", [False, True])
def test_what_replaces_an_item_counts(name: str, mixed: bool) -> None:
    """It counts by its content, and so does a later change in it."""
    fn, before, after = CHANGES[name]
    held = {"m": before, **({"other": object()} if mixed else {})}
    captured = graph.capture(lambda x: fn(x, held), verify=False)
    for value in (before, before, after, after, before):
        held["m"] = value
        assert_bits_equal(captured(ONE), fn(ONE, held), name)
    if name == "items":
        before[0] = 7.0
        assert_bits_equal(captured(ONE), ONE * 7)


def test_a_set_in_another_order() -> None:
    held = {"names": {"a", "b", "c", "d", "e"}}
    captured = graph.capture(lambda x: x * len(held["names"]), verify=False)
    for order in ("abcde", "edcba", "cdeab"):
        held["names"] = set()
        for letter in order:
            held["names"].add(letter)
        assert_bits_equal(captured(ONE), ONE * 5)
    assert_equal(len(captured.entries), 1, "graphs")


def test_a_look_into_containers_keeps_what_another_thread_has_found() -> None:
    """A thread that has read an older state of modules does not put it back."""
    module: Any = nn.Linear(2, 2)
    module.scale, module.held = 1.0, {"scale": 1.0, "other": object()}
    captured = graph.capture(lambda x: x * module.scale * module.held["scale"], verify=False)
    captured(ONE)
    captured(ONE)
    around = captured._keys.around
    module.scale = 2.0
    newer = around._watch_again()
    around._look_into_containers()
    assert_equal(around._watched.modules, newer.modules, "the number of the modules' state")
    assert_bits_equal(captured(ONE), ONE * 2)


def test_arrays_with_many_fields() -> None:
    """What is written of an array counts, its dtype too: this one is left out."""
    many = np.dtype([(f"field{number}", "f4") for number in range(200)])
    held = {number: np.zeros(1, many) for number in range(60)}
    captured = graph.capture(lambda x: x * len(held), verify=False)
    for _ in range(3):
        assert_bits_equal(captured(ONE), ONE * 60)


class Attributes(dict[str, Any]):
    """A config whose items are its attributes; a missing one is a ``KeyError``."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Slotted:
    """An object without a ``__dict__``; look-ups of missing names raise an unusual error."""

    __slots__ = ("scale", "unset")

    def __init__(self) -> None:
        self.scale = 2.0

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} is not set")


class Choosy(type):
    """A class of classes that knows no names but its own."""

    def __getattr__(cls, name: str) -> Any:
        raise KeyError(name)


class Chosen(metaclass=Choosy):
    """An object of such a class."""

    def __init__(self) -> None:
        self.scale = 2.0


@pytest.mark.parametrize("make", [lambda: Attributes(scale=2.0), Slotted, Chosen])
def test_look_ups_that_raise(make: Callable[[], Any]) -> None:
    config = make()
    captured = graph.capture(lambda x: x * config.scale)
    for _ in range(3):
        assert_bits_equal(captured(ONE), ONE * 2)


def test_an_attribute_that_is_set_again_is_no_change() -> None:
    """``model.train()`` at each step sets what is there already."""
    net, watch = nn.Sequential(nn.Linear(2, 2), nn.ReLU()), ModuleWatch()
    watch.add(net.modules(), [])
    watch.keep(watch.look())
    net.train()
    assert_equal(watch.changed, False, "after train()")
    net.eval()
    assert_equal(watch.changed, True, "after eval()")
