"""The history of a tensor in autograd, also where torch refuses to name it.

That is so for a view that was made where autograd was off, once its base is written.
"""

from typing import Any

import torch


def node_of(tensor: torch.Tensor) -> Any:
    """Return the node that has made a tensor; None for a leaf, or where torch refuses."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def is_leaf(tensor: torch.Tensor) -> bool:
    """Return True for a leaf; False where torch refuses."""
    try:
        return tensor.is_leaf
    except RuntimeError:
        return False
