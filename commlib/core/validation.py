"""What a call is refused for on its own rank, before anything is launched."""

from collections.abc import Iterable

import torch

from commlib.core.ring import Ring
from commlib.core.tensors import NO_DISPATCH, fault, has_memory, output_fault
from commlib.errors import ArgumentError, DeviceError, DtypeError, PeerError, ShapeError

Tensor = torch.Tensor


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two indices of ``tensor`` may lie at one address."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def check_tensor(ctx: Ring, verb: str, role: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not on the ring's device, or whose values can't be read."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"{ctx.where(verb)}: {role} is {type(tensor).__name__}; expected a torch.Tensor"
        )
    if tensor.device != ctx.device:
        raise DeviceError(
            f"{ctx.where(verb)}: {role} is on {tensor.device}, the ring is on {ctx.device}; "
            f"type {role}.to('{ctx.device}')"
        )
    check_readable(ctx, verb, role, tensor)


def check_readable(ctx: Ring, verb: str, role: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values neither an engine nor a registered op can read."""
    if has_memory(tensor):
        return
    found = fault(tensor, role)
    if found is not None:
        what, remedy = found
        raise DeviceError(
            f"{ctx.where(verb)}: {role} {what}; expected a torch.Tensor with torch.strided memory; "
            f"{remedy}"
        )


def check_out(ctx: Ring, verb: str, out: torch.Tensor) -> None:
    """Refuse an output that can't be written: overlapping itself, or tracked by autograd."""
    check_tensor(ctx, verb, "out", out)
    found = None if has_memory(out) else output_fault(out)
    if found is not None:
        what, remedy = found
        raise ArgumentError(f"{ctx.where(verb)}: out {what}, and can't be written; {remedy}")
    if not out.is_contiguous() and overlaps_itself(out):
        raise ArgumentError(
            f"{ctx.where(verb)}: out of shape {tuple(out.shape)} and strides {out.stride()} "
            f"overlaps itself, so that its values would depend on timing; type out.contiguous()"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{ctx.where(verb)}: out requires grad and would be overwritten behind autograd; "
            f"type out.detach(), or leave out= away"
        )


def check_pair(ctx: Ring, verb: str, out: Tensor, x: Tensor) -> bool:
    """Refuse what ``check_tensor`` and ``check_out`` refuse, and two dtypes.

    Returns True if both are known to be dense and to want no gradient, False if that is open.
    """
    number = ctx.device_number
    if _plain(out, number) and (out is x or _plain(x, number)) and out.dtype is x.dtype:
        return True
    check_tensor(ctx, verb, "x", x)
    check_out(ctx, verb, out)
    if out.dtype is not x.dtype:
        raise DtypeError(
            f"{ctx.where(verb)}: out is {out.dtype} and x is {x.dtype}; expected one dtype; "
            f"type x.to({out.dtype})"
        )
    return False


def check_dtype(ctx: Ring, verb: str, dtype: torch.dtype) -> None:
    """Refuse what is no dtype, such as its name."""
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(
            f"{ctx.where(verb)}: dtype={dtype!r}; expected a torch.dtype; type torch.float32"
        )


def _plain(tensor: Tensor, device_number: int) -> bool:
    """Return True if no check below can fail: the common case, in as few look-ups as possible."""
    try:
        return (  # has_memory, written out: a call of it would cost more than it asks
            (type(tensor) is Tensor or type(tensor).__torch_dispatch__ is NO_DISPATCH)
            and tensor.data_ptr() != 0
            and tensor.get_device() == device_number
            and not tensor.requires_grad
            and not tensor.is_nested
            and not tensor.is_quantized
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.is_conj()
        )
    except (AttributeError, RuntimeError):
        return False


def misfit(ctx: Ring, verb: str, out: Tensor, expected: float, rule: str) -> ShapeError:
    """The error of an output with the wrong number of elements."""
    return ShapeError(
        f"{ctx.where(verb)}: out of shape {tuple(out.shape)} has {out.numel()} elements; "
        f"expected {expected:g} ({rule})"
    )


def check_position(ctx: Ring, verb: str, role: str, position: int) -> None:
    """Refuse a root or peer that is no position in the ring."""
    if isinstance(position, bool) or not isinstance(position, int):
        raise PeerError(f"{ctx.where(verb)}: {role}={position!r}; expected an int")
    if not 0 <= position < ctx.size:
        raise PeerError(
            f"{ctx.where(verb)}: {role}={position} is outside the ring; expected a position "
            f"from 0 to {ctx.size - 1} (the ring's ranks are {list(ctx.ranks)})"
        )


def check_peer(ctx: Ring, verb: str, peer: int) -> None:
    """Refuse a peer outside the ring, and this rank itself."""
    check_position(ctx, verb, "peer", peer)
    if peer == ctx.rank:
        raise PeerError(
            f"{ctx.where(verb)}: peer={peer} is this rank itself; expected another position; "
            f"type out.copy_(x) for a local copy"
        )


def counts(
    ctx: Ring, verb: str, role: str, tensor: Tensor, splits: Iterable[int] | None
) -> list[int]:
    """Return the elements for each peer, from the rows for each peer along dim 0."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None:
        if rows % ctx.size:
            raise ShapeError(
                f"{ctx.where(verb)}: dim 0 of shape {tuple(tensor.shape)} does not divide by "
                f"the ring's size {ctx.size}; pad it or give {role}="
            )
        return [tensor.numel() // ctx.size] * ctx.size
    given = [int(count) for count in splits]
    if len(given) != ctx.size or min(given) < 0 or sum(given) != rows:
        raise ShapeError(
            f"{ctx.where(verb)}: {role}={given}; expected {ctx.size} counts >= 0 that add "
            f"up to the {rows} rows of shape {tuple(tensor.shape)}, they add up to {sum(given)}"
        )
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in given]
