"""torch.compile and ring.group(): the block stays eager code, and what can't work says so."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import commlib
from commlib import ops
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.operator import calls, compile_whole
from tests.support.runs_on import runs_on

Tensor = torch.Tensor


def both_ways(x: Tensor) -> Tensor:
    """Return what the other rank sends: both send first, which only a group allows."""
    ring = commlib.comm()
    y: Tensor = torch.empty_like(x)
    with ring.group():
        ops.send(x * 2, peer=1 - ring.rank)
        y = ops.recv(y, peer=1 - ring.rank)
    return y + 1


def collected(x: Tensor) -> Tensor:
    """Return results of two collectives in one group."""
    x = x * 2
    with commlib.comm().group():
        total = ops.all_reduce(x)
        full = ops.all_gather(x)
    both: Tensor = total + full.view(2, -1).sum(0)
    return both


def nested(x: Tensor) -> Tensor:
    """Return the same from a function that is called in the middle."""
    return both_ways(x + 1) * 2


BODIES = (both_ways, collected, nested)


@runs_on("ranks")
def test_functions_with_a_group(comm: Any) -> None:
    """Without fullgraph the group is eager code; with it the error names what to call."""
    x = torch.arange(4.0, device=comm.device) + comm.rank
    for body in BODIES:
        want, before = body(x), calls(comm)
        torch._dynamo.reset()
        assert_bits_equal(torch.compile(body, backend="aot_eager")(x), want, body.__name__)
        assert_equal(calls(comm) - before, 2, f"{body.__name__}: calls")
        with pytest.raises(Exception, match=r"ring.group\(\).*ops.all_to_all"):
            compile_whole(body)(x)
        assert_equal(calls(comm) - before, 2, f"{body.__name__}: calls of the refused one")
        assert_bits_equal(body(x), want, f"{body.__name__} after that")


@runs_on("ranks")
def test_compiled_code_inside_a_group(comm: Any) -> None:
    """Compiled code inside a group would use results before they are there: refused."""
    x = torch.arange(4.0, device=comm.device)
    bodies: list[Callable[[Tensor], Any]] = [
        lambda x: ops.all_reduce(x) * 2,
        lambda x: ops.recv(x, peer=1 - comm.rank),
    ]
    for body in bodies:
        compiled, before = compile_whole(body), calls(comm)
        with raises(ArgumentError, "inside `with ring.group():`", "outside"), comm.group():
            compiled(x)
        assert_equal(calls(comm) - before, 0, "calls launched by a refused group")
    assert_bits_equal(ops.all_reduce(x), x * 2, "the ring after that")
