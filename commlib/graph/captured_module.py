"""A captured module: a module itself, with the parameters, parts and state of the one it has."""

from typing import Any

import torch

from commlib.graph.captured_function import CapturedFunction
from commlib.graph.options import Options


class CapturedModule(CapturedFunction[..., Any], torch.nn.Module):
    """A captured module in the place of the module: ``model.part = capture(model.part)``.

    Attributes that are not the captured function's own are the module's, to be read and to be set.
    So the names in ``state_dict()`` stay as they are.
    """

    def __init__(self, module: torch.nn.Module, options: Options) -> None:
        object.__setattr__(self, "_own", None)  # what is set from here on is this object's
        CapturedFunction.__init__(self, module, options)
        object.__setattr__(self, "_own", frozenset(vars(self)))

    def __getattr__(self, name: str) -> Any:
        if name in ("fn", "_own"):  # not there yet
            raise AttributeError(name)
        return getattr(self.fn, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own_names = self.__dict__["_own"]
        if own_names is None or name in own_names:
            object.__setattr__(self, name, value)
        else:
            setattr(self.fn, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.fn, name)

    def __repr__(self) -> str:
        return CapturedFunction.__repr__(self)

    __call__ = CapturedFunction.__call__
