"""Settings in the key of a call: attributes that code reads, contents, hooks and flags."""

import operator
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from commlib import graph
from commlib.graph.python.read_names import read_names
from tests.support.checks import assert_bits_equal, assert_equal


class Trainer:
    """A loop around a captured method."""

    factor = 1.0
    table: ClassVar[dict[str, Any]] = {"deep": {"scale": 1.0}}

    def __init__(self) -> None:
        self.module = nn.Linear(2, 2)
        self.scale, self.global_step = 1.0, 0
        self.history: list[float] = []
        self.settings: dict[str, Any] = {"deep": {"scale": [1.0]}}
        self.choice = {1}
        self.array = np.ones(1, dtype=np.float32)

    def step(self, x: torch.Tensor) -> Any:
        """Return what all settings make of ``x``."""
        scaled = self._scaled(x) * self.settings["deep"]["scale"][0] * Trainer.factor
        return scaled * self.table["deep"]["scale"] * min(self.choice) * float(self.array[0])

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def fit(self, step: Callable[..., Any]) -> None:
        """Count, and take a step."""
        self.history.append(step(torch.ones(2)).sum().item())
        self.global_step += 1


class Module(nn.Module):
    """The same as a module."""

    def __init__(self) -> None:
        super().__init__()
        self.global_step, self.scales = 0, [[1.0]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple."""
        return x * self.scales[0][0]

    def fit(self, step: Callable[..., Any]) -> None:
        """Count, and take a step."""
        step(torch.ones(2))
        self.global_step += 1


def test_counters_around_a_method() -> None:
    """Neither a number nor a list that the method never reads is a part of its key."""
    for owner, name in ((Trainer(), "step"), (Module(), "forward")):
        g = graph.capture(getattr(owner, name), outputs="copy", verify=False)
        for _ in range(20):
            owner.fit(g)
        assert_equal((len(g.entries), g.entries.replays), (1, 19), "graphs and replays")


SETTINGS: dict[str, Callable[[Any, float], object]] = {
    "attribute": lambda t, v: setattr(t, "scale", v),
    "nested": lambda t, v: t.settings["deep"]["scale"].__setitem__(0, v),
    "set": lambda t, v: (t.choice.clear(), t.choice.add(int(v))),
    "array": lambda t, v: t.array.fill(v),
    "class": lambda _, v: setattr(Trainer, "factor", v),
    "class container": lambda t, v: t.table["deep"].__setitem__("scale", v),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_an_object(name: str) -> None:
    trainer = Trainer()
    g = graph.capture(trainer.step, outputs="copy", verify=False)
    for value in (1.0, 1.0, 1.0, 3.0, 3.0, 1.0):
        SETTINGS[name](trainer, value)
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), value), f"value {value}")
    assert_equal((len(g.entries), g.entries.replays), (2, 4), "graphs and replays")


def test_contents_of_attributes_of_modules() -> None:
    module = Module()
    g = graph.capture(module, outputs="copy", verify=False)
    for value in (1.0, 1.0, 1.0, 3.0, 3.0, 1.0):
        module.scales[0][0] = value
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), value), f"value {value}")


def test_defaults_of_the_function() -> None:
    def f(x: torch.Tensor, scale: float = 1.0, *, more: float = 0.0) -> torch.Tensor:
        return x * scale + more

    g = graph.capture(f, outputs="copy", verify=False)
    for value in (1.0, 1.0, 3.0, 3.0):
        f.__defaults__, f.__kwdefaults__ = (value,), {"more": value}
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), value * 2), f"value {value}")


def test_hooks_of_all_modules() -> None:
    module = nn.Linear(2, 2)
    g = graph.capture(module, outputs="copy", verify=False)
    x = torch.ones(2)
    for turn in range(8):
        if turn == 3:
            handle = nn.modules.module.register_module_forward_hook(lambda *_: torch.zeros(2))
        if turn == 5:
            handle.remove()
        assert_bits_equal(g(x), module(x), f"turn {turn}")


@contextmanager
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision(before)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextmanager
def _slow_attention() -> Iterator[None]:
    torch.backends.mha.set_fastpath_enabled(False)
    yield
    torch.backends.mha.set_fastpath_enabled(True)


@contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


class Scaling(TorchFunctionMode):
    """A mode of a program, with a setting."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Scale products."""
        result = func(*args, **(kwargs or {}))
        return result * self.scale if func is torch.Tensor.mul else result


def test_modes_for_functions_are_in_the_key() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.mul(2) if torch.zeros(1).is_cpu else x.mul(3)

    captured, x = graph.capture(fn, verify=False), torch.ones(2)
    modes = (nullcontext, lambda: Scaling(3.0), lambda: Scaling(5.0), lambda: torch.device("meta"))
    for turn in range(12):
        with modes[turn % 4]():
            actual, want = captured(x), fn(x)
        assert_bits_equal(actual, want, f"call {turn}")
    assert_equal((len(captured.entries), captured.entries.replays), (4, 8), "graphs and replays")


@pytest.mark.parametrize(
    "flag",
    [
        _slow_attention,
        _default_device,
        _precision,
        _deterministic,
        lambda: nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH),
    ],
)
def test_flags_of_torch_are_in_the_key(flag: Any) -> None:
    g, x = graph.capture(lambda x: x * 2, outputs="copy"), torch.ones(2)
    for _ in range(2):
        g(x)
    with flag():
        g(x)
    g(x)
    assert_equal((len(g.entries), g.entries.replays), (2, 2), "graphs and replays")


# -- code that can't be seen -----------------------------------------------------------------------


class Reading:
    """An object with attributes that are read in many ways."""

    def __init__(self) -> None:
        self.scale, self.counter, self.name = 2.0, 0, "scale"
        self.inner = types.SimpleNamespace(scale=3.0)

    def literal(self) -> float:
        """Read an attribute whose name is written here."""
        return float(getattr(self, "scale", 1))

    def computed(self) -> float:
        """Read an attribute whose name is a value."""
        return float(getattr(self, self.name))

    def all_of_them(self) -> int:
        """Read all attributes."""
        return len(vars(self))

    @property
    def through(self) -> float:
        """Read an attribute of another object."""
        return float(self.inner.scale)


@dataclass
class Made:
    """An object that reads another one where it is made; ``__init__`` names the method."""

    reading: Any

    def __post_init__(self) -> None:
        """Read an attribute of another object."""
        self.taken = self.reading.scale


@pytest.mark.parametrize(
    ("fn", "found"),
    [
        (lambda r: lambda: r.literal(), True),
        (lambda r: lambda: r.through, True),
        (lambda r: (lambda key: lambda: key(r))(operator.attrgetter("scale")), True),
        (lambda r: (lambda key: lambda: key(r))(operator.methodcaller("literal")), True),
        (lambda r: (lambda key: lambda: key(r))(operator.methodcaller("computed")), False),
        (lambda r: (lambda made: lambda: made)(Made(r)), True),
        (lambda r: lambda: Made(r), True),
        (lambda r: lambda: r.computed(), False),
        (lambda r: lambda: r.all_of_them(), False),
        (lambda r: lambda: sorted([r], key=__import__("operator").attrgetter("counter")), False),
        (lambda r: (lambda items: lambda: next(items))(x.scale for x in [r]), False),
    ],
)
def test_names_that_code_reads(fn: Any, found: bool) -> None:
    names = read_names([fn(Reading())])
    assert (names is not None) is found
    if names is not None:
        assert "scale" in names
        assert "counter" not in names


class Point:
    """An object that patterns open."""

    __match_args__ = ("x_of",)

    def __init__(self) -> None:
        self.x_of = self.scale = self.counter = 1.0


def _matched(p: Point) -> float:
    match p:
        case Point(7.0):
            return 7.0
    return 1.0


def _of_lazy_module(p: Point) -> float:
    return float(lazy.read(p))


def _formatted(p: Point) -> float:
    return float("{.scale}".format(p))  # noqa: UP032 - this is the case that counts


class _Lazy(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name != "read":
            raise AttributeError(name)
        return lambda p: p.scale


lazy = _Lazy("lazily_filled")
PROXY = types.MappingProxyType({"read": lambda p: p.scale})


@pytest.mark.parametrize(
    "read", [_matched, _of_lazy_module, _formatted, lambda p: PROXY["read"](p)]
)
def test_attributes_that_are_read_in_other_ways(read: Callable[[Point], float]) -> None:
    """Patterns, formats, modules that are filled when asked, and views of dicts."""
    point = Point()
    g = graph.capture(lambda x: x * read(point), outputs="copy", verify=False)
    for value in (1.0, 1.0, 1.0, 7.0, 7.0):
        point.scale = point.x_of = value
        assert_equal(g(torch.ones(1)).item(), value)


def test_another_class_after_the_capture() -> None:
    """The attributes of an object are the same, and its methods are others."""

    class Once:
        def factor(self) -> float:
            return 1.0

    class Twice(Once):
        def factor(self) -> float:
            return 2.0

    held = Once()
    g = graph.capture(lambda x: x * held.factor(), outputs="copy", verify=False)
    for kind, want in ((Once, 1.0), (Once, 1.0), (Twice, 2.0), (Twice, 2.0), (Once, 1.0)):
        held.__class__ = kind
        assert_equal(g(torch.ones(1)).item(), want)


@pytest.mark.parametrize("loop", ["run", "check", "reset", "name", "fn"])
def test_loops_with_names_of_ours(loop: str) -> None:
    """A method is not read because commlib's own class has one of that name."""

    class Loop:
        def __init__(self) -> None:
            self.scale, self.global_step = 2.0, 0

        @graph.capture(verify=False)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            """Return a multiple."""
            return x * self.scale

    def run(self: Any) -> Any:
        for _ in range(6):
            self.step(torch.ones(1))
            self.global_step += 1
        return self.step

    setattr(Loop, loop, run)
    g = getattr(Loop(), loop)()
    assert_equal((len(g.entries), g.entries.replays), (1, 5), "graphs and replays")
