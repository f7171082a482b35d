"""Values that every rank can compute, and comparisons that say where two results differ."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import current_process
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
UNSIGNED = (torch.uint32, torch.uint64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
FP8 = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
)
SHORT = (torch.int16, torch.uint16)
MOVABLE = (*FLOATS, *INTEGERS, *UNSIGNED, *COMPLEX, *FP8, *SHORT, torch.bool)

_PARTS = {torch.complex32: torch.float16, torch.complex64: torch.float32}
_SPECIAL = (-0.0, float("nan"), float("inf"))


def sample(rank: int, shape: Shape, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return what ``rank`` is given: the same at every call and on every rank.

    Floats are normal; signed integers reach as far as a product of two still fits; unsigned ones
    cover their whole range; fp8 has any bytes.
    """
    values = np.random.default_rng([seed, rank, *shape])
    if dtype is torch.bool:
        return rounded(values.integers(0, 2, shape), dtype)
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return from_bits(values.integers(0, 256, shape, dtype=np.uint8), dtype)
    if dtype.is_complex:
        parts = values.standard_normal((*shape, 2))
        return torch.view_as_complex(rounded(parts, _PARTS.get(dtype, torch.float64)))
    if dtype.is_floating_point:
        return rounded(values.standard_normal(shape), dtype)
    info = torch.iinfo(dtype)
    reach = info.max if info.min == 0 else 2 ** (info.bits // 2 - 1)
    kind = str(dtype).removeprefix("torch.")
    drawn = values.integers(0 if info.min == 0 else -reach, reach, shape, kind, endpoint=True)
    return rounded(drawn, dtype)


def with_specials(x: torch.Tensor) -> torch.Tensor:
    """Put a negative zero, a NaN and an infinity in front: what merely moves keeps its bits."""
    if x.dtype in FLOATS and x.numel() >= len(_SPECIAL):
        x.view(-1)[: len(_SPECIAL)] = torch.tensor(_SPECIAL, dtype=x.dtype)
    return x


def wide(x: torch.Tensor) -> Array:
    """Return the values as an array in which NumPy's result, rounded once, is the right one."""
    x = x.detach().cpu().resolve_conj().resolve_neg()
    if x.dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    if x.dtype is torch.complex32:
        x = torch.view_as_complex(torch.view_as_real(x).float().contiguous())
    array: Array = x.numpy()
    return array


def rounded(values: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return ``values`` in ``dtype``, the inverse of ``wide``."""
    values = np.array(values)
    # Into an empty tensor: from_numpy keeps the odd strides of arrays without elements.
    return torch.empty(values.shape, dtype=dtype).copy_(torch.from_numpy(values))


def bits(x: torch.Tensor) -> Array:
    """Return the bit patterns, for formulas that only move values."""
    x = x.detach().cpu()
    flat = torch.empty(x.numel(), dtype=x.dtype).copy_(x.reshape(-1))
    width = x.dtype.itemsize
    array: Array = flat.view(torch.uint8).numpy()
    return array.view("c16" if width == 16 else f"u{width}").reshape(x.shape)


def from_bits(patterns: Array, dtype: torch.dtype) -> torch.Tensor:
    """Return the tensor with these bit patterns, the inverse of ``bits``."""
    x = torch.empty(patterns.size, dtype=dtype)
    x.view(torch.uint8).copy_(torch.from_numpy(np.array(patterns).reshape(-1).view(np.uint8)))
    return x.reshape(patterns.shape)


def assert_bits_equal(
    actual: torch.Tensor, expected: torch.Tensor | Array, what: object = "", *, atol: float = 0
) -> None:
    """Raise unless dtype, shape and bits are equal (``atol`` > 0: values within it).

    Ranks do not get pytest's rewritten ``assert``, so this says rank, dtype and place.
    """
    if not isinstance(expected, torch.Tensor):
        expected = rounded(expected, actual.dtype)
    got = f"{actual.dtype} {tuple(actual.shape)}"
    wanted = f"{expected.dtype} {tuple(expected.shape)}"
    if got != wanted:
        raise AssertionError(_here(what) + f"got {got}, expected {wanted}")
    if atol:
        apart = ~(np.abs(wide(actual) - wide(expected)) <= atol)
    else:
        apart = bits(actual) != bits(expected)
        apart = _apart_bytes(actual, expected) if actual.dtype is torch.complex128 else apart
    places = np.argwhere(apart)
    if len(places):
        first = tuple(int(i) for i in places[0])
        raise AssertionError(
            _here(what) + f"{len(places)} of {actual.numel()} elements of {got} differ, first at "
            f"{first}: got {actual[first].item()!r}, expected {expected[first].item()!r}"
        )


def _apart_bytes(actual: torch.Tensor, expected: torch.Tensor) -> Array:
    """Compare as bytes what is wider than any integer of NumPy."""
    both = (bits(x).reshape(-1, 1).view("u8") for x in (actual, expected))
    apart: Array = np.any(next(both) != next(both), axis=1).reshape(actual.shape)
    return apart


def assert_equal(actual: object, expected: object, what: object = "") -> None:
    """Raise unless two plain values are equal; tensors are an error."""
    if isinstance(actual, torch.Tensor) or isinstance(expected, torch.Tensor):
        raise TypeError("assert_equal compares plain values; call assert_bits_equal for tensors")
    if actual != expected:
        raise AssertionError(_here(what) + f"got {actual!r}, expected {expected!r}")


def _here(what: object) -> str:
    return f"{current_process().name}: {what}: "


@contextmanager
def raises(error: type[BaseException], *words: object) -> Iterator[None]:
    """Expect ``error`` from the block, with every one of ``words`` in its text."""
    try:
        yield
    except error as caught:
        missing = [str(word) for word in words if str(word) not in str(caught)]
        if missing:
            raise AssertionError(_here(repr(caught)) + f"does not say {missing}") from caught
    else:
        raise AssertionError(_here(f"expected {error.__name__} {words}") + "nothing was raised")


STRIDED = ("contiguous", "transposed", "stepped")


class Framed:
    """A tensor of some strides inside a buffer whose other bytes must never change."""

    MARGIN = 4
    FILL = 0xA5

    def __init__(self, shape: Shape, dtype: torch.dtype, device: Any, layout: str) -> None:
        order = shape[::-1] if layout == "transposed" else shape
        strides, reach = _strides(order, 2 if layout == "stepped" else 1)
        count = reach + 2 * self.MARGIN
        self.bytes = torch.full((count, dtype.itemsize), self.FILL, dtype=torch.uint8).to(device)
        self.free = torch.ones(count, dtype=torch.bool, device=device)
        placed = (shape, strides[::-1] if layout == "transposed" else strides, self.MARGIN)
        self.view = self.bytes.reshape(-1).view(dtype).as_strided(*placed)
        self.free.as_strided(*placed).fill_(False)

    def intact(self, what: object = "") -> None:
        """Raise when a byte outside the view was written."""
        written = int((self.bytes[self.free] != self.FILL).sum())
        assert_equal(
            written, 0, f"{what}: bytes written outside an output of strides {self.view.stride()}"
        )


def _strides(shape: Sequence[int], step: int) -> tuple[list[int], int]:
    strides: list[int] = []
    reach = step
    for length in reversed(shape):
        strides.insert(0, reach)
        reach = reach * max(length, 1) + step - 1
    return strides, reach


def laid_out(x: torch.Tensor, layout: str, device: Any) -> torch.Tensor:
    """Return the values of ``x`` on ``device`` in a layout ("expanded" repeats its first row)."""
    if layout == "expanded":
        return x[:1].to(device).expand(x.shape) if x.dim() and x.numel() else x.to(device)
    view = Framed(tuple(x.shape), x.dtype, device, layout).view
    return view.copy_(x)


def on_gpu(comm: Any) -> bool:
    """Return True if the ring is on a GPU."""
    return bool(comm.device.type == "cuda")


def settle(comm: Any) -> None:
    """Wait for everything on the ring's device, where there are streams to wait for."""
    if on_gpu(comm):
        torch.cuda.synchronize(comm.device)


def until(condition: Callable[[], bool], what: object = "", seconds: float = 10) -> None:
    """Raise unless ``condition`` comes true in time."""
    import time

    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(_here(what) + f"not true after {seconds} s")
        time.sleep(0.001)
