"""Code with static inputs, such as parameters: captured once per set of them, and never copied."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from commlib.core.tensors import parts
from commlib.errors import GraphError
from commlib.graph.calls.tensor_addresses import layout_guards
from commlib.graph.captured_function import CapturedFunction
from commlib.graph.options import Options
from commlib.graph.watching.runs import inside
from commlib.log import log

_OFTEN = 8  # times that all sets of static inputs may be replaced


class StaticInputs:
    """A function of flat arguments, some of which stay where they are from call to call.

    The captured function uses static inputs without receiving them, so its graphs read them where
    they are. Other static inputs get other graphs: those of the next layer that shares the compiled
    code, or a parameter that replaces another.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        static: Sequence[int],
        examples: Sequence[Any],
        name: str,
        options: Options,
        module: torch.nn.Module | None = None,
    ) -> None:
        """Store the function.

        Args:
            fn: The function.
            static: The positions of static inputs. None is if all tensors are: the tensors that the
                captured function receives determine its device.
            examples: Examples of all inputs.
            name: What it is called in reports.
            options: How it is captured.
            module: A module whose parameters, buffers and parts the function uses, if any.
        """
        self._module = module
        self._fn, self._name, self._options = fn, name, options
        tensors = {i for i, x in enumerate(examples) if isinstance(x, torch.Tensor)}
        stay = tensors.intersection(static)
        self._static = sorted(stay) if stay < tensors else []
        self._others = [i for i in range(len(examples)) if i not in set(self._static)]
        self._sets: dict[tuple[Any, ...], CapturedFunction[..., Any]] = {}
        self._last: CapturedFunction[..., Any] | None = None  # the one of the last call
        self._replaced = 0  # sets whose inputs the program has released or moved
        self._most = 1  # sets at the same time

    def __call__(self, *args: Any) -> Any:
        """Replay the call, or capture it first."""
        count = len(self._static) + len(self._others)
        if len(args) != count:
            raise GraphError(f"{self._name}: {len(args)} arguments; expected {count}")
        if inside() or self._replaced > _OFTEN * self._most:
            return self._fn(*args)
        static = [args[i] for i in self._static]
        if self._last is None or not _with_static(self._last).is_of(static):
            self._last = self._of(static)
        return self._last(*[args[i] for i in self._others])

    def _of(self, static: Sequence[torch.Tensor]) -> CapturedFunction[..., Any]:
        """Return the captured function of these static inputs."""
        key = (*map(id, static), *map(_kind, static))
        captured = self._sets.get(key)
        if captured is None or _with_static(captured).gone:
            captured = self._add(key, static)
        return captured

    def _add(
        self, key: tuple[Any, ...], static: Sequence[torch.Tensor]
    ) -> CapturedFunction[..., Any]:
        """Return a captured function of other static inputs; the graphs of replaced ones go."""
        for old, captured in list(self._sets.items()):
            if _with_static(captured).is_replaced():
                del self._sets[old]
                captured.reset()
                self._replaced += 1
        if self._replaced > _OFTEN * self._most:
            log.warning(
                "%s stays eager: its static inputs are replaced by others again and again; write "
                "into their memory instead (copy_)",
                self._name,
            )
        fn = _WithStatic(self._fn, self._name, static, self._static, self._others)
        self._sets[key] = CapturedFunction(_around(fn, self._module), self._options)
        self._most = max(self._most, len(self._sets))
        return self._sets[key]

    @property
    def captured(self) -> list[CapturedFunction[..., Any]]:
        """Return the captured functions, one per set."""
        return [*self._sets.values()]

    def reset(self) -> None:
        """Release every graph; the next calls capture again."""
        for captured in self._sets.values():
            captured.reset()
        self._sets.clear()
        self._last = None
        self._replaced = 0


class _WithStatic:
    """The function with one set of static inputs.

    Attributes:
        gone: Whether the program has released one of them.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        static: Sequence[torch.Tensor],
        places: Sequence[int],
        others: Sequence[int],
    ) -> None:
        """``places``, ``others``: the positions of static inputs and of all others."""
        self.gone = False
        self.__name__ = self.__qualname__ = name
        self._fn, self._places, self._others = fn, places, others
        self._static = [weakref.ref(x, self._note) for x in static]
        self._addresses = [*map(_address, static)]
        self._ids, self._guards = [*map(id, static)], layout_guards(static)

    def is_of(self, static: Sequence[torch.Tensor]) -> bool:
        """Return True if they are the same tensors, unchanged; False also where that takes long."""
        return (
            not self.gone
            and self._ids == [*map(id, static)]
            and self._guards is not None
            and self._guards.check(*static)
            and self._addresses == [x.data_ptr() for x in static]
        )

    def _note(self, _: object) -> None:
        self.gone = True

    def is_replaced(self) -> bool:
        """Return True if one of them was released, or has other memory now (``p.data = ...``)."""
        now = [reference() for reference in self._static]
        return self.gone or [_address(x) for x in now if x is not None] != self._addresses

    def __call__(self, *args: Any, module: torch.nn.Module | None = None) -> Any:
        """Call the function with all inputs; ``module`` is what it uses in addition."""
        values: list[Any] = [None] * (len(self._places) + len(self._others))
        for i, reference in zip(self._places, self._static, strict=True):
            values[i] = reference()
        for i, value in zip(self._others, args, strict=True):
            values[i] = value
        return self._fn(*values)


def _around(fn: _WithStatic, module: torch.nn.Module | None) -> Callable[..., Any]:
    """Return a function through which a capture reaches a module and watches its changes."""
    if module is None:
        return fn
    result = partial(fn, module=module)
    vars(result).update(__name__=fn.__name__, __qualname__=fn.__qualname__)
    return result


def _with_static(captured: CapturedFunction[..., Any]) -> _WithStatic:
    fn: Any = captured.fn
    fn = fn.func if isinstance(fn, partial) else fn
    assert isinstance(fn, _WithStatic)
    return fn


def _kind(x: torch.Tensor) -> tuple[Any, ...]:
    """Return what tells one static input from another, or from itself as it was."""
    layout = x.stride() if x.layout is torch.strided else x.layout
    return _address(x), x.shape, layout, x.dtype, x.requires_grad


def _address(x: torch.Tensor) -> int:
    inner = parts(x)
    return inner[0].data_ptr() if len(inner) == 1 else hash(tuple(y.data_ptr() for y in inner))
