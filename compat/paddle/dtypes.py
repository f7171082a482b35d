"""Dtypes as legacy programs write them: torch's own, their names, and the codes of Paddle."""

import torch

from commlib.errors import DtypeError

Dtype = torch.dtype | int | str

# Codes of Paddle's VarType, with which a program stores the dtype of a tensor.
CODES = {
    0: torch.bool,
    1: torch.int16,
    2: torch.int32,
    3: torch.int64,
    4: torch.float16,
    5: torch.float32,
    6: torch.float64,
    20: torch.uint8,
    21: torch.int8,
    22: torch.bfloat16,
    23: torch.complex64,
    24: torch.complex128,
}
_NAMES = {str(dtype).removeprefix("torch."): dtype for dtype in CODES.values()}


def dtype_of(start: str, dtype: Dtype) -> torch.dtype:
    """Return the torch dtype of an argument.

    Args:
        start: The start of an error text: the operator, and its ring if it has one.
        dtype: What the program gives.

    Raises:
        DtypeError: It is unknown.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    parsed = _NAMES.get(dtype) if isinstance(dtype, str) else CODES.get(dtype)
    if parsed is None or isinstance(dtype, bool):
        raise DtypeError(
            f"{start}: dtype={dtype!r}; expected a torch dtype, one of the "
            f"names {', '.join(_NAMES)}, or one of the codes {', '.join(map(str, CODES))}; pass "
            f"dtype=torch.float32"
        )
    return parsed
