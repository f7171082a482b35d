"""graph.pipeline: layers captured in stretches, with any order and number of microbatches."""

import copy
import gc
from collections.abc import Callable, Sequence
from ctypes import c_int
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn import Dropout, Linear

from commlib import graph
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

WIDTH = 6
ROUNDS = (4, 8, 3)  # microbatches of the steps


class Branches(torch.nn.Module):
    """A layer that the host steers, which no graph can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y if y.sum().item() > 0 else y * 0.5


class Eager(torch.nn.Module):
    """The same layers without a line of ours."""

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self._calls = [getattr(layer, "__wrapped__", layer) for layer in layers]
        self.parts = torch.nn.ModuleList(x for x in self._calls if isinstance(x, torch.nn.Module))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for call in self._calls:
            x = call(x)
        return x


def model(device: torch.device) -> list[Any]:
    """Return layers of all sorts: tied ones, functions, an eager one, one that has to be."""
    torch.manual_seed(5)
    first = torch.nn.Embedding(9, WIDTH).to(device)
    layers = [Linear(WIDTH, WIDTH), Dropout(0.2), Branches(), Linear(WIDTH, WIDTH), torch.tanh]
    outside = graph.eager(Linear(WIDTH, WIDTH).to(device))
    layers = [x.to(device) if isinstance(x, torch.nn.Module) else x for x in layers]
    return [first, *layers, outside, lambda x: F.linear(x, first.weight)]


def train(layers: list[Any], call: Callable[..., torch.Tensor], device: torch.device) -> list[Any]:
    """Return the losses and then the weights; backwards come in another order in each step."""
    weights = [*Eager(layers).parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.05, momentum=0.9)
    results: list[Any] = []
    torch.manual_seed(11)
    order = torch.Generator().manual_seed(3)
    for microbatches in ROUNDS:
        for _ in range(2):
            optimizer.zero_grad()
            ids = torch.arange(microbatches * 4, device=device).view(microbatches, 4) % 9
            losses = [call(each).square().mean() for each in ids]
            for i in torch.randperm(microbatches, generator=order).tolist():
                losses[i].backward()
            optimizer.step()
            results += [loss.detach() for loss in losses]
    return [*results, *(weight.detach() for weight in weights)]


def slots(pipeline: graph.Pipeline) -> list[int]:
    """Return how many forwards each stretch has captured."""
    reports = [graph.report(part) for part in pipeline.captured]
    return [sum(row["eager"] is None for row in report) for report in reports]


@pytest.mark.parametrize("count", [None, 2])
@runs_on("unified_ranks")
def test_trains_as_eager(comm: Any, count: int | None) -> None:
    """Shuffled backwards, dropout, tied weights, and layers that stay eager: the same bits."""
    layers, plain = model(comm.device), model(comm.device)
    expected = train(plain, Eager(plain), comm.device)
    pipeline = graph.pipeline(layers, slots=count)
    actual = train(layers, pipeline, comm.device)
    for number, (one, want) in enumerate(zip(actual, expected, strict=True)):
        assert_bits_equal(one, want, f"tensor {number}")
    names = ["0 (eager)", "1-2", "3 (eager)", "4-5", "6 (eager)", "7 (eager)"]
    assert_equal(list(map(str, pipeline.stretches)), [f"layers {x}" for x in names], "stretches")
    assert_equal(slots(pipeline), [count or max(ROUNDS)] * 2, "slots: most microbatches at a time")


@runs_on("unified_ranks")
def test_slots_are_used_again(comm: Any) -> None:
    """One graph pair serves any number of microbatches that follow one another."""
    pipeline = graph.pipeline([Linear(WIDTH, WIDTH), torch.relu]).to(comm.device)
    for number in range(7):
        x = torch.full((2, WIDTH), float(number), device=comm.device)
        pipeline(x).sum().backward()
    assert_equal(slots(pipeline), [1], "slots")
    row = graph.report(pipeline.captured[0])[0]
    assert_equal((row["function"], row["replays"]), ("layers 0-1", 6), "the report")


@runs_on("unified_ranks")
def test_slots_from_the_start(comm: Any) -> None:
    """With slots=3 the first call captures all of them, and a fourth forward runs eagerly."""
    pipeline = graph.pipeline([Linear(WIDTH, WIDTH), Dropout(0.5)], slots=3).to(comm.device)
    x = torch.ones(2, WIDTH, device=comm.device)
    pipeline(x).sum().backward()
    assert_equal(slots(pipeline), [3], "slots after the first call")
    kinds = [type(pipeline(x).grad_fn).__name__ for _ in range(2)]
    flights = [pipeline(x) for _ in range(4)]
    kinds += [type(each.grad_fn).__name__ for each in flights]
    assert_equal(len({*kinds[:-1]}), 1, f"nodes of graphs: {kinds}")
    assert_equal(kinds[-1] == kinds[0], False, f"an eager node: {kinds}")
    assert_equal(slots(pipeline), [3], "slots with four forwards in flight")


def shared(layers: list[Any], **options: Any) -> list[str]:
    return [str(x).removeprefix("layers ") for x in graph.pipeline(layers, **options).stretches]


def test_where_layers_are_cut() -> None:
    """Breaks begin a new graph; shared and marked layers are outside; ties within one are not."""
    lines = [Linear(WIDTH, WIDTH) for _ in range(5)]
    relu = torch.nn.ReLU()
    assert shared(list(lines)) == ["0-4"]
    assert shared(list(lines), breaks=(2, 4)) == ["0-1", "2-3", "4"]
    mixed = [relu, lines[0], relu, lines[1]]
    assert shared(mixed) == ["0-3"]
    assert shared(mixed, breaks=(Linear,)) == ["0", "1-2", "3"]
    assert shared(list(lines), shared=(lines[1],)) == ["0", "1 (eager)", "2-4"]
    inside = torch.nn.Sequential(relu, lines[3])
    assert shared([lines[0], inside], shared=(lines[3],)) == ["0", "1 (eager)"]
    tied = [lines[0], lines[1], lines[2], lines[0]]
    assert shared(tied) == ["0-3"]
    outside = ["0 (eager)", "1", "2", "3 (eager)"]
    assert shared(tied, breaks=(2,)) == outside
    model = torch.nn.Sequential(*lines)
    assert shared([*lines[:2], lambda x: x @ model[3].weight]) == ["0-2"]
    first = lines[0]
    bound = [*lines[:2], lambda x: x @ first.weight]
    assert shared(bound, breaks=(1,)) == ["0 (eager)", "1", "2 (eager)"]
    marked = [*lines[:2], graph.eager(relu), lines[0]]
    assert shared(marked) == ["0 (eager)", "1", "2 (eager)", "3 (eager)"]


class Odd(torch.nn.Module):
    """Reads a value on the host where the layer before it has run just before it."""

    def __init__(self, runs: c_int) -> None:
        super().__init__()
        self.inner, self._runs = Linear(WIDTH, WIDTH), runs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        since, self._runs.value = self._runs.value, 0
        y: torch.Tensor = self.inner(x)
        return y + (y.sum().item() * 0 if since == 1 else 0)


@runs_on("unified_ranks")
def test_layers_that_fail_together(comm: Any) -> None:
    """Layers that can be captured one by one, but not together, stay apart."""
    runs = c_int(0)  # no key sees it

    def first(x: torch.Tensor) -> torch.Tensor:
        runs.value += 1
        return x * 2

    odd = Odd(runs).to(comm.device)
    pipeline = graph.pipeline([first, odd])
    x = torch.ones(2, WIDTH, device=comm.device)
    want = odd.inner(x * 2).detach()  # a node that is held would belong to another stream
    seen, why = [], []
    for turn in range(5):
        tried = pipeline.captured
        assert_bits_equal(pipeline(x), want, f"turn {turn}")
        seen.append([str(each) for each in pipeline.stretches])
        why += [text for each in tried for text in each.eager.values()]
    assert_equal(seen[0], ["layers 0", "layers 1"], f"tried one by one: {why}")
    assert_equal(seen[1], ["layers 0-1"], f"and together once more: {why}")
    assert_equal(seen[2:], [seen[0]] * 3, f"apart for good: {why}")


@runs_on("unified_ranks")
def test_the_report_keeps_reasons(comm: Any) -> None:
    """A layer that can't be captured has a row with the reason, until ``reset``."""

    def reader(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if float(x.detach().sum()) > 0 else x

    pipeline = graph.pipeline([Linear(WIDTH, WIDTH), reader, torch.relu]).to(comm.device)
    for _ in range(4):
        pipeline(torch.ones(2, WIDTH, device=comm.device)).sum().backward()
    gc.collect()
    names = [row["function"] for row in graph.report() if row["eager"]]
    assert_equal(names.count("layers 1"), 1, f"rows with a reason: {names}")
    names = [row["function"] for row in graph.report(pipeline)]
    assert_equal(sorted(names), ["layers 0", "layers 1", "layers 2"], "rows of the pipeline")
    assert_equal(str(pipeline.stretches[1]), "layers 1 (eager)", "and how it is called")
    pipeline.reset()
    gc.collect()
    names = [row["function"] for row in graph.report() if row["eager"]]
    assert_equal(names.count("layers 1"), 0, f"rows after a reset: {names}")


@runs_on("unified_ranks")
def test_a_slot_that_breaks(comm: Any) -> None:
    """A further slot that can't be captured leaves the others: that forward is eager, once."""
    broken = c_int(0)  # no key sees it

    def fragile(x: torch.Tensor) -> torch.Tensor:
        if broken.value:
            broken.value -= 1
            raise ValueError("broken")
        return torch.tanh(x)

    torch.manual_seed(3)
    first, last = Linear(WIDTH, WIDTH), Linear(WIDTH, WIDTH)
    pipeline = graph.pipeline([first, fragile, last]).to(comm.device)
    plain = copy.deepcopy(torch.nn.Sequential(first, torch.nn.Tanh(), last))
    inputs = [torch.full((2, WIDTH), i + 1.0, device=comm.device) for i in range(6)]
    actual = []
    for i, x in enumerate(inputs):
        broken.value += i == 4
        actual.append(pipeline(x).sum())
    assert_equal((broken.value, slots(pipeline)), (0, [4]), "one of six is eager, as is the first")
    assert_equal(list(map(str, pipeline.stretches)), ["layers 0-2"], "stretches")
    expected = [plain(x).sum() for x in inputs]
    for losses in (actual, expected):
        for i in (4, 1, 0, 3, 5, 2):
            losses[i].backward()
    pairs = zip(pipeline.parameters(), plain.parameters(), strict=True)
    for number, (one, want) in enumerate(pairs):
        assert_bits_equal(one.grad, want.grad, f"gradient {number}")


@runs_on("unified_ranks")
def test_evaluation_and_shapes(comm: Any) -> None:
    """eval() and another shape are other kinds; results that are kept stay as they were."""
    torch.manual_seed(2)
    layers = [Linear(WIDTH, WIDTH), Dropout(0.5), Linear(WIDTH, 2)]
    pipeline = graph.pipeline(layers).to(comm.device)
    plain = copy.deepcopy(torch.nn.Sequential(*layers))
    assert_equal(list(pipeline.state_dict()), list(plain.state_dict()), "names of the state dict")
    saved: list[Any] = []
    for turn in range(3):
        for rows in (2, 5):
            x = torch.full((rows, WIDTH), turn + 1.0, device=comm.device)
            outputs = []
            for module in (pipeline, plain):
                torch.manual_seed(turn)
                trained = module.train()(x)
                with torch.no_grad():
                    kept_one = module.eval()(x)
                trained.sum().backward()
                outputs += [trained.detach(), kept_one]
            saved.append(outputs)
    for turn, (trained, evaluated, plain_trained, plain_evaluated) in enumerate(saved):
        assert_bits_equal(trained, plain_trained, f"training {turn}")
        assert_bits_equal(evaluated, plain_evaluated, f"evaluation {turn}")
    pairs = zip(pipeline.parameters(), plain.parameters(), strict=True)
    for number, (one, want) in enumerate(pairs):
        assert_bits_equal(one.grad, want.grad, f"gradient {number}")
    (call,) = pipeline.captured
    assert_equal(len(call.entries), 4, "kinds")
    pipeline.reset()
    assert_equal(len(call.entries), 0, "kinds after reset")


@runs_on("unified_ranks")
def test_backwards_that_do_not_fit(comm: Any) -> None:
    """A second backward of one microbatch raises, and the next steps are right."""
    pipeline = graph.pipeline([Linear(WIDTH, WIDTH)]).to(comm.device)
    x = torch.ones(2, WIDTH, device=comm.device)
    pipeline(x).sum().backward()
    pipeline.zero_grad()
    for _ in range(2):
        loss = pipeline(x).sum()
        loss.backward()
        with raises(GraphError, "second backward"):
            loss.backward()
    weight = next(pipeline.parameters())
    assert_bits_equal(weight.grad, torch.full((WIDTH, WIDTH), 4.0), "two backwards of two rows")


@runs_on("gpu_ranks")
def test_room_for_inputs(comm: Any) -> None:
    """The first capture of a slot reads its input from the graph's memory already."""
    pipeline = graph.pipeline([Linear(WIDTH, WIDTH)]).to(comm.device)
    pipeline(torch.ones(2, WIDTH, device=comm.device))
    (entry,) = pipeline.captured[0].entries.values()
    (forward,) = entry.parts
    assert_equal([*forward.inputs.copies], [0], "arguments with room")


@pytest.mark.parametrize(
    ("layers", "options", "text"),
    [
        ([], {}, r"pipeline\(\[\]\): expected one layer or more"),
        ([torch.relu, 3], {}, "layer 1 is 3; expected a module or a function"),
        ([Linear], {}, "layer 0 is .*Linear.*pass an object"),
        (None, {}, r"pipeline\(None\): expected a list"),
        ([torch.relu], {"slots": 0}, "slots=0: expected 1 or more"),
        ([torch.relu], {"slots": 1.5}, "slots=1.5: expected 1 or more"),
        ([torch.relu, torch.relu], {"breaks": 1}, "breaks is 1; expected a list"),
        ([torch.relu], {"shared": torch.nn.ReLU()}, r"shared is ReLU\(\); expected a list"),
        ([torch.relu, torch.relu], {"breaks": [2]}, "breaks has 2; .* 1 to 1"),
        ([torch.relu, torch.relu], {"breaks": [-1]}, "breaks has -1; .* 1 to 1"),
        ([torch.relu, torch.relu], {"breaks": ["Linear"]}, "breaks has 'Linear'; expected pos"),
        ([torch.relu, torch.relu], {"breaks": [True]}, "breaks has True; expected positions"),
        ([torch.relu], {"shared": [torch.nn.ReLU()]}, "shared has ReLU, which no layer is or uses"),
        ([torch.relu], {"shared": [torch.relu]}, "expected modules that are layers"),
    ],
)
def test_bad_arguments(layers: list[Any], options: dict[str, Any], text: str) -> None:
    with pytest.raises(GraphError, match=text):
        graph.pipeline(layers, **options)


def test_bad_options_of_capture() -> None:
    for options, text in (
        ({"slots": 0}, "slots=0"),
        ({"max_graphs": 2.5}, "max_graphs=2.5"),
        ({"warmup": True}, "warmup=True"),
        ({"inputs": "move"}, "inputs='move'.*copy"),
    ):
        with pytest.raises(GraphError, match=text):
            graph.capture(torch.relu, **options)
