"""Validation of a call on its own rank, before anything is launched."""

import sys
from collections.abc import Iterable
from operator import index
from typing import Any

import torch

from commlib.core.dispatch import is_plain
from commlib.core.ring import Ring
from commlib.core.tensors import fault, has_memory, output_fault
from commlib.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    LayoutError,
    PeerError,
    ShapeError,
)
from commlib.rendezvous.host_exchange import USER_TAGS

Tensor = torch.Tensor
NOT_GIVEN: Any = object()  # the default of an argument for which None has a meaning


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Return True if two indices of ``tensor`` may share one address."""
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += stride * (size - 1)
    return False


def check_tensor(ring: Ring, collective: str, role: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not on the ring's device, or whose values can't be read."""
    if not isinstance(tensor, torch.Tensor):
        raise ArgumentError(
            f"{ring._describe(collective)}: {role} is {type(tensor).__name__}; expected a "
            f"torch.Tensor"
        )
    if tensor.device != ring.device:
        raise DeviceError(
            f"{ring._describe(collective)}: {role} is on {tensor.device}, the ring is on "
            f"{ring.device}; call {role}.to('{ring.device}')"
        )
    check_readable(ring, collective, role, tensor)


def check_readable(ring: Ring, collective: str, role: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor whose values neither an engine nor a registered op can read."""
    if not has_memory(tensor):
        refuse_unreadable(ring._describe(collective), role, tensor)


def refuse_unreadable(prefix: str, role: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor without memory, unless a registered op can read it."""
    details = fault(tensor, role)
    if details is not None:
        problem, remedy = details
        kind = DeviceError if tensor.layout is torch.strided else LayoutError
        raise kind(
            f"{prefix}: {role} {problem}; expected a torch.Tensor with torch.strided memory; "
            f"{remedy}"
        )


def check_out(ring: Ring, collective: str, out: torch.Tensor, *, may_overlap: bool = False) -> None:
    """Refuse an output that can't be written: overlapping itself, or tracked by autograd."""
    check_tensor(ring, collective, "out", out)
    details = None if has_memory(out) else output_fault(out)
    if details is not None:
        problem, remedy = details
        raise ArgumentError(
            f"{ring._describe(collective)}: out {problem}, and can't be written; {remedy}"
        )
    if not may_overlap and not out.is_contiguous() and overlaps_itself(out):
        raise ArgumentError(
            f"{ring._describe(collective)}: out of shape {tuple(out.shape)} and strides "
            f"{out.stride()} "
            f"overlaps itself, so that its values would depend on timing; call out.contiguous()"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            f"{ring._describe(collective)}: out requires grad and would be overwritten without "
            f"autograd's knowledge; call out.detach(), or leave out= away"
        )


def check_inference(ring: Ring, collective: str, role: str, out: Tensor) -> None:
    """Refuse an output that torch would not let an engine copy to."""
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(
            f"{ring._describe(collective)}: {role} is an inference tensor, which torch copies to "
            f"in inference mode only; make the call under torch.inference_mode(), or pass "
            f"{role}.clone()"
        )


def check_pair(
    ring: Ring, collective: str, out: Tensor, x: Tensor, *, may_overlap: bool = False
) -> None:
    """Refuse what ``check_tensor`` and ``check_out`` refuse, and two dtypes."""
    check_tensor(ring, collective, "x", x)
    check_out(ring, collective, out, may_overlap=may_overlap)
    if out is not x:
        check_inference(ring, collective, "out", out)
    if out.dtype is not x.dtype:
        raise DtypeError(
            f"{ring._describe(collective)}: out is {out.dtype} and x is {x.dtype}; expected one "
            f"dtype; call x.to({out.dtype})"
        )


def check_dtype(ring: Ring, collective: str, dtype: torch.dtype) -> None:
    """Refuse what is not a torch.dtype, such as its name."""
    if not isinstance(dtype, torch.dtype):
        raise ArgumentError(
            f"{ring._describe(collective)}: dtype={dtype!r}; expected a torch.dtype; pass "
            f"torch.float32"
        )


def shape_mismatch(
    ring: Ring, collective: str, out: Tensor, expected: float, rule: str
) -> ShapeError:
    """Return the error of an output with the wrong number of elements."""
    return ShapeError(
        f"{ring._describe(collective)}: out of shape {tuple(out.shape)} has {out.numel()} "
        f"elements; expected {expected:g} ({rule})"
    )


def check_position(ring: Ring, collective: str, role: str, position: int) -> None:
    """Refuse a root or peer that is not a position in the ring."""
    if isinstance(position, bool) or not isinstance(position, int):
        raise PeerError(f"{ring._describe(collective)}: {role}={position!r}; expected an int")
    if not 0 <= position < ring.size:
        raise PeerError(
            f"{ring._describe(collective)}: {role}={position} is outside the ring; expected a "
            f"position from 0 to {ring.size - 1} (the ring's ranks are {list(ring.ranks)})"
        )


def check_peer(ring: Ring, collective: str, peer: int) -> None:
    """Refuse a peer outside the ring, and this rank itself."""
    check_position(ring, collective, "peer", peer)
    if peer == ring.rank:
        raise PeerError(
            f"{ring._describe(collective)}: peer={peer} is this rank itself; expected another "
            f"position; a rank sends nothing to itself"
        )


def engine_tag(ring: Ring, collective: str, tag: int) -> int:
    """Return what the engine has for a tag that is not 0; refuse it on a GPU."""
    if isinstance(tag, bool) or not isinstance(tag, int) or not 0 <= tag < USER_TAGS:
        raise ArgumentError(
            f"{ring._describe(collective)}: tag={tag!r}; expected a whole number from 0 to "
            f"{USER_TAGS - 1}"
        )
    if ring._fences is not None:
        raise ArgumentError(
            f"{ring._describe(collective)}: tag={tag} on {ring.device}: NCCL matches the calls of "
            f"a pair in their order; leave the tag away and make both sides' calls in one order"
        )
    return USER_TAGS + tag


def split_rows(ring: Ring, collective: str, role: str, splits: Iterable[int]) -> list[int]:
    """Return the rows for each peer; refuse anything but a whole number >= 0 per rank."""
    rows = None
    try:
        splits = list(splits)
        rows = [index(count) for count in splits]
    except TypeError:  # not a sequence, or not of whole numbers
        pass
    if rows is None or len(rows) != ring.size or min(rows) < 0 or sum(rows) > sys.maxsize:
        actual = f"{len(splits)} values" if isinstance(splits, list) else type(splits).__name__
        raise ShapeError(
            f"{ring._describe(collective)}: {role}={splits!r:.80} ({actual}); expected a list of "
            f"{ring.size} whole numbers >= 0, the rows for each rank; pass ints"
        )
    return rows


def counts(
    ring: Ring, collective: str, role: str, tensor: Tensor, splits: Iterable[int] | None
) -> list[int]:
    """Return the elements for each peer, from the rows for each peer along dim 0."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if splits is None:
        if rows % ring.size:
            raise ShapeError(
                f"{ring._describe(collective)}: dim 0 of shape {tuple(tensor.shape)} does not "
                f"divide by the ring's size {ring.size}; pad it, or pass in_splits= and out_splits="
            )
        return [tensor.numel() // ring.size] * ring.size
    peer_rows = split_rows(ring, collective, role, splits)
    if sum(peer_rows) != rows:
        raise ShapeError(
            f"{ring._describe(collective)}: {role}={peer_rows}; expected counts that add up to the "
            f"{rows} rows of shape {tuple(tensor.shape)}; they add up to {sum(peer_rows)}; pass "
            f"as many rows as they name"
        )
    row = tensor.numel() // rows if rows else 0
    return [count * row for count in peer_rows]


def check_blocks(ring: Ring, max_blocks: int) -> int:
    """Return ``max_blocks``; refuse anything but a number of blocks."""
    if isinstance(max_blocks, bool) or not isinstance(max_blocks, int) or max_blocks < 1:
        raise ArgumentError(
            f"{ring._describe('all_reduce')}: max_blocks={max_blocks!r}; expected a whole number "
            f"above 0, or None for FLAGS_comm_async_blocks"
        )
    return max_blocks


def at_root(
    ring: Ring, collective: str, root: int, out: Tensor | None, x: Tensor
) -> tuple[Tensor | None, bool]:
    """Return the output where it counts, and ``is_plain``; other ranks do not touch theirs."""
    check_position(ring, collective, "root", root)
    if ring.rank != root:
        plain = is_plain(ring, x, x)
        if not plain:
            check_tensor(ring, collective, "x", x)
        return None, plain
    plain = out is not None and is_plain(ring, x, out)
    if not plain:
        check_pair(ring, collective, out, x)  # type: ignore[arg-type]  # None is refused there
    return out, plain


def from_root(
    ring: Ring, collective: str, root: int, out: Tensor, x: Tensor | None, parts: int
) -> tuple[Tensor | None, bool]:
    """Return the input where it counts, ``parts`` times the size of ``out``, and ``is_plain``.

    Ranks other than ``root`` do not read theirs. If they give one, it must fit all the same.
    """
    check_position(ring, collective, "root", root)
    if x is None and ring.rank != root:
        plain = is_plain(ring, out, out)
        if not plain:
            check_out(ring, collective, out)
        return None, plain
    plain = x is not None and is_plain(ring, x, out)
    if not plain:
        only_read = out is x and ring.rank == root
        check_pair(ring, collective, out, x, may_overlap=only_read)  # type: ignore[arg-type]  # None is refused there
    count = x.numel()  # type: ignore[union-attr]
    if out.numel() * parts != count:
        raise shape_mismatch(ring, collective, out, count / parts, f"x.numel() / {parts}")
    return x if ring.rank == root else None, plain


def check_only(ring: Ring, collective: str, x: Tensor) -> None:
    """Refuse the only tensor of a call, its input, if an output can't be made from it."""
    if not isinstance(x, torch.Tensor):
        raise ArgumentError(
            f"{ring._describe(collective)}: out is {type(x).__name__} and there is no x; expected "
            f"a torch.Tensor, which is the input then; or pass x"
        )
    check_tensor(ring, collective, "x", x)


def new_like(ring: Ring, collective: str, x: Tensor, times: int = 1, parts: int = 1) -> Tensor:
    """Return a new dense tensor with ``times / parts`` of the rows of ``x`` along dim 0."""
    check_only(ring, collective, x)
    if times == parts == 1:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, rest = (x.shape[0], x.shape[1:]) if x.dim() else (1, ())
    if rows % parts:
        raise ShapeError(
            f"{ring._describe(collective)}: dim 0 of shape {tuple(x.shape)} does not divide by "
            f"the ring's size {parts}; pad it to {-(-rows // parts) * parts} rows"
        )
    return x.new_empty((rows * times // parts, *rest))


def new_at_root(ring: Ring, collective: str, root: int, x: Tensor, times: int = 1) -> Tensor:
    """Return a new output: on the root as ``new_like``; elsewhere a copy of ``x``, or no rows."""
    check_position(ring, collective, "root", root)
    if ring.rank == root:
        return new_like(ring, collective, x, times)
    check_only(ring, collective, x)
    if times == 1:
        return x.detach().clone(memory_format=torch.contiguous_format)
    return x.new_empty((0, *x.shape[1:]))
