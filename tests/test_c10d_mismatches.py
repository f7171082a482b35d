"""Ranks whose calls of torch.distributed differ: FLAGS_comm_check=2 names the calls and lines."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import commlib
from commlib.errors import MismatchError
from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised

Tensor = torch.Tensor
Call = Callable[[Tensor], Any]
# What rank 0 calls and what rank 1 calls, and what the error of every rank shows.
DIFFERENT: dict[str, tuple[Call, Call, list[str]]] = {
    "another call": (
        dist.all_reduce,
        lambda x: dist.broadcast(x, 0),
        ["rank 0: all_reduce float32 [4] op=sum", "rank 1: broadcast float32 [4] root=0"],
    ),
    "another shape": (
        lambda x: dist.all_reduce(x[:2]),
        dist.all_reduce,
        ["all_reduce float32 [2] op=sum, shape (2,)", "all_reduce float32 [4] op=sum, shape (4,)"],
    ),
    "another reduction": (
        dist.all_reduce,
        lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
        ["op=sum", "op=max"],
    ),
    "another dtype": (
        lambda x: dist.all_gather([x.new_empty(4) for _ in range(2)], x),
        lambda x: dist.all_gather([x.int() for _ in range(2)], x.int()),
        ["all_gather float32 [4]", "all_gather int32 [4]"],
    ),
    "a later wait": (
        lambda x: dist.all_reduce(x, async_op=True),
        lambda x: dist.reduce_scatter_tensor(x[:2], x, async_op=True),
        ["rank 0: all_reduce", "rank 1: reduce_scatter"],
    ),
}
# Names that torch has renamed: from some release on each of them warns.
RENAMED: dict[str, Call] = {
    "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x.new_empty(2 * len(x)), x),
    "_all_gather_base": lambda x: dist._all_gather_base(x.new_empty(2 * len(x)), x),
    "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x.new_empty(len(x) // 2), x),
    "_reduce_scatter_base": lambda x: dist._reduce_scatter_base(x.new_empty(len(x) // 2), x),
    "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x]),
}


@contextmanager
def compared(ring: Any) -> Iterator[Tensor]:
    """Initialise ``torch.distributed`` at level 2 without its warnings; yields a tensor of ones."""
    commlib.shutdown()
    level = commlib.flags.override("FLAGS_comm_check", 2)
    with level, initialised(ring, OURS[ring.device.type]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield torch.ones(4, device=ring.device)


@runs_on("ranks")
def test_a_rank_with_another_call(ring: Any) -> None:
    """Every rank raises before a launch, and the group goes on."""
    with compared(ring) as x:
        for name, (*calls, shown) in DIFFERENT.items():
            with raises(MismatchError, "on ring 0", "detected mismatch", *shown):
                calls[ring.rank](x)
            y = torch.ones(2, device=ring.device)
            dist.all_reduce(y)
            assert_equal(y.tolist(), [2.0, 2.0], f"after {name}")
        assert_equal(x.tolist(), [1.0] * 4, "nothing was launched")


@runs_on("ranks")
def test_the_line_of_a_renamed_call(ring: Any) -> None:
    """It is the program's, not that of the wrapper around each renamed function."""
    with compared(ring) as x:
        for name, call in RENAMED.items():
            with pytest.raises(MismatchError) as caught:
                call(x[: 4 - 2 * ring.rank])
            lines = [part for part in str(caught.value).split() if ".py:" in part]
            matches = [part for part in lines if f"{Path(__file__).name}:" in part]
            assert_equal((len(lines), len(matches)), (2, 2), f"lines of {name}: {lines}")
