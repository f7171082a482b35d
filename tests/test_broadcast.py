"""ops.broadcast: every rank gets the root's tensor."""

from typing import Any

import torch

from commlib import ops
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.formulas import ROOT, from_root, total_or_zeros
from tests.support.operator import Operator
from tests.support.runs_on import runs_on
from tests.support.suites import suite_of, wrong_roots

BROADCAST = Operator(
    ops.broadcast, from_root, adjoint=total_or_zeros, keywords={"root": ROOT}, in_place=True
)


test_suite = suite_of(BROADCAST, wrong_roots)


@runs_on("ranks")
def test_default_root(comm: Any) -> None:
    x = torch.full((3,), comm.rank + 5.0, device=comm.device)
    assert_bits_equal(ops.broadcast(x), torch.full((3,), 5.0), "the default root is 0")
    assert_bits_equal(x, torch.full((3,), comm.rank + 5.0), "input afterwards")


@runs_on("ranks")
def test_a_root_only_reads_its_tensor(comm: Any) -> None:
    """What autograd has saved on the root stays valid; a tensor of any layout is sent."""
    x = torch.arange(6.0, device=comm.device).requires_grad_()
    y = torch.sigmoid(x).view(2, 3)  # its values are saved for the backward
    for later in (False, True):
        for layout in (y.detach(), y.detach().t()):
            shared = layout if comm.rank == 0 else torch.empty(layout.shape, device=comm.device)
            version = shared._version
            work: Any = comm.broadcast(
                shared, shared, root=0, use_calc_stream=not later, sync_op=not later
            )
            if later:
                work.wait()
            assert_bits_equal(shared, layout.contiguous(), f"values, later={later}")
            assert_equal(shared._version > version, comm.rank != 0, f"writes, later={later}")
    y.sum().backward()

    row = torch.arange(3.0, device=comm.device)
    shared = row.expand(4, 3) if comm.rank == 0 else torch.empty(4, 3, device=comm.device)
    comm.broadcast(shared, shared, root=0)
    assert_bits_equal(shared.contiguous(), row.repeat(4, 1), "an expanded row")
    with raises(ArgumentError, "overlaps itself"):
        comm.broadcast(row.expand(4, 3), shared.contiguous(), root=comm.rank)
