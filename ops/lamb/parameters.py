"""Checks of the parameters of the LAMB optimizer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.tensors import has_memory
from commlib.core.validation import check_tensor
from commlib.errors import ArgumentError, DtypeError
from commlib.ops.lamb.lamb_rings import NAME
from commlib.ops.lamb.settings import LOW, common_moments


def check_params(
    ring: CommContext,
    groups: Sequence[Mapping[str, Any]],
    exclude: Callable[[torch.Tensor], bool] | None,
) -> list[bool]:
    """Return per parameter whether weight decay applies to it, after checks of all parameters.

    Args:
        ring: The ring.
        groups: Parameter groups.
        exclude: Returns True for a parameter without weight decay.

    Raises:
        ArgumentError: There are no parameters, one does not require grad or occurs twice, groups
            have different moments, or ``exclude`` fails.
        DeviceError: A parameter is not plain memory on the device of the ring.
        DtypeError: A dtype is not supported, or both 16-bit dtypes occur.
    """
    prefix, params = ring._describe(NAME), [p for group in groups for p in group["params"]]
    if not params:
        raise ArgumentError(f"{prefix}: no parameters; expected one or more; pass params=")
    for number, param in enumerate(params):
        check_tensor(ring, NAME, f"parameter {number}", param)
        _check_param(prefix, number, param)
    check_distinct(prefix, params)
    low = {p.dtype: number for number, p in enumerate(params) if p.dtype in LOW}
    if len(low) > 1:
        dtypes = ", ".join(f"parameter {number} is {dtype}" for dtype, number in low.items())
        raise DtypeError(
            f"{prefix}: {dtypes}; expected one 16-bit dtype; cast the model to one of them"
        )
    common_moments(prefix, groups)
    return _decayed(prefix, params, exclude)


def _check_param(prefix: str, number: int, param: torch.Tensor) -> None:
    if param.dtype not in (torch.float32, *LOW):
        raise DtypeError(
            f"{prefix}: parameter {number} is {param.dtype}; expected torch.float32, "
            f"torch.float16 or torch.bfloat16; call model.float()"
        )
    if not param.requires_grad:
        raise ArgumentError(
            f"{prefix}: parameter {number} does not require grad; expected one that does; "
            f"pass [p for p in model.parameters() if p.requires_grad]"
        )
    if param.grad is not None and param.grad.layout is not torch.strided:
        raise ArgumentError(
            f"{prefix}: the gradient of parameter {number} has {param.grad.layout}; expected "
            f"torch.strided; pass sparse=False to the embedding"
        )


def check_distinct(where: str, params: Sequence[Any]) -> None:
    """Raise ``ArgumentError`` if a parameter occurs twice, or two of them share memory.

    Args:
        where: The start of the error text.
        params: Parameters, or pairs of name and parameter.
    """
    seen = dict[tuple[str, int], int]()
    for number, item in enumerate(params):
        param = item[1] if isinstance(item, tuple) and len(item) == 2 else item
        if not isinstance(param, torch.Tensor):
            continue  # torch refuses it
        keys = [("the same as", id(param))]
        keys += [("in the memory of", param.data_ptr())] if has_memory(param) else []
        for kind, key in keys:
            first = seen.setdefault((kind, key), number)
            if first != number and (key or kind == "the same as"):
                raise ArgumentError(
                    f"{where}: parameter {number} is {kind} parameter {first}; expected each once; "
                    f"pass list(dict.fromkeys(params)), or untie them"
                )


def check_new_group(where: str, group: Any) -> None:
    """Raise ``ArgumentError`` for a parameter that occurs twice; torch only warns."""
    params = group["params"] if isinstance(group, Mapping) else None
    check_distinct(where, params if isinstance(params, list | tuple) else [])


def _decayed(
    where: str, params: Sequence[torch.Tensor], exclude: Callable[[torch.Tensor], bool] | None
) -> list[bool]:
    """Return per parameter whether weight decay applies to it.

    Raises:
        ArgumentError: ``exclude`` can't be called, raises, or does not return a bool.
    """
    if exclude is None:
        return [True] * len(params)
    decayed = list[bool]()
    for number, param in enumerate(params):
        try:
            decayed.append(not exclude(param))
        except Exception as error:
            raise ArgumentError(
                f"{where}: exclude_from_weight_decay raised {type(error).__name__} for parameter "
                f"{number}: {error}; expected a function that returns True or False; pass one, or "
                f"None"
            ) from error
    return decayed


def keep_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> None:
    """Put the learning rates of ``groups`` into the tensors that had them: graphs read these."""
    for group, rate in zip(groups, rates, strict=True):
        if isinstance(rate, torch.Tensor):
            rate.detach().copy_(torch.as_tensor(group["lr"]).view(rate.shape))
            group["lr"] = rate
