"""Lazy views on the backend "commlib": conjugated tensors as stock, negative ones by value."""

from typing import Any

import torch
import torch.distributed as dist

from tests.support.checks import assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, STOCK, initialised


def lazy(rank: int, device: torch.device) -> torch.Tensor:
    return (torch.arange(4.0, device=device) * (1 + 2j) * (rank + 1)).conj()


@runs_on("cpu_ranks")
def test_conjugated_views(ring: Any) -> None:
    """Both backends raise torch's error, which names the remedy; with it the sums are the same."""
    for backends in (STOCK, OURS):
        with initialised(ring, backends[ring.device.type]):
            x = lazy(ring.rank, ring.device)
            with raises(RuntimeError, "unresolved conjugated tensors", "resolve_conj()"):
                dist.all_reduce(x)
            x = lazy(ring.rank, ring.device).resolve_conj()
            dist.all_reduce(x)
            assert_equal(x.tolist(), [3 * k * (1 - 2j) for k in range(4)], "sums")


@runs_on("cpu_ranks")
def test_negative_views(ring: Any) -> None:
    """A view with the negative bit is reduced by its values, which stock gloo does not do."""
    with initialised(ring, OURS[ring.device.type]):
        x = lazy(ring.rank, ring.device).imag
        assert_equal(x.is_neg(), True, "is a negative view")
        dist.all_reduce(x)
        assert_equal(x.tolist(), [-6.0 * k for k in range(4)], "sums")
