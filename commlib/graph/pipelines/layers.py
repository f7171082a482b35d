"""Layers that are called one after the other, as one module."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from commlib.errors import GraphError
from commlib.graph.recording.eager_parts import eager, is_eager

Layer = Callable[..., Any]


class Layers(torch.nn.Module):
    """Modules and functions in a row; names in the state dict are those of ``Sequential``."""

    def __init__(self, layers: Sequence[Layer], *, name: str = "") -> None:
        """``name``: that of the module in reports of captured functions."""
        super().__init__()
        if name:
            vars(self)["__qualname__"] = name
        self._layers = checked(layers)
        for i, layer in enumerate(self._layers):
            module = layer.__wrapped__ if hasattr(layer, "__wrapped__") else layer
            if isinstance(module, torch.nn.Module):
                self.add_module(str(i), module)
        self._called = dict(self._modules)

    def forward(self, *args: Any) -> Any:
        """Call the first layer with the arguments, and each later one with the last result."""
        self._check_children()
        for layer in self._layers:
            args = (layer(*args),)
        return args[0]

    def _check_children(self) -> None:
        """Raise ``GraphError`` if a layer was replaced: what is called would be the old one."""
        for name, module in self._called.items():
            if self._modules.get(name) is not module:
                raise GraphError(
                    f"pipeline: layer {name} was replaced by {self._modules.get(name)!r:.60}; make "
                    f"a new pipeline of the layers"
                )


class EagerLayer:
    """A module that was marked with ``eager``; unlike a function, it is copied with its module."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.__wrapped__ = module
        self._outside = eager(module)

    def __call__(self, *args: Any) -> Any:
        """Call the module outside any graph."""
        return self._outside(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return EagerLayer, (self.__wrapped__,)


def checked(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers. Raises ``GraphError`` where one can't be called."""
    if isinstance(layers, torch.nn.Module) and not isinstance(layers, torch.nn.ModuleList):
        layers = [*layers.children()] if isinstance(layers, torch.nn.Sequential) else [layers]
    if not isinstance(layers, Iterable):
        raise GraphError(f"pipeline({layers!r:.60}): expected a list of modules or functions")
    layer_list = [*layers]
    if not layer_list:
        raise GraphError("pipeline([]): expected one layer or more")
    for i, layer in enumerate(layer_list):
        if isinstance(layer, type) or not callable(layer):
            raise GraphError(
                f"pipeline: layer {i} is {layer!r}; expected a module or a function, so pass an "
                f"object that can be called"
            )
    return [_copyable(layer) for layer in layer_list]


def _copyable(layer: Layer) -> Layer:
    marked = getattr(layer, "__wrapped__", None)
    return EagerLayer(marked) if is_eager(layer) and isinstance(marked, torch.nn.Module) else layer
