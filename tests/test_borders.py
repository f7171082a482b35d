"""Values at the border of what an argument, a flag or a message allows."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from commlib import ops
from commlib.errors import FlagError, ShapeError
from commlib.flags import values
from commlib.graph.report import Report
from commlib.ops.registered.library import deliver, save
from tests.support.checks import assert_equal
from tests.support.runs_on import runs_on


def test_the_largest_size_of_a_flag() -> None:
    assert values.mebibytes("FLAGS_comm_channel_mib", "2048") == 2048
    with pytest.raises(FlagError, match="up to 2048"):
        values.mebibytes("FLAGS_comm_channel_mib", "2049")


@pytest.mark.parametrize("tokens", [32, 1000, 100_000])
def test_tokens_of_one_expert_keep_their_order(tokens: int) -> None:
    """Sorts of torch differ between lengths and processors, and some are not stable."""
    ids = torch.randint(3, (tokens,), generator=torch.Generator().manual_seed(1))
    counts = ops.number_count(ids, 3)

    order = ops.assign_pos(ids, counts.cumsum(0))

    want = [rows.flip(0) for rows in ((ids == expert).nonzero()[:, 0] for expert in range(3))]
    assert torch.equal(order, torch.cat(want))


def test_the_least_capacity_of_64_bits_serves_nobody() -> None:
    """What a worker asks for must not make it wrap around."""
    counts, least = torch.tensor([1, 1]), torch.tensor([torch.iinfo(torch.int64).min])
    assert ops.limit_by_capacity(counts, least, 2).tolist() == [0, 0]


def test_a_second_expert_of_just_enough_weight_stays() -> None:
    ids, weights = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[0.75, 0.25], [0.75, 0.25]])
    probabilities = torch.tensor([0.5, 0.5001])
    assert ops.random_routing(ids, weights, probabilities).tolist() == [[0, 1], [0, -1]]


@pytest.mark.parametrize("shape", [(5,), (7,), (2, 2)])
def test_an_output_of_another_size_is_a_shape_error(shape: tuple[int, ...]) -> None:
    """In the words of an eager call, also where a registered op made the result."""
    with pytest.raises(ShapeError, match=r"expected \(2, 3\)"):
        deliver(torch.zeros(2, 3), torch.zeros(shape), True)


@runs_on("cpu_ranks")
def test_bytes_of_any_length(comm: Any) -> None:
    """Bytes of any length arrive without the zeros that fill their last integer."""
    for length in (0, 1, 7, 8, 9, 4096):
        every = [bytes([rank + 1]) * (length + rank) for rank in range(comm.size)]
        assert_equal(comm._hosts.exchange_bytes(every[comm.rank]), every, f"about {length} bytes")


def test_a_tensor_is_not_saved_as_a_plain_argument() -> None:
    saved = SimpleNamespace()
    save(1)(saved, (torch.ones(1), 3), None)
    assert saved.saved == (3,)

    with pytest.raises(TypeError, match="save_for_backward"):
        save(0)(saved, (torch.ones(1), 3), None)


def test_a_long_reason_is_cut_in_the_table_alone() -> None:
    row = {"function": "f", "eager": "because " * 40}
    assert len(str(Report([row], None)).splitlines()[1]) < 300
    assert row["eager"] == "because " * 40
