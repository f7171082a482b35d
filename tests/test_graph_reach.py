"""Values that a function finds on further ways: other containers, bases of classes, inner code."""

import gc
import weakref
from array import array
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable
from functools import partial
from types import MappingProxyType, SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

Function = Callable[[torch.Tensor], torch.Tensor]
Change = Callable[[float], Any]  # to a value
Way = Callable[[torch.device], tuple[Function, Change]]


def _check(comm: Any, way: Way) -> None:
    """Change a value between calls, and once back: each call is that of eager code."""
    fn, change = way(comm.device)
    change(1.0)
    captured, x = graph.capture(fn, verify=False), -torch.ones(2, device=comm.device)
    for turn, value in enumerate((1.0, 1.0, 1.0, 5.0, 5.0, 1.0)):
        change(value)
        assert_bits_equal(captured(x + turn), fn(x + turn), f"call {turn}")
    assert len(captured.entries) <= 2, "a value was captured again and again"


class Pair(NamedTuple):
    first: Any
    second: float = 1.0


def _item(held: Any, read: Callable[[], Any], key: Any = 0) -> tuple[Function, Change]:
    return lambda x: x * read(), partial(held.__setitem__, key)


def _named_tuple(device: torch.device) -> tuple[Function, Change]:
    pair = Pair([1.0])
    return _item(pair.first, lambda: pair.first[0])


def _dict_in_named_tuple(device: torch.device) -> tuple[Function, Change]:
    pair = Pair({"k": 1.0})
    return _item(pair.first, lambda: pair.first["k"], "k")


def _list_of_named_tuples(device: torch.device) -> tuple[Function, Change]:
    pairs = [Pair([1.0])]
    return _item(pairs[0].first, lambda: pairs[0].first[0])


def _user_dict(device: torch.device) -> tuple[Function, Change]:
    held = UserDict(k=1.0)
    return _item(held, lambda: held["k"], "k")


def _tensor_in_user_dict(device: torch.device) -> tuple[Function, Change]:
    tensors = {value: torch.full((2,), value, device=device) for value in (1.0, 5.0)}
    held = UserDict(k=tensors[1.0])
    return lambda x: x * held["k"], lambda value: held.update(k=tensors[value])


def _user_list(device: torch.device) -> tuple[Function, Change]:
    held = UserList([1.0])
    return _item(held, lambda: held[0])


def _chain_map(device: torch.device) -> tuple[Function, Change]:
    held = ChainMap({}, {"k": 1.0})
    return _item(held.maps[1], lambda: held["k"], "k")


def _mapping_proxy(device: torch.device) -> tuple[Function, Change]:
    inner = {"k": 1.0}
    held = MappingProxyType(inner)
    return _item(inner, lambda: held["k"], "k")


def _array(device: torch.device) -> tuple[Function, Change]:
    held = [array("d", [1.0])]
    return _item(held[0], lambda: held[0][0])


def _bytearray(device: torch.device) -> tuple[Function, Change]:
    held = bytearray(1)
    return lambda x: x * held[0], lambda value: held.__setitem__(0, int(value))


CONTAINERS: dict[str, Way] = {
    "named tuple": _named_tuple,
    "dict in a named tuple": _dict_in_named_tuple,
    "list of named tuples": _list_of_named_tuples,
    "user dict": _user_dict,
    "tensor in a user dict": _tensor_in_user_dict,
    "user list": _user_list,
    "chain map": _chain_map,
    "mapping proxy": _mapping_proxy,
    "array": _array,
    "bytearray": _bytearray,
}


@pytest.mark.parametrize("container", CONTAINERS)
@runs_on("unified_ranks")
def test_containers(comm: Any, container: str) -> None:
    """Containers count by what they hold, whichever class of Python they have."""
    _check(comm, CONTAINERS[container])


class Base:
    factor = 1.0
    factors: ClassVar[dict[str, float]] = {}
    weight = torch.empty(0)

    @classmethod
    def scale(cls, x: torch.Tensor) -> torch.Tensor:
        """Scale by a value of the base."""
        return x * cls.factor


class Derived(Base):
    pass


def _tensor_of_base(device: torch.device) -> tuple[Function, Change]:
    tensors = {value: torch.full((2,), value, device=device) for value in (1.0, 5.0)}
    return lambda x: x * Derived.weight, lambda value: setattr(Base, "weight", tensors[value])


BASES: dict[str, Way] = {
    "value": lambda _: (lambda x: x * Derived.factor, partial(setattr, Base, "factor")),
    "item": lambda _: _item(Base.factors, lambda: Derived.factors["k"], "k"),
    "tensor": _tensor_of_base,
    "class method": lambda _: (Derived.scale, partial(setattr, Base, "factor")),
}


@pytest.mark.parametrize("base", BASES)
@runs_on("unified_ranks")
def test_values_of_a_base(comm: Any, base: str) -> None:
    """A class has the values of its bases too."""
    _check(comm, BASES[base])


def _inner_function(device: torch.device) -> tuple[Function, Change]:
    act: Function = F.relu

    def inner(x: torch.Tensor) -> torch.Tensor:
        return act(x)

    def change(value: float) -> None:
        nonlocal act
        act = F.relu if value == 1.0 else F.silu

    return lambda x: inner(x), change


def _inner_class(device: torch.device) -> tuple[Function, Change]:
    kinds = {value: type("Kind", (), {"factor": value}) for value in (1.0, 5.0)}
    kind: Any = kinds[1.0]

    def inner(x: torch.Tensor) -> Any:
        return x * kind.factor

    def change(value: float) -> None:
        nonlocal kind
        kind = kinds[value]

    return lambda x: inner(x), change


@pytest.mark.parametrize("way", [_inner_function, _inner_class])
@runs_on("unified_ranks")
def test_a_function_or_class_in_inner_code(comm: Any, way: Way) -> None:
    """A variable of a function that the captured one calls may hold another function."""
    _check(comm, way)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Scale."""
        return x * self.weight


def _scripted(device: torch.device) -> torch.nn.Module:
    module: torch.nn.Module = torch.jit.script(Scale().to(device))
    return module


def _traced(device: torch.device) -> torch.nn.Module:
    traced: torch.nn.Module = torch.jit.trace(Scale().to(device), torch.ones(2, device=device))
    return traced


@pytest.mark.parametrize("make", [_scripted, _traced])
@runs_on("unified_ranks")
def test_modules_of_torchscript(comm: Any, make: Callable[[torch.device], nn.Module]) -> None:
    """They are captured as they are; their code is not Python's."""
    module: Any = make(comm.device)
    captured, x = graph.capture(module, verify=False), torch.ones(2, device=comm.device)
    for turn in range(4):
        assert_bits_equal(captured(x + turn), module(x + turn), f"call {turn}")
    assert_equal(len(captured.entries), 1, "graphs")


def _weight(device: torch.device, **attributes: Any) -> Any:
    weight = nn.Parameter(torch.ones(2, device=device), requires_grad=False)
    vars(weight).update(attributes)
    return weight


def _of_tensor(device: torch.device) -> tuple[Function, Change]:
    weight = _weight(device, factor=1.0)
    return lambda x: x * weight.factor, partial(setattr, weight, "factor")


def _of_parameter_in_module(device: torch.device) -> tuple[Function, Change]:
    scale: Any = Scale().to(device)
    scale.weight = _weight(device, factor=1.0)
    return lambda x: scale(x) * scale.weight.factor, partial(setattr, scale.weight, "factor")


def _new_on_one_of_many(device: torch.device) -> tuple[Function, Change]:
    weights = [_weight(device) for _ in range(3)]

    def fn(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = x * getattr(weight, "factor", 1.0)
        return x

    def change(value: float) -> None:
        weights[0].seen = value  # that no code reads
        vars(weights[1]).update({} if value == 1.0 else {"factor": value})
        if value == 1.0:
            vars(weights[1]).pop("factor", None)

    return fn, change


def _tensor_of_tensor(device: torch.device) -> tuple[Function, Change]:
    tensors = {value: torch.full((2,), value, device=device) for value in (1.0, 5.0)}
    weight = _weight(device, main_grad=tensors[1.0])
    return lambda x: x * weight.main_grad, lambda value: setattr(
        weight, "main_grad", tensors[value]
    )


def _dict_of_tensor(device: torch.device) -> tuple[Function, Change]:
    weight = _weight(device, factors={"k": 1.0})
    return _item(weight.factors, lambda: weight.factors["k"], "k")


def _object_of_tensor(device: torch.device) -> tuple[Function, Change]:
    weight = _weight(device, config=SimpleNamespace(factor=1.0))
    return lambda x: x * weight.config.factor, partial(setattr, weight.config, "factor")


TENSORS: dict[str, Way] = {
    "tensor": _of_tensor,
    "parameter of a module": _of_parameter_in_module,
    "new one": _new_on_one_of_many,
    "tensor of a tensor": _tensor_of_tensor,
    "dict of a tensor": _dict_of_tensor,
    "object of a tensor": _object_of_tensor,
}


@pytest.mark.parametrize("tensor", TENSORS)
@runs_on("unified_ranks")
def test_attributes_of_tensors(comm: Any, tensor: str) -> None:
    """What a program gives to a tensor counts as an attribute of any object does."""
    _check(comm, TENSORS[tensor])


class Kept:
    """A descriptor that keeps the value itself."""

    value = 1.0

    def __get__(self, owner: Any, kind: Any = None) -> float:
        return self.value

    def __set__(self, owner: Any, value: float) -> None:
        self.value = value


class Keeping:
    factor = Kept()


@runs_on("unified_ranks")
def test_a_descriptor_that_keeps_a_value(comm: Any) -> None:
    """It is asked as an object, and its code does not run."""
    held = Keeping()
    _check(comm, lambda _: (lambda x: x * held.factor, partial(setattr, held, "factor")))


@runs_on("unified_ranks")
def test_an_attribute_of_an_argument(comm: Any) -> None:
    """It is a part of the key; where a graph has another tensor, the message says what to do."""
    x: Any = torch.ones(2, device=comm.device)
    captured = graph.capture(lambda x: x * x.factor, verify=False)
    for factor in (2.0, 2.0, 3.0, 2.0, 4.0):
        x.factor = factor
        if comm.device.type == "cpu":
            with raises(GraphError, "pass the value itself as an argument"):
                captured(x)
        else:
            assert_bits_equal(captured(x), x * factor, f"factor {factor}")


class Loss:
    def __init__(self) -> None:
        self.factor = 1.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by an attribute."""
        return x * self.factor


def _method(device: torch.device) -> tuple[Any, Change]:
    loss = Loss()
    return lambda: loss.scaled, partial(setattr, loss, "factor")


def _closure(device: torch.device) -> tuple[Any, Change]:
    held = [1.0]
    fn, change = _item(held, lambda: held[0])
    return lambda: fn, change


def _partial(device: torch.device) -> tuple[Any, Change]:
    loss = Loss()
    fn = partial(loss.scaled)
    return lambda: fn, partial(setattr, loss, "factor")


def _weight_of_module(device: torch.device) -> tuple[Any, Change]:
    scale = Scale()
    weights = {value: nn.Parameter(torch.full((2,), value, device=device)) for value in (1.0, 5.0)}
    return lambda: scale, lambda value: setattr(scale, "weight", weights[value])


def _class(device: torch.device) -> tuple[Any, Change]:
    return lambda: Derived.scale, partial(setattr, Base, "factor")


GIVEN = {
    "method": _method,
    "closure": _closure,
    "partial": _partial,
    "module": _weight_of_module,
    "class method": _class,
}


@pytest.mark.parametrize("given", GIVEN)
@runs_on("unified_ranks")
def test_functions_and_modules_as_arguments(comm: Any, given: str) -> None:
    """What is around an argument counts in calls with it, and in no others."""
    (first, change), (second, change_second) = (GIVEN[given](comm.device) for _ in range(2))
    change_second(1.0)
    captured = graph.capture(lambda x, fn: fn(x), verify=False)
    x = torch.ones(2, device=comm.device)
    for turn, value in enumerate((1.0, 1.0, 1.0, 5.0, 5.0, 1.0)):
        change(value)
        for fn in (first(), second()):
            with torch.no_grad():
                assert_bits_equal(captured(x + turn, fn), fn(x + turn), f"call {turn}")
    assert len(captured.entries) <= 3, "a call was captured again and again"


@runs_on("unified_ranks")
def test_ever_new_functions_as_arguments(comm: Any) -> None:
    """No more of them are known than some multiple of the graphs."""
    captured = graph.capture(lambda x, fn: fn(x), verify=False, max_graphs=2)
    x, weight = torch.ones(2, device=comm.device), torch.ones(2, device=comm.device)
    alive = []
    for turn in range(12):
        fresh = Fresh(weight, turn)
        fn = fresh.scaled
        alive.append(weakref.ref(fresh))
        assert_bits_equal(captured(x, fn), fn(x), f"call {turn}")
    del fn, fresh
    gc.collect()
    assert sum(held() is not None for held in alive) <= 4, "functions of earlier calls are held"


class Fresh:
    def __init__(self, weight: torch.Tensor, number: int) -> None:
        self.weight, self.number = weight, number

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Scale by an attribute."""
        return x * self.weight * self.number
