"""Layers that are called one after the other, as one module."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from commlib.errors import GraphError

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

    def forward(self, *args: Any) -> Any:
        """Call the first layer with the arguments, and each later one with the last result."""
        for layer in self._layers:
            args = (layer(*args),)
        return args[0]


def checked(layers: Sequence[Layer]) -> list[Layer]:
    """Return the layers. Raises ``GraphError`` where one can't be called."""
    if isinstance(layers, torch.nn.Module) and not isinstance(layers, torch.nn.ModuleList):
        layers = [*layers.children()] if isinstance(layers, torch.nn.Sequential) else [layers]
    found = [*layers]
    if not found:
        raise GraphError("pipeline([]): expected one layer or more")
    for i, layer in enumerate(found):
        if isinstance(layer, type) or not callable(layer):
            raise GraphError(
                f"pipeline: layer {i} is {layer!r}; expected a module or a function, so pass an "
                f"object that can be called"
            )
    return found
