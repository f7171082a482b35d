"""Other tensors with the strides of one: copies of it, or tensors over its memory."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import Parameter

# Memory of the current device without torch's dispatcher; some builds of torch lack these.
_EMPTY = {
    kind: make
    for kind in ("cpu", "cuda")
    if (make := getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)) is not None
}


def maker(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Return a function that allocates tensors like this one in half of ``empty_like``'s time.

    It allocates on the current device, which in a backward is the device of the node.
    """
    make = _EMPTY.get(tensor.device.type)
    if make is None:
        return partial(torch.empty_like, tensor)
    like = torch.empty_like(tensor, device="meta")
    return partial(make, tuple(like.size()), like.stride(), like.dtype)


def is_packed(tensor: torch.Tensor) -> bool:
    """Return True if a clone has the same strides: no gaps, and no element twice."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of the same size and strides, as a leaf with the same ``requires_grad``.

    The copy of a conjugate or negative view is one too, and that of a ``Parameter``.
    """
    copy = tensor.detach()
    if copy.is_conj() or copy.is_neg():
        memory = copy_of(in_memory(copy))
        memory = memory.conj() if copy.is_conj() else memory
        copy = (torch._neg_view(memory) if copy.is_neg() else memory).detach()
    elif is_packed(copy):
        copy = copy.clone()
    else:
        copy = _span(copy).clone().as_strided(copy.size(), copy.stride(), 0)
        copy = copy.detach()  # no view to autograd: the node of a captured call may return it
    if issubclass(type(tensor), Parameter):  # detached, it is a plain tensor
        copy.__class__ = type(tensor)
    return copy.requires_grad_(tensor.requires_grad)


def in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return what is in the memory of a tensor: of a conjugate view, what it conjugates."""
    tensor = tensor.conj() if tensor.is_conj() else tensor
    return torch._neg_view(tensor) if tensor.is_neg() else tensor


def unowned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory whose storage is its own and owns nothing."""
    source = tensor.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(
        source.data_ptr(), source.device, source.nbytes()
    )
    geometry = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage, *geometry)


def repeats(tensor: torch.Tensor) -> bool:
    """Return True if one element of memory may be at several places of a strided tensor."""
    reach = 0
    for step, n in sorted(zip(tensor.stride(), tensor.size(), strict=True)):
        if n > 1 and step <= reach:
            return True
        reach += (n - 1) * step
    return False


def expanded_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions along which a tensor repeats its elements, as ``expand`` makes them."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    if 0 not in strides:
        return ()
    places = enumerate(zip(tensor.size(), strides, strict=True))
    return tuple(dim for dim, (n, stride) in places if stride == 0 and n > 1)


def unexpanded(tensor: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """Return the first elements along some dimensions, as a view of the same dimensions."""
    for dim in dims:
        tensor = tensor.narrow(dim, 0, 1)
    return tensor


def empty_repeated(like: torch.Tensor, *, device: str) -> torch.Tensor:
    """Return memory of the size of a tensor, with the elements repeated that it repeats."""
    first = unexpanded(like, expanded_dims(like))
    return torch.empty_like(first, device=device).expand(like.size())


def fill(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to one that repeats the same elements; returns that one."""
    dims = expanded_dims(target)
    unexpanded(target, dims).copy_(unexpanded(source, dims))
    return target


def dims_in_memory(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the dimensions that steps in memory tell apart, from the longest step to the shortest.

    A dimension of one element, or one that repeats its elements, is not among them.
    """
    size, stride = tensor.size(), tensor.stride()
    dims = [dim for dim, (n, step) in enumerate(zip(size, stride, strict=True)) if n > 1 and step]
    return tuple(sorted(dims, key=lambda dim: -stride[dim]))


def expanded_zeros(
    like: torch.Tensor, dims: Sequence[int], order: Sequence[int] | None
) -> torch.Tensor:
    """Return zeros of the size of a tensor.

    Args:
        like: The tensor.
        dims: Dimensions along which the zeros are repeated.
        order: The others with more than one element, as ``dims_in_memory`` has them. None: as they
            are in the tensor.
    """
    first = unexpanded(like.detach(), dims)
    if order is None:
        zeros = torch.zeros_like(first)
    else:
        axes = [*(dim for dim in range(first.dim()) if dim not in order), *order]
        packed = first.new_zeros([first.size(dim) for dim in axes])
        zeros = packed.permute([axes.index(dim) for dim in range(first.dim())])
    return zeros.expand(like.size()) if dims else zeros


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor that can be written to: each element is in it once."""
    pairs = sorted(zip(tensor.stride(), tensor.size(), strict=True))
    span = 0  # elements from the first to the last of the dimensions so far
    for stride, count in pairs:
        if stride and count > 1:
            if stride <= span:
                return _span(tensor)  # overlapping windows
            span += (count - 1) * stride
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
