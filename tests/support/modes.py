"""Operators as functions of one tensor, and a mode that notes what it sees."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from commlib import compat, ops
from tests.support.checks import sample

Body = Callable[..., Any]

UNARY: dict[str, Body] = {
    "all_gather": ops.all_gather,
    "all_reduce": ops.all_reduce,
    "all_to_all": ops.all_to_all,
    "broadcast": lambda x: ops.broadcast(x, root=1),
    "concat": ops.concat,
    "gather": lambda x: ops.gather(x, root=1),
    "identity": ops.identity,
    "partial_all_gather": ops.partial_all_gather,
    "reduce": lambda x: ops.reduce(x, root=1),
    "reduce_scatter": ops.reduce_scatter,
    "scatter": lambda x: ops.scatter(x, root=1),
    "split": ops.split,
}


def given(comm: Any) -> torch.Tensor:
    return sample(comm.rank, (4, 6), torch.float32).to(comm.device)


def _labels(comm: Any) -> torch.Tensor:
    return torch.tensor([0, 7, 11, 3], device=comm.device)


def _norm(comm: Any, x: torch.Tensor) -> torch.Tensor:
    one, row = torch.ones(4, 6, device=comm.device), torch.ones(6, device=comm.device)
    return torch.cat(ops.all_reduce_residual_norm(x, one, row))


def _data_norm(comm: Any, x: torch.Tensor) -> torch.Tensor:
    size, total = torch.full((6,), 4.0, device=comm.device), torch.ones(6, device=comm.device)
    result: torch.Tensor = ops.data_norm(x, size, total, size * 2)
    return result


def composite(comm: Any) -> dict[str, Body]:
    """Return operators that are more than one collective, as functions of one tensor."""
    return {
        "softmax": lambda x: ops.softmax_with_cross_entropy(x, _labels(comm)),
        "margin": lambda x: ops.margin_cross_entropy(x.clamp(-0.9, 0.9), _labels(comm)),
        "norm": lambda x: _norm(comm, x),
        "data_norm": lambda x: _data_norm(comm, x),
        "paddle": lambda x: compat.paddle.c_allreduce_sum(x, 0, True),
    }


def every(comm: Any) -> dict[str, Body]:
    return {**UNARY, **composite(comm)}


class Names(TorchDispatchMode):
    """A user's mode: notes the operators that it sees."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    def ours(self) -> list[str]:
        """Return what it has seen of collectives, ours or the library's below."""
        return [name for name in self.seen if name.split(".")[0] in ("commlib", "c10d")]
