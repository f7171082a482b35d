"""`torch.nn.functional.one_hot` on a CPU, where torch reads the largest class to check it.

While a run is observed, an operator that checks each class itself creates the same tensor.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from commlib.core import observers
from commlib.graph.operators.exchange import Exchange


def _scattered(name: str, one_hot: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(one_hot)
    def scattered(tensor: torch.Tensor, num_classes: int = -1) -> Any:
        observed = observers.observers and observers.refusing()
        if not observed or num_classes < 1 or not tensor.numel() or tensor.device.type != "cpu":
            return one_hot(tensor, num_classes)
        zeros = torch.zeros(*tensor.shape, num_classes, dtype=tensor.dtype)
        return zeros.scatter_(-1, tensor.unsqueeze(-1), 1)

    return scattered


checking_each = Exchange([(torch.nn.functional, "one_hot"), (torch._C._nn, "one_hot")], _scattered)
