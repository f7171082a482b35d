"""Values of tensors that torch or an operator reads on the host, past the operators of a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from commlib import graph
from commlib.errors import GraphError
from commlib.graph.operators.literals import made_on_host
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

Function = Callable[[torch.Tensor], torch.Tensor]


def _index(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([x.long().max()], device=x.device)


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
    "index of a write": lambda x: x.clone().index_fill_(0, _index(x), 5),
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


operators = torch.library.Library("commlib_value_reads", "DEF")
operators.define("made_of_a_list(Tensor x) -> Tensor")
operators.impl("made_of_a_list", lambda x: torch.tensor([x.sum(), x.max()]), "CPU")
operators.define("as_many_as(Tensor n) -> Tensor")
operators.impl("as_many_as", lambda n: torch.ones(int(n)), "CPU")
made_of_a_list = torch.ops.commlib_value_reads.made_of_a_list
as_many_as = torch.ops.commlib_value_reads.as_many_as


def test_lists_of_tensors_in_operators() -> None:
    """An operator of the program runs again at each replay on a CPU, and reads again."""
    captured = graph.capture(lambda x: made_of_a_list(x) + 1, verify=False)
    for turn in range(4):
        x = torch.full((2,), float(turn))
        assert_equal(captured(x).tolist(), [2.0 * turn + 1, turn + 1.0], f"call {turn}")


def _packed(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    packed = pack_padded_sequence(x, lengths, batch_first=True)
    padded, _ = pad_packed_sequence(packed, batch_first=True, total_length=x.shape[1])
    return padded.sum((1, 2))


def _padded(x: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return pad_packed_sequence(PackedSequence(x.view(-1, 2)[:8], sizes))[0].sum((0, 2))


def _quantized(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    return torch.quantize_per_tensor(x.view(-1), n[0] * 0.3, n[1], torch.qint8).dequantize()


Reading = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LED: dict[str, tuple[Reading, str]] = {
    "pack_padded_sequence": (_packed, "leave packed sequences outside"),
    "pad_packed_sequence": (_padded, "leave packed sequences outside"),
    "tensor_split": (lambda x, n: torch.tensor_split(x.view(-1), n)[0].sum(), "a list of integers"),
    "tensor_split, a method": (lambda x, n: x.view(-1).tensor_split(n)[0].sum(), "integers"),
}


@pytest.mark.parametrize("name", LED)
@runs_on("unified_ranks")
def test_operators_led_by_values(comm: Any, name: str) -> None:
    """What torch does by values on the host is refused on a CPU; on a GPU other values are seen."""
    function, remedy = LED[name]
    captured = graph.capture(function, verify=False)
    x = torch.arange(24.0, device=comm.device).view(3, 4, 2)
    for values in ([4, 2, 2], [4, 2, 2], [3, 3, 2], [4, 3, 1]):
        tensor = torch.tensor(values)
        if comm.device.type != "cpu":
            assert_bits_equal(captured(x, tensor), function(x, tensor), f"{values}")
            continue
        with raises(GraphError, f"{name.partition(',')[0]} can't be captured", __file__, remedy):
            captured(x, tensor)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantization_by_tensors() -> None:
    """A scale in a tensor is refused: the quantized tensor would keep that of the capture."""
    captured = graph.capture(_quantized, verify=False)
    with raises(GraphError, "quantize_per_tensor can't be captured", "as numbers"):
        captured(torch.arange(4.0), torch.tensor([4, 2]))


@pytest.mark.parametrize("kind", [torch.Tensor, torch.nn.Parameter])
def test_tensors_stay_numbers_in_lists(kind: Any) -> None:
    """Torch takes tensors in lists for numbers, also while a function that indexes is exchanged.

    Python fills a slot of a class that gets a ``__getitem__`` and never empties it, by which torch
    would take them for sequences.
    """
    one = kind(torch.ones(1)).detach()
    for _ in range(2):
        with made_on_host():
            assert_equal(torch.tensor([one]).shape, torch.Size([1]), "while it is exchanged")
            assert_equal(torch.arange(4)[[1, 0]].tolist(), [1, 0], "an index")
        assert_equal(torch.tensor([one, one.sum()]).tolist(), [1.0, 1.0], "after that")


@runs_on("unified_ranks")
def test_packed_sequences_in_a_network(comm: Any) -> None:
    """A recurrent network over a packed sequence names the packing."""
    if comm.device.type == "cpu":
        lstm = torch.nn.LSTM(2, 3)
        packed = pack_padded_sequence(torch.ones(4, 1, 2), torch.tensor([4]))
        with raises(GraphError, "item can't be captured", "leave packed sequences outside"):
            graph.capture(lambda: lstm(packed)[0].data.sum())()


def test_results_of_another_shape() -> None:
    """An operator that returns more at a replay raises, also where a copy would fit."""
    for first, then in ((4, 1), (4, 2)):
        captured = graph.capture(lambda n: as_many_as(n) + 1, verify=False)
        captured(torch.tensor(first))
        with raises(GraphError, f"shape ({then},) in a replay", f"shape ({first},) at the capture"):
            captured(torch.tensor(then))


def test_anomalies() -> None:
    """The check of each gradient is named as what reads values."""
    weight = torch.ones(2, requires_grad=True)
    captured = graph.capture(lambda x: torch.autograd.grad((x * weight).sum(), weight)[0])
    with (
        torch.autograd.set_detect_anomaly(True, check_nan=True),
        pytest.warns(UserWarning, match="Error detected in"),
        raises(GraphError, "torch.autograd.set_detect_anomaly", "check_nan=False"),
    ):
        captured(torch.ones(2))


RESHAPED: dict[str, Callable[[torch.Tensor], object]] = {
    "use unsqueeze, which": lambda x: x.unsqueeze_(0),
    "use t, which": lambda x: x.t_(),
    "give it its size outside": lambda x: x.resize_(3),
    "set it outside": lambda x: x.set_(torch.ones(3).untyped_storage()),
}


@pytest.mark.parametrize("remedy", RESHAPED)
def test_arguments_that_get_another_shape(remedy: str) -> None:
    """The remedy for an operator that reshapes an argument is one that there is."""
    with raises(GraphError, "it changes the shape", remedy):
        graph.capture(RESHAPED[remedy])(torch.ones(2))
