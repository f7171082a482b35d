"""Registered ops under torch.vmap: one call for the whole batch, or an error before a launch."""

from collections.abc import Callable
from typing import Any, NoReturn

from commlib.errors import ArgumentError

Rule = Callable[..., Any]


def batched(op: Any, batch: str) -> Rule:
    """Return the rule of an op that takes the whole batch of its first argument in one call.

    Args:
        op: The overload that is registered.
        batch: Position at which the op accepts a batch dimension: "any", "first" or "last".

    Returns:
        A rule for ``torch.library.register_vmap``. All ranks must use the same batch.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], x: Any, *rest: Any) -> tuple[Any, int]:
        if batch == "any":
            return op(x, *rest), in_dims[0]
        if x.dim() == 1:
            _refuse(op, "with 0-D x")
        position = 0 if batch == "first" else -1
        out = op(x.movedim(in_dims[0], position), *rest)
        return out, position % out.dim()

    return rule


def unbatched(op: Any) -> Rule:
    """Return a rule that raises: without one, torch calls the op once per element of the batch."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> NoReturn:
        _refuse(op, "has no batching rule")

    return rule


def _refuse(op: Any, why: str) -> NoReturn:
    raise ArgumentError(
        f"{op._opname} under torch.vmap {why}; call it outside of the vmapped function, on the "
        f"whole batch"
    )
