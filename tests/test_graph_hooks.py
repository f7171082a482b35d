"""Settings in hooks: their closures, globals and objects, and hooks that come and go."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from torch.optim import optimizer as torch_optimizers
from torch.utils.hooks import RemovableHandle

from commlib import graph
from commlib.graph.surroundings import hooks
from commlib.graph.surroundings.modules import ModuleWatch
from tests.support.checks import assert_bits_equal, assert_equal

VALUES = (1.0, 1.0, 1.0, 3.0, 3.0, 1.0)
FACTOR = 1.0

Hook = Callable[[torch.Tensor], torch.Tensor]


class Scaling:
    """An object with hooks."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    def multiple(self, x: torch.Tensor) -> torch.Tensor:
        """Return a multiple."""
        return x * self.scale


def closure() -> tuple[Hook, Callable[[float], None]]:
    """A variable of the hook's closure."""
    scale = 1.0

    def change(value: float) -> None:
        nonlocal scale
        scale = value

    return lambda x: x * scale, change


def of_module() -> tuple[Hook, Callable[[float], None]]:
    """A global variable."""
    return lambda x: x * FACTOR, lambda value: globals().__setitem__("FACTOR", value)


def callable_object() -> tuple[Hook, Callable[[float], None]]:
    """An attribute of the hook itself."""
    hook = Scaling()
    return hook, lambda value: setattr(hook, "scale", value)


def method() -> tuple[Hook, Callable[[float], None]]:
    """An attribute of the object whose method is the hook."""
    holder = Scaling()
    return holder.multiple, lambda value: setattr(holder, "scale", value)


def bound() -> tuple[Hook, Callable[[float], None]]:
    """An attribute of an argument that is bound to the hook."""
    config = SimpleNamespace(scale=1.0)
    hook = functools.partial(lambda config, x: x * config.scale, config)
    return hook, lambda value: setattr(config, "scale", value)


SETTINGS = (closure, of_module, callable_object, method, bound)


def _eye() -> Any:
    module = nn.Linear(2, 2, bias=False)
    nn.init.eye_(module.weight)
    return module


def forward(hook: Hook) -> tuple[Any, Any]:
    """After the forward of a module."""
    module = _eye()
    return module, module.register_forward_hook(lambda _, args, out: hook(out))


def forward_of_a_part(hook: Hook) -> tuple[Any, Any]:
    """Before the forward of a part of a module in a function's closure."""
    module = nn.Sequential(_eye(), nn.Identity())
    handle = module[1].register_forward_pre_hook(lambda _, args: (hook(args[0]),))
    return (lambda x: module(x)), handle


def forward_of_all(hook: Hook) -> tuple[Any, Any]:
    """After the forward of all modules."""
    handle = torch_modules.register_module_forward_hook(lambda _, args, out: hook(out))
    return _eye(), handle


def backward(hook: Hook) -> tuple[Any, Any]:
    """In a backward inside the function."""
    module = _eye()
    handle = module.register_full_backward_hook(lambda _, grads, of_out: (hook(grads[0]),))

    def f(x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        module(x).sum().backward()
        return x.grad

    return f, handle


def of_tensor(hook: Hook) -> tuple[Any, Any]:
    """When autograd has the gradient of a parameter."""
    p = nn.Parameter(torch.ones(2))
    handle = p.register_hook(lambda grad: hook(grad))

    def f(x: torch.Tensor) -> Any:
        p.grad = None
        (p * x).sum().backward()
        return p.grad.clone() if p.grad is not None else None

    return f, handle


def _step(p: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    def f(x: torch.Tensor) -> Any:
        with torch.no_grad():
            p.zero_()
            p.grad.fill_(1.0) if p.grad is not None else None
            optimizer.step()
        return p.detach() * -x

    return f


def of_optimizer(hook: Hook) -> tuple[Any, Any]:
    """Before the step of an optimizer."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=1.0)

    def before(*_: Any) -> None:
        p.grad = hook(p.grad) if p.grad is not None else None

    return _step(p, optimizer), optimizer.register_step_pre_hook(before)


def of_all_optimizers(hook: Hook) -> tuple[Any, Any]:
    """After the step of all optimizers."""
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)

    def after(*_: Any) -> None:
        with torch.no_grad():
            p.copy_(hook(p))

    handle = torch_optimizers.register_optimizer_step_post_hook(after)
    return _step(p, torch.optim.SGD([p], lr=1.0)), handle


PLACES = (
    *(forward, forward_of_a_part, forward_of_all, backward, of_tensor),
    *(of_optimizer, of_all_optimizers),
)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_hooks(place: Any, setting: Any) -> None:
    hook, change = setting()
    fn, handle = place(hook)
    try:
        g = graph.capture(fn, outputs="copy", verify=False)
        for turn, value in enumerate(VALUES):
            change(value)
            assert_bits_equal(g(torch.ones(2)), torch.full((2,), value), f"turn {turn}")
    finally:
        handle.remove()
        change(1.0)
    assert_equal(g.entries.replays >= 3, True, f"replays: {g}")


@pytest.mark.parametrize("place", PLACES)
def test_hooks_that_go(place: Any) -> None:
    """The next call runs without the hook, and is captured again."""
    fn, handle = place(lambda x: x * 3)
    try:
        g = graph.capture(fn, outputs="copy", verify=False)
        for _ in range(3):
            assert_bits_equal(g(torch.ones(2)), torch.full((2,), 3.0))
    finally:
        handle.remove()
    for _ in range(3):
        assert_bits_equal(g(torch.ones(2)), torch.ones(2))


def test_hooks_of_optimizers_that_come() -> None:
    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    optimizer = torch.optim.SGD([p], lr=1.0)
    g = graph.capture(_step(p, optimizer), outputs="copy", verify=False)
    for turn in range(6):
        if turn == 3:
            optimizer.register_step_post_hook(lambda *_: p.data.mul_(3))
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), 1.0 if turn < 3 else 3.0))


def test_attributes_of_an_optimizer_of_the_program() -> None:
    class Scaled(torch.optim.SGD):
        scale = 1.0

        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-self.scale)

    p = nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    optimizer = Scaled([p], lr=1.0)
    optimizer.scale = 1.0
    g = graph.capture(_step(p, optimizer), outputs="copy", verify=False)
    for turn, value in enumerate(VALUES):
        optimizer.scale = value
        assert_bits_equal(g(torch.ones(2)), torch.full((2,), value), f"turn {turn}")


def test_hooks_that_replace_others() -> None:
    """Between two calls one hook goes and another one comes."""
    module: Any = nn.Identity()
    g = graph.capture(lambda x: module(x) + 0, outputs="copy", verify=False)
    for factor in (1.0, 3.0):
        handle = module.register_forward_hook(lambda _, args, out, by=factor: out * by)
        for _ in range(3):
            assert_bits_equal(g(torch.ones(2)), torch.full((2,), factor))
        handle.remove()


@pytest.mark.parametrize("first", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_second_kind_of_hook(first: str) -> None:
    """A tensor that has hooks of one kind gets one of the other kind."""
    p: Any = nn.Parameter(torch.zeros(2))
    second = {"register_hook", "register_post_accumulate_grad_hook"} - {first}

    def step(x: torch.Tensor) -> None:
        p.grad = None
        (p * x).sum().backward()

    def times(factor: float) -> Any:
        def hook(x: torch.Tensor) -> Any:
            if x is p:  # it is called after the accumulation
                assert p.grad is not None
                p.grad.mul_(factor)
                return None
            return x * factor

        return hook

    getattr(p, first)(times(3.0))
    g = graph.capture(step, verify=False)
    for turn in range(6):
        if turn == 3:
            getattr(p, second.pop())(times(5.0))
        g(torch.ones(2))
        assert_bits_equal(p.grad, torch.full((2,), 3.0 if turn < 3 else 15.0), f"turn {turn}")


def test_a_call_while_another_thread_adds_a_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes between the number of the hook and the hook, as torch stores them."""
    now = [100.0]
    monkeypatch.setattr(hooks, "monotonic", lambda: now[0])
    module: Any = nn.Identity()
    g = graph.capture(lambda x: module(x) + 0, outputs="copy", verify=False)
    for _ in range(4):
        assert_bits_equal(g(torch.ones(2)), torch.ones(2))
        now[0] += 2.0
    handle = RemovableHandle(module._forward_hooks)
    assert_bits_equal(g(torch.ones(2)), torch.ones(2))
    module._forward_hooks[handle.id] = lambda _, args, out: out * 3
    assert_bits_equal(g(torch.ones(2)), torch.full((2,), 3.0))


def test_hooks_of_other_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook on a tensor of each step costs no look at all modules."""
    module: Any = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    g = graph.capture(lambda x: module(x) * 2, outputs="copy", verify=False)
    with torch.no_grad():
        for _ in range(3):
            g(torch.ones(2))
        looks: list[int] = []
        plain = ModuleWatch.look

        def look(self: ModuleWatch) -> Any:
            looks.append(1)
            return plain(self)

        monkeypatch.setattr(ModuleWatch, "look", look)
        for _ in range(5):
            torch.ones(2, requires_grad=True).register_hook(lambda grad: grad)
            g(torch.ones(2))
        assert_equal(len(looks), 0, "looks")
        module[1].register_forward_hook(lambda _, args, out: out * 3)
        assert_bits_equal(g(torch.ones(2)), module[0](torch.ones(2)) * 3 * 2)
