"""Legacy helpers that join tensors, or the same columns of several: none communicates."""

from collections.abc import Sequence

import torch

from commlib.compat.paddle.dtypes import Dtype, dtype_of
from commlib.errors import ArgumentError, DtypeError, ShapeError

Tensor = torch.Tensor
_ALIGNMENT = 256  # bytes, that of the allocator of GPUs


def partial_concat(x: Sequence[Tensor], start_index: int = 0, length: int = -1) -> Tensor:
    """Return the columns ``start_index`` to ``start_index + length`` of each tensor, side by side.

    Source: operator ``partial_concat``. It has a gradient, and does not communicate.

    Args:
        x: 2-D tensors of one shape and dtype.
        start_index: First column; a negative one counts from the end.
        length: Number of columns; -1 takes all that follow.

    Returns:
        [rows, length * len(x)].

    Raises:
        ArgumentError: ``x`` is empty.
        ShapeError: The shapes differ, are not 2-D, or have no such columns.
        DtypeError: The dtypes differ.
    """
    return torch.cat(_columns("partial_concat", x, start_index, length), dim=1)


def partial_sum(x: Sequence[Tensor], start_index: int = 0, length: int = -1) -> Tensor:
    """Return the sum of the columns ``start_index`` to ``start_index + length`` of all tensors.

    Source: operator ``partial_sum``. It has a gradient, and does not communicate.

    Args:
        x: 2-D tensors of one shape and dtype.
        start_index: First column; a negative one counts from the end.
        length: Number of columns; -1 takes all that follow.

    Returns:
        [rows, length].

    Raises:
        ArgumentError: ``x`` is empty.
        ShapeError: The shapes differ, are not 2-D, or have no such columns.
        DtypeError: The dtypes differ.
    """
    total, *others = _columns("partial_sum", x, start_index, length)
    total = total.clone()
    for other in others:
        total = total + other
    return total


def _columns(name: str, x: Sequence[Tensor], start_index: int, length: int) -> list[Tensor]:
    shape = _common_shape(name, x)
    if len(shape) != 2:
        raise ShapeError(f"{name}: x[0] has shape {shape}; expected two dims")
    first = start_index + shape[1] if start_index < 0 else start_index
    count = shape[1] - first if length < 0 else length
    if not 0 <= first < shape[1] or first + count > shape[1]:
        raise ShapeError(
            f"{name}: start_index={start_index} and length={length} of {shape[1]} columns; "
            f"expected columns that exist; pass start_index=0, length=-1 for all"
        )
    return [each[:, first : first + count] for each in x]


def _common_shape(name: str, x: Sequence[Tensor]) -> tuple[int, ...]:
    if not x:
        raise ArgumentError(f"{name}: x is empty; expected one tensor or more")
    shapes = [tuple(each.shape) for each in x]
    if len(set(shapes)) > 1:
        raise ShapeError(f"{name}: the tensors have shapes {shapes}; expected one shape")
    dtypes = {str(each.dtype) for each in x}
    if len(dtypes) > 1:
        raise DtypeError(f"{name}: the tensors have dtypes {sorted(dtypes)}; expected one dtype")
    return shapes[0]


def coalesce_tensor(
    input: Sequence[Tensor],
    dtype: Dtype,
    copy_data: bool = False,
    set_constant: bool = False,
    persist_output: bool = False,
    constant: float = 0.0,
    use_align: bool = True,
    align_size: int = -1,
    size_of_dtype: int = -1,
    concated_shapes: Sequence[int] = (),
    concated_ranks: Sequence[int] = (),
) -> tuple[list[Tensor], Tensor]:
    """Return views of one buffer with the shapes of the tensors, and the buffer.

    Source: operator ``coalesce_tensor``. It does not communicate. A reduction of the buffer is one
    call for all tensors.

    Args:
        input: Tensors of ``dtype`` on one device.
        dtype: Their dtype: of torch, its name, or Paddle's code (5 is float32).
        copy_data: True copies the tensors into the buffer.
        set_constant: True fills the buffer with ``constant``, unless ``copy_data`` is True.
        persist_output: Ignored: views keep the buffer alive.
        constant: The value for ``set_constant``.
        use_align: True begins each view at a multiple of ``align_size`` bytes.
        align_size: -1 is 256.
        size_of_dtype: Ignored: the size of ``dtype`` is known.
        concated_shapes: The shapes of the views, one after another, instead of those of ``input``.
        concated_ranks: The number of dims of each shape in ``concated_shapes``.

    Returns:
        One view per tensor, and the 1-D buffer. What neither option writes is 0.

    Raises:
        ArgumentError: ``input`` is empty, or ``align_size`` is not a multiple of the size of
            ``dtype``.
        DtypeError: ``dtype`` is unknown, or a tensor has another one.
        ShapeError: ``concated_shapes`` and ``concated_ranks`` do not fit ``input``.
    """
    dtype = dtype_of("coalesce_tensor", dtype)
    _check_coalesced(input, dtype)
    shapes = _shapes(input, concated_shapes, concated_ranks)
    step = _elements_of_alignment(dtype, align_size) if use_align else 1
    starts, end = [], 0
    for shape in shapes:
        starts.append(end)
        end += -(-shape.numel() // step) * step
    value = constant if set_constant and not copy_data else 0
    fused = torch.full((end,), value, dtype=dtype, device=input[0].device)
    views = [
        fused[start : start + shape.numel()].view(shape)
        for start, shape in zip(starts, shapes, strict=True)
    ]
    if copy_data:
        for view, tensor in zip(views, input, strict=True):
            view.copy_(tensor.detach())
    return views, fused


def _check_coalesced(tensors: Sequence[Tensor], dtype: torch.dtype) -> None:
    if not tensors:
        raise ArgumentError("coalesce_tensor: input is empty; expected one tensor or more")
    wrong = [str(each.dtype) for each in tensors if each.dtype != dtype]
    if wrong:
        raise DtypeError(f"coalesce_tensor: a tensor is {wrong[0]}; expected dtype={dtype}")


def _shapes(
    tensors: Sequence[Tensor], joined: Sequence[int], dims: Sequence[int]
) -> list[torch.Size]:
    if not joined and not dims:
        return [each.shape for each in tensors]
    if len(dims) != len(tensors) or sum(dims) != len(joined):
        raise ShapeError(
            f"coalesce_tensor: concated_ranks={list(dims)} and concated_shapes={list(joined)} for "
            f"{len(tensors)} tensors; expected the number of dims of each tensor, and all dims"
        )
    numbers = iter(joined)
    shapes = [torch.Size(next(numbers) for _ in range(count)) for count in dims]
    if any(shape.numel() != each.numel() for shape, each in zip(shapes, tensors, strict=True)):
        raise ShapeError(
            f"coalesce_tensor: shapes {[tuple(shape) for shape in shapes]} for tensors of shapes "
            f"{[tuple(each.shape) for each in tensors]}; expected as many elements each"
        )
    return shapes


def _elements_of_alignment(dtype: torch.dtype, align_size: int) -> int:
    size = _ALIGNMENT if align_size == -1 else align_size
    if size < 1 or size % dtype.itemsize:
        raise ArgumentError(
            f"coalesce_tensor: align_size={align_size} for {dtype}; expected a multiple of its "
            f"{dtype.itemsize} bytes; pass align_size=-1"
        )
    return size // dtype.itemsize
