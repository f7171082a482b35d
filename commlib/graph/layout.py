"""Copies of tensors with the strides that they have, whatever these are."""

from collections.abc import Callable
from functools import partial

import torch

# Memory of the current device without torch's dispatcher; some builds of torch lack these.
_EMPTY = {
    kind: make
    for kind in ("cpu", "cuda")
    if (make := getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)) is not None
}


def maker(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return what makes tensors like this one, without content, in half of ``empty_like``'s time.

    They lie on the current device: in a backward that is the device of its node.
    """
    make = _EMPTY.get(tensor.device.type)
    if make is None:
        return partial(torch.empty_like, tensor)
    like = torch.empty_like(tensor, device="meta")
    return partial(make, tuple(like.size()), like.stride(), like.dtype)


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether a clone has the same strides: no gaps, and no element twice."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same size and strides, as a leaf that wants a gradient as it does."""
    own = tensor.detach()
    if is_packed(own):
        own = own.clone()
    else:
        own = _span(own).clone().as_strided(own.size(), own.stride(), 0)
    return own.requires_grad_(tensor.requires_grad)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a tensor as one that can be written to: each of them once."""
    pairs = sorted(zip(tensor.stride(), tensor.size(), strict=True))
    behind = 0  # elements from the first to the last of the dimensions so far
    for stride, count in pairs:
        if stride and count > 1:
            if stride <= behind:
                return _span(tensor)  # windows that slide over each other
            behind += (count - 1) * stride
    size = [
        1 if stride == 0 else n for stride, n in zip(tensor.stride(), tensor.size(), strict=True)
    ]
    return tensor.as_strided(size, tensor.stride(), tensor.storage_offset())


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """Return all memory from the first to the last element."""
    if tensor.numel() == 0:
        return tensor.as_strided((0,), (1,), tensor.storage_offset())
    last = sum((n - 1) * stride for n, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,), tensor.storage_offset())
