"""Settings in objects that modules hold, and threads that change modules."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.surroundings import setting_places
from commlib.graph.surroundings.modules import ModuleWatch
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.held_settings import Held, each_value_counts


class Config:
    """An object with a setting, and a counter of the loop around it."""

    def __init__(self, scale: float = 1.0) -> None:
        self.scale, self.global_step = scale, 0

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple."""
        return x * self.scale


class ManySettings(Config):
    """More attributes than are read one by one."""

    def __init__(self) -> None:
        super().__init__()
        for number in range(20):
            setattr(self, f"other_{number}", number)

    def times(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple, through computed names."""
        return x * float(getattr(self, "sca" + "le"))


class Intercepted(Config):
    """An object whose attributes are asked by its own code."""

    def __getattribute__(self, name: str) -> Any:
        return object.__getattribute__(self, name)


class Slotted:
    """An object without a dict."""

    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


@dataclass(frozen=True)
class Frozen:
    """A config that is replaced as a whole."""

    scale: float = 1.0
    name: str = "x"


def _scale(held: Any) -> Any:
    return held.scale


@pytest.mark.parametrize(
    "make", [Config, ManySettings, Intercepted, Slotted, lambda: SimpleNamespace(scale=1.0)]
)
@pytest.mark.parametrize("deep", [False, True])
def test_objects_in_modules(make: Callable[[], Any], deep: bool) -> None:
    held = make()
    if deep:
        outer = SimpleNamespace(inner=[held])
        module: Any = nn.Sequential(nn.Identity(), Held(outer, lambda x: x.inner[0].scale))
    else:
        module = Held(held, _scale)
    each_value_counts(module, lambda value: setattr(held, "scale", value))


@pytest.mark.parametrize("make", [Config, ManySettings])
def test_methods_of_objects_in_modules(make: Callable[[], Any]) -> None:
    class Calling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = make()

        def forward(self, x: torch.Tensor) -> Any:
            return self.config.times(x)

    module = Calling()
    each_value_counts(module, lambda value: setattr(module.config, "scale", value))


def test_many_settings_without_versions_of_dicts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without that function: each attribute is read."""
    monkeypatch.setattr(setting_places, "_version", None)
    held = ManySettings()
    module = Held(held, lambda x: getattr(x, "sca" + "le"))
    each_value_counts(module, lambda value: setattr(held, "scale", value))


def test_replaced_configs() -> None:
    """Frozen ones count by content: an equal one is the same setting."""
    module: Any = Held(Frozen(), _scale)
    each_value_counts(module, lambda value: setattr(module, "_held", Frozen(value)))
    one, three = Config(1.0), Config(3.0)
    module = Held(one, _scale)
    g = graph.capture(module, outputs="copy", verify=False)
    for config in (one, one, three, three, one, three):
        module._held = config
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), config.scale))


def test_values_of_other_types() -> None:
    class Mode(Enum):
        ONE, THREE = 1.0, 3.0

    module: Any = Held(Mode.ONE, lambda mode: mode.value)
    each_value_counts(module, lambda value: setattr(module, "_held", Mode(value)))
    other: Any = Held(1.0, lambda held: held)
    g = graph.capture(other, outputs="copy", verify=False)
    for value in (0.0, 0.0, -0.0, -0.0):
        other._held = value
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), value))


class Base:
    """A class with a default."""

    scale = 1.0


class Derived(Base):
    """A class that inherits it."""

    def __init__(self) -> None:
        self.other = 1


class ModuleWithDefault(nn.Module, Derived):
    """A module that inherits it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple."""
        return x * self.scale


@pytest.mark.parametrize("number", [1, 8])
@pytest.mark.parametrize("where", ["instance", "base"])
def test_defaults_in_classes(number: int, where: str) -> None:
    """They are replaced there, or hidden by an attribute that comes later."""
    held: Any = Derived()
    for name in range(number):
        setattr(held, f"scale_{name}", name)

    def read(x: Any) -> Any:
        _ = (x.scale_1, x.scale_2, x.scale_3, x.scale_4, x.scale_5) if number > 1 else ()
        return x.scale

    try:
        changed = held if where == "instance" else Base
        each_value_counts(Held(held, read), lambda value: setattr(changed, "scale", value))
        module = ModuleWithDefault()
        changed = module if where == "instance" else Base
        each_value_counts(module, lambda value: setattr(changed, "scale", value))
    finally:
        Base.scale = 1.0


@pytest.mark.parametrize("make", [Config, SimpleNamespace])
def test_attributes_that_come_later(make: Callable[[], Any]) -> None:
    held = make()
    g = graph.capture(Held(held, lambda x: getattr(x, "factor", 1.0)), outputs="copy", verify=False)
    for turn in range(6):
        if turn == 3:
            held.factor = 3.0
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), 1.0 if turn < 3 else 3.0))


def test_deleted_attributes() -> None:
    class Optional(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return x * getattr(self, "scale", 1.0)

    module: Any = Optional()

    def change(value: float) -> None:
        if value != 1.0:
            module.scale = value
        elif hasattr(module, "scale"):
            del module.scale

    each_value_counts(module, change)


def test_counters_of_the_loop_in_objects_of_modules() -> None:
    """An attribute that no code reads is not a setting there either."""
    config = Config()
    module = Held(config, _scale)
    g = graph.capture(module, outputs="copy", verify=False)
    for _ in range(6):
        g(torch.ones(2))
        config.global_step += 1
    assert_equal((len(g.entries), g.entries.replays), (1, 5), "graphs and replays")


# -- what is in no key ---------------------------------------------------------------------------


def _times(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return x * scale


def large_list() -> tuple[Any, Callable[[], object]]:
    """A list of more than 2,000 bytes."""
    held = [1.0] * 3000
    return (lambda x: x * held[7]), lambda: held.__setitem__(7, 3.0)


def large_dict() -> tuple[Any, Callable[[], object]]:
    """A dict of more than 200 items with another object."""
    held: dict[Any, Any] = {**dict.fromkeys(range(300), 1.0), "other": object()}
    return (lambda x: x * held[7]), lambda: held.__setitem__(7, 3.0)


def default_of_a_called_function() -> tuple[Any, Callable[[], object]]:
    """A default that is replaced."""
    return (lambda x: _times(x)), lambda: setattr(_times, "__defaults__", (3.0,))


def forced_field() -> tuple[Any, Callable[[], object]]:
    """A field of a frozen dataclass, set in spite of that."""
    config = Frozen()
    return Held(config, _scale), lambda: object.__setattr__(config, "scale", 3.0)


def written_past_setattr() -> tuple[Any, Callable[[], object]]:
    """A number of a module that no ``__setattr__`` reports."""
    module = Held(1.0, lambda held: held)
    return module, lambda: vars(module).__setitem__("_held", 3.0)


def module_of_an_attribute() -> tuple[Any, Callable[[], object]]:
    """A number in a module of Python that an object holds."""
    settings: Any = ModuleType("settings")
    settings.scale = 1.0
    held = SimpleNamespace(settings=settings)
    return (lambda x: x * held.settings.scale), lambda: setattr(settings, "scale", 3.0)


@pytest.mark.parametrize(
    "make",
    [
        *(large_list, large_dict, default_of_a_called_function, forced_field),
        *(written_past_setattr, module_of_an_attribute),
    ],
)
def test_verified_calls_find_the_others(make: Callable[[], Any]) -> None:
    """Settings in no key: replays use the old value, and the next verified call raises."""
    fn, change = make()
    g, x = graph.capture(fn, outputs="copy", verify=1), torch.ones(2)
    for _ in range(3):
        assert_bits_equal(g(x), x)
    try:
        change()
        with raises(GraphError, "differ"):
            g(x)
    finally:
        _times.__defaults__ = (1.0,)


def test_configs_of_arguments() -> None:
    """What a module among the arguments holds counts as that of any module does."""
    config = Config()
    module, x = Held(config, _scale), torch.ones(2)
    g = graph.capture(lambda module, x: module(x), verify=False)
    for scale in (1.0, 1.0, 1.0, 3.0, 3.0):
        config.scale = scale
        assert_bits_equal(g(module, x), x * scale)


# -- threads --------------------------------------


@pytest.mark.parametrize("moment", ["look", "keep"])
def test_a_call_while_another_thread_looks_at_modules(
    monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """A change before both calls is seen by both, wherever the other thread is."""
    module: Any = Held(1.0, lambda held: held)
    g, x = graph.capture(module, outputs="copy", verify=False), torch.ones(1)
    for value in (7.0, 7.0, 1.0, 1.0):
        module._held = value
        g(x)
    plain, values, threads = getattr(ModuleWatch, moment), list[float](), list[threading.Thread]()

    def slowly(self: ModuleWatch, *args: Any) -> Any:
        monkeypatch.setattr(ModuleWatch, moment, plain)
        made = plain(self, *args)
        threads.append(threading.Thread(target=lambda: values.append(g(x).item())))
        threads[0].start()
        threads[0].join(0.3)  # it waits for this thread, or has seen the change
        return made

    module._held = 7.0
    monkeypatch.setattr(ModuleWatch, moment, slowly)
    values.append(g(x).item())
    threads[0].join()
    assert_equal(values, [7.0, 7.0])


def test_a_look_of_another_thread_before_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another thread has found is used where nothing has changed since."""
    module: Any = Held(1.0, lambda held: held)
    g, x = graph.capture(module, outputs="copy", verify=False), torch.ones(1)
    for value in (7.0, 7.0, 1.0, 1.0):
        module._held = value
        g(x)
    plain = ModuleWatch.changed
    assert isinstance(plain, property)

    def asked(self: ModuleWatch) -> Any:
        monkeypatch.setattr(ModuleWatch, "changed", plain)
        thread = threading.Thread(target=lambda: g(x))
        thread.start()
        thread.join()
        return self.changed

    module._held = 7.0
    monkeypatch.setattr(ModuleWatch, "changed", property(asked))
    assert_equal(g(x).item(), 7.0)


class Parts(nn.Module):
    """A module with a part of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.attribute = 1.0
        self.register_buffer("buffer", torch.ones(1))
        self.register_parameter("parameter", nn.Parameter(torch.ones(1)))
        self.add_module("module", Held(1.0, lambda held: held))

    def forward(self, x: torch.Tensor) -> Any:
        """Return a multiple."""
        made = self.get_submodule("module")(x) * self.attribute
        return made * self.get_buffer("buffer") * self.get_parameter("parameter")

    def replace(self, part: str) -> None:
        """Put a part that multiplies by 7 in the place of one."""
        seven = torch.full((1,), 7.0)
        changes: dict[str, Callable[[], object]] = {
            "attribute": lambda: setattr(self, "attribute", 7.0),
            "buffer": lambda: self.register_buffer("buffer", seven),
            "parameter": lambda: self.register_parameter("parameter", nn.Parameter(seven)),
            "module": lambda: self.add_module("module", Held(7.0, lambda held: held)),
        }
        changes[part]()


@pytest.mark.parametrize("part", ["attribute", "buffer", "parameter", "module"])
def test_a_call_while_another_thread_changes_a_module(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """A change is reported when it is there: a look before that would keep the old state."""
    module = Parts()
    values = list[float]()
    old = [*module.parameters(), *module.buffers(), *module.children()]  # they stay alive
    g, x = graph.capture(module, outputs="copy", verify=False), torch.ones(1)
    plain = ModuleWatch.note

    def call() -> float:
        with torch.no_grad():
            return float(g(x).item())

    def note(self: ModuleWatch) -> None:
        monkeypatch.setattr(ModuleWatch, "note", plain)
        plain(self)
        values.append(call())

    assert_equal([call(), call()], [1.0, 1.0])
    monkeypatch.setattr(ModuleWatch, "note", note)
    module.replace(part)
    assert_equal([*values, call()], [7.0, 7.0])
    assert_equal(len(old), 3, "old parts")


def test_states_of_many_steps() -> None:
    """A step counter in a module does not keep all that modules held at each step."""
    module: Any = nn.Linear(2, 2)
    module.scale = 0.0
    g = graph.capture(lambda x: module(x) * module.scale, outputs="copy", max_graphs=2)
    x = torch.ones(2)
    for turn in range(20):
        module.scale = float(turn)
        with torch.no_grad():
            assert_bits_equal(g(x), module(x) * turn, f"turn {turn}")
    assert_equal(len(g._keys.around._states._numbers), 4, "states")


def test_as_many_states_as_graphs() -> None:
    """Each state keeps its graph, however many of them the program asks for."""
    module: Any = nn.Linear(2, 2)
    g = graph.capture(
        lambda x: module(x) * module.scale, outputs="copy", verify=False, max_graphs=150
    )
    x = torch.ones(2)
    with torch.no_grad():
        for value in (*range(150), *range(150)):
            module.scale = float(value)
            g(x)
    assert_equal([len(g.entries), g.entries.replays], [150, 150], "graphs and replays")
