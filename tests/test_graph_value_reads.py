"""Values of tensors that torch or an operator reads on the host, past the operators of a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import graph
from commlib.errors import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

Function = Callable[[torch.Tensor], torch.Tensor]
LISTS: dict[str, Function] = {
    "tensor": lambda x: torch.tensor([x.sum(), x.max()]),
    "tensor of a tuple": lambda x: torch.tensor(((x.sum(), 1), (2.0, x[:1]))),
    "tensor of an argument": lambda x: torch.tensor([*x]),
    "as_tensor": lambda x: torch.as_tensor([x.sum(), 1]),
    "asarray": lambda x: torch.asarray([x.sum(), 1]),
    "new_tensor": lambda x: x.new_tensor([x.sum(), 1]),
    "Tensor": lambda x: torch.Tensor([x.sum(), 1]),
    "FloatTensor": lambda x: torch.FloatTensor([x.sum(), 1]),
    "LongTensor": lambda x: torch.LongTensor([x.long().sum(), 1]),
    "integers": lambda x: torch.tensor([x.long().sum()]),
    "truth": lambda x: torch.tensor([x.sum() > 1], dtype=torch.bool),
    "complex": lambda x: torch.tensor([x.sum() * 1j]),
    "index": lambda x: x[:, None][[x.long().max(), 0], [0, 0]],
    "index of a dimension": lambda x: x[None][:, [x.long().max(), 0]],
    "index of a write": lambda x: x.clone().index_fill_(0, torch.tensor([x.long().max()]), 5),
}


@pytest.mark.parametrize("name", LISTS)
@runs_on("unified_ranks")
def test_lists_of_tensors(comm: Any, name: str) -> None:
    """A tensor that the host makes of the values of others is refused, with the line."""
    captured, x = graph.capture(LISTS[name], verify=False), torch.zeros(2, device=comm.device)
    with raises(GraphError, "a list of tensors can't be captured", __file__, "torch.stack"):
        captured(x)


OTHERS: dict[str, Function] = {
    "numbers": lambda x: x + torch.tensor([1.0, 2.0], device=x.device),
    "numbers of an older kind": lambda x: x * torch.Tensor([2.0, 3.0]).sum(),
    "one tensor": lambda x: x + x.detach().new_tensor([1, 2]),
    "index of numbers": lambda x: x[[1, 0]],
    "stack": lambda x: torch.stack([x.sum(), x.max()]),
    "index of tensors": lambda x: x[torch.stack([x.long().max() % 2] * 2)],
    "sizes": lambda x: x.view([x.shape[0], 1]) * x.new_tensor([x.shape[0]]),
}


@pytest.mark.parametrize("name", OTHERS)
@runs_on("unified_ranks")
def test_tensors_of_numbers(comm: Any, name: str) -> None:
    """Tensors of numbers, and those that operators make, are right at each replay."""
    captured = graph.capture(OTHERS[name], verify=False)
    for turn in range(4):
        x = torch.full((2,), float(turn), device=comm.device)
        assert_bits_equal(captured(x), OTHERS[name](x), f"call {turn}")


@runs_on("unified_ranks")
def test_lists_of_tensors_in_eager_parts(comm: Any) -> None:
    """An eager part reads what it likes: it runs at each call."""

    @graph.eager
    def made(x: torch.Tensor) -> torch.Tensor:
        return torch.tensor([x.sum(), x.max()], device=x.device)

    captured = graph.capture(lambda x: made(x * 2) + 1, verify=False)
    for turn in range(4):
        x = torch.full((2,), float(turn), device=comm.device)
        assert_equal(captured(x).tolist(), [4.0 * turn + 1, 2.0 * turn + 1], f"call {turn}")


@torch.library.custom_op("commlib_tests::made_of_a_list", mutates_args=())
def made_of_a_list(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a list of tensors."""
    return torch.tensor([x.sum(), x.max()])


def test_lists_of_tensors_in_operators() -> None:
    """An operator of the program runs again at each replay on a CPU, and reads again."""
    captured = graph.capture(lambda x: made_of_a_list(x) + 1, verify=False)
    for turn in range(4):
        x = torch.full((2,), float(turn))
        assert_equal(captured(x).tolist(), [2.0 * turn + 1, turn + 1.0], f"call {turn}")
