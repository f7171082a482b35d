"""Kinds of tensors: which have memory that an engine can read, and what to do about the others."""

import sys
from collections.abc import Callable
from typing import Any

import torch

Tensor = torch.Tensor

# A subclass that does not override it is an ordinary tensor to torch's dispatcher.
NO_DISPATCH = Tensor.__torch_dispatch__
_FUNCTIONAL = ("torch._subclasses.functional_tensor", "FunctionalTensor")
_FAKE = ("torch._subclasses.fake_tensor", "FakeTensor")
_PENDING = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def has_memory(tensor: Tensor) -> bool:
    """Return True if ``data_ptr()`` is the address of the tensor's values, strided and dense.

    False for wrapper subclasses, fake, functorch, zero, nested, sparse and quantized tensors, for
    freed storages, and for what is not a tensor. No engine and no kernel reads a tensor for which
    this is False.
    """
    try:
        kind = type(tensor)
        return (
            (kind is Tensor or kind.__torch_dispatch__ is NO_DISPATCH)
            and (tensor.data_ptr() != 0 or (not tensor.numel() and not tensor.is_meta))
            and not tensor.is_nested
            and not tensor.is_quantized
        )
    except (AttributeError, RuntimeError):  # not a tensor; a tensor without a storage
        return False


def is_wrapper(tensor: Tensor) -> bool:
    """Return True for one that handles operators itself, on tensors that it holds (DTensor)."""
    return type(tensor).__torch_dispatch__ is not NO_DISPATCH


def parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that hold the values: the tensor, or those inside of a wrapper (DTensor).

    A wrapper that does not report its contents has none.
    """
    if not is_wrapper(tensor):
        return [tensor]
    flatten = getattr(tensor, "__tensor_flatten__", None)
    if flatten is None:
        return []
    held = (getattr(tensor, name) for name in flatten()[0])
    return [part for one in held if isinstance(one, Tensor) for part in parts(one)]


def rebuilt(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a tensor with each of its ``parts`` changed."""
    if not is_wrapper(tensor):
        return change(tensor)
    wrapper: Any = tensor
    names, context = wrapper.__tensor_flatten__()
    held = {name: getattr(tensor, name) for name in names}
    held = {k: rebuilt(x, change) if isinstance(x, Tensor) else x for k, x in held.items()}
    return wrapper.__tensor_unflatten__(held, context, tensor.size(), tensor.stride())


def is_dense(tensor: Tensor) -> bool:
    """Return True if the bytes from ``data_ptr()`` on are the values in order."""
    return (
        has_memory(tensor)
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def dense_copy(tensor: Tensor) -> Tensor:
    """Return the values in new memory: waits for a pending tensor, fills in zeros and lazy bits."""
    new = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return new.copy_(tensor)


def is_symbolic(tensor: Tensor) -> bool:
    """Return True if the tensor represents values that a trace or a functorch transform handles."""
    return (
        isinstance(tensor, (_loaded(_FAKE), _loaded(_FUNCTIONAL)))
        or _is_wrapped(tensor)
        or torch._is_functional_tensor(tensor)
    )


def is_pending(tensor: Tensor) -> bool:
    """Return True for the result of a functional collective that has not been waited for."""
    return isinstance(tensor, _loaded(_PENDING))


def fault(tensor: Tensor, role: str) -> tuple[str, str] | None:
    """Return the defect of an unreadable input and a remedy; None for a readable one.

    Symbolic, pending and zero tensors can: a registered op or a copy resolves them.
    """
    kind = type(tensor)
    if tensor.is_quantized:
        return "is quantized", f"call {role}.dequantize()"
    if tensor.is_nested and tensor.layout is torch.strided:
        return "is a nested tensor", f"pass torch.nested.to_padded_tensor({role}, 0.0)"
    if tensor.is_nested:
        return f"is a nested tensor ({tensor.layout})", f"pass {role}.values()"
    if kind.__torch_dispatch__ is NO_DISPATCH:
        if _is_wrapped(tensor) or torch._is_functional_tensor(tensor):  # else not ``is_symbolic``
            return None
    elif is_symbolic(tensor) or is_pending(tensor):
        return None
    else:
        if hasattr(tensor, "to_local"):
            return f"is a {kind.__name__}", f"pass {role}.to_local()"
        rule = "pass the tensors that it holds, one call per tensor"
        return f"is a {kind.__name__}, a wrapper without its own memory", rule
    if tensor.layout is not torch.strided:
        return f"is {tensor.layout}", f"call {role}.to_dense()"
    if tensor.numel() and not tensor._is_zerotensor() and not tensor.data_ptr():
        if tensor.is_meta:
            return "is on the meta device, without values", f"pass {role} on another device"
        return "has no memory: its storage was freed", f"fill {role} again before the call"
    return None


def output_fault(tensor: Tensor) -> tuple[str, str] | None:
    """Return why nothing can be written to ``out`` and a remedy; None if it can be written."""
    if is_pending(tensor):
        return "is the pending result of another collective", "pass out.wait()"
    if tensor._is_zerotensor():
        return "is a ZeroTensor, which has no memory", "pass torch.zeros(out.shape)"
    return None


def _loaded(name: tuple[str, str]) -> Any:
    """Return a class that only exists if its module was imported, else nothing for isinstance."""
    return getattr(sys.modules.get(name[0]), name[1], ())
