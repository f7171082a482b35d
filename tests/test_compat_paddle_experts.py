"""The legacy global_scatter and global_gather: argument order, defaults, streams, errors."""

from typing import Any

import torch

from commlib import graph
from commlib.compat import paddle
from commlib.errors import DtypeError, RingError
from tests.support.checks import assert_bits_equal, raises, sample
from tests.support.runs_on import runs_on


@runs_on("ranks")
def test_legacy_names(comm: Any) -> None:
    """On both streams; every rank has one row for each of 2 * size experts."""
    x = sample(comm.rank, (2 * comm.size, 3), torch.float64).to(comm.device).requires_grad_()
    counts = torch.ones(2 * comm.size, dtype=torch.int64)
    every = [sample(rank, (2 * comm.size, 3), torch.float64) for rank in range(comm.size)]
    first = 2 * comm.rank
    want = torch.stack([rows[first + k] for k in range(2) for rows in every])
    for stream in (False, True):
        received = paddle.global_scatter(x, counts, counts, 0, stream)
        assert_bits_equal(received.detach(), want, f"scattered, use_calc_stream={stream}")
        back = paddle.global_gather(received, counts, counts, ring_id=0, use_calc_stream=stream)
        assert_bits_equal(back.detach(), x.detach(), f"gathered, use_calc_stream={stream}")
    back.sum().backward()
    assert_bits_equal(x.grad, torch.ones_like(every[0]), "gradient")
    for call in (paddle.global_scatter, paddle.global_gather):
        with raises(RingError, "ring_id=-1"):
            call(x, counts, counts, -1)
        with raises(DtypeError, "global_count is torch.int32", "long()"):
            call(x, counts, counts.int())


@runs_on("ranks", deadline=120)
def test_a_legacy_step_with_a_capacity(comm: Any) -> None:
    """With ``capacity`` the counts are on the device, and one graph serves others of them."""

    def step(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        theirs = paddle.alltoall(counts, use_calc_stream=True)
        received = paddle.global_scatter(x, counts, theirs, 0, True, capacity=4 * comm.size)
        return paddle.global_gather(received * 2, counts, theirs, 0, True, capacity=len(x))

    captured = graph.capture(step, outputs="copy")
    x = sample(comm.rank, (2 * comm.size + 1, 3), torch.float64).to(comm.device)
    for each in (1, 2, 0, 1):
        counts = torch.full((comm.size,), each, dtype=torch.int64, device=comm.device)
        rows = each * comm.size
        want = torch.cat([x[:rows] * 2, torch.zeros_like(x[rows:])])
        assert_bits_equal(step(x, counts), want, f"eager, {each} rows each")
        assert_bits_equal(captured(x, counts), want, f"captured, {each} rows each")
