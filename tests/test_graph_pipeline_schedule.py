"""graph.PipelineSchedule: orders of actions, moves between ranks, and steps on live ranks."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import commlib
from commlib import Work, graph
from commlib.graph import GraphError, PipelineSchedule
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

F, B = "forward", "backward"
ROWS, WIDTH = 2, 8


def text(order: Sequence[Any]) -> str:
    """Return an order as kind and microbatch, and the stage where it is not the first."""
    return " ".join(f"{kind[0].upper()}{number}{'i' * (at > 1)}" for kind, at, number in order)


def test_known_schedules() -> None:
    """As in the papers: 1F1B, GPipe, and interleaved with two chunks (i: the second one)."""
    first, last = PipelineSchedule.one_f_one_b(2, 4).orders
    assert (text(first), text(last)) == ("F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3")
    for order in PipelineSchedule.gpipe(2, 3).orders:
        assert text(order) == "F0 F1 F2 B0 B1 B2"
    first, last = PipelineSchedule.one_f_one_b(2, 4, chunks=2).orders
    assert text(first) == "F0 F1 F0i F1i F2 B0i F3 B1i F2i B0 F3i B1 B2i B3i B2 B3"
    assert text(last) == "F0 F1 F0i B0i F1i B1i F2 B0 F3 B1 F2i B2i F3i B3i B2 B3"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_any_size_runs_to_its_end(ranks: int) -> None:
    """Each tensor is sent and received once, in one order of all ranks, one edge per direction."""
    for chunks in (1, 2, 3):
        for microbatches in (1, 2, 3, 4, 7, 8, 12):
            schedule = PipelineSchedule.one_f_one_b(ranks, microbatches, chunks=chunks)
            steps = [schedule.steps(rank) for rank in range(ranks)]
            moves = [[x for x in each if isinstance(x, graph.PipelineMove)] for each in steps]
            for source, target in schedule.edges:
                sent, received = (
                    [x for x in moves[rank] if (x.source, x.target) == (source, target)]
                    for rank in (source, target)
                )
                assert sent == received and sent
            borders = ranks * chunks - 1 if ranks > 1 else 0
            assert sum(map(len, moves)) == 2 * 2 * borders * microbatches
            neighbours = {(i, (i + 1) % ranks) for i in range(ranks if chunks > 1 else ranks - 1)}
            both = neighbours | {(b, a) for a, b in neighbours}
            assert schedule.edges == sorted(both if ranks > 1 else [])


def test_no_send_waits_in_a_circle() -> None:
    """Where each send blocks until its receive is posted, every rank still comes to its end."""
    for schedule in (
        PipelineSchedule.one_f_one_b(4, 7, chunks=3),
        PipelineSchedule.gpipe(4, 5, chunks=2),
    ):
        left = [[x for x in schedule.steps(rank) if len(x) == 3] for rank in range(4)]
        moves = [[x for x in each if isinstance(x, graph.PipelineMove)] for each in left]
        while any(moves):
            heads = [each[0] for each in moves if each]
            pairs = [x for x in heads if heads.count(x) == 2]
            assert pairs, f"all wait: {heads}"
            for each in moves:
                if each and each[0] == pairs[0]:
                    each.pop(0)


@pytest.mark.parametrize(
    ("orders", "message"),
    [
        ([[(F, 0, 0)]], "the backward of stage 0, microbatch 0 comes 0 times; expected once"),
        ([[(B, 0, 0)]], "the forward of stage 0, microbatch 0 comes 0 times"),
        ([[(F, 0, 0), (B, 0, 0), (B, 0, 0)]], "the backward .* comes 2 times"),
        ([[(F, 0, 0), (F, 0, 0), (B, 0, 0)]], "the forward .* comes 2 times"),
        ([[(B, 0, 0), (F, 0, 0)]], "backward of stage 0, .* on rank 0 waits for the forward of"),
        ([[(F, 0, 0), (B, 0, 0)], [(F, 0, 1), (B, 0, 1)]], "stage 0 has actions on ranks 0 and 1"),
        ([[(F, 1, 0), (B, 1, 0)]], r"stages \[1\]; expected 0, 1, 2"),
        ([[]], r"stages \[\]; expected 0"),
        ([[(F, 0, 1), (B, 0, 1)]], "stage 0, microbatch 0 comes 0 times"),
        ([[(F, 0, 0), (B, 0, 0), ("W", 0, 0)]], "unknown action: W of stage 0"),
        ([[(F, 0), (B, 0)]], r"has \('forward', 0\); expected \(kind, stage, microbatch\)"),
        ([[(F, 0, 0.5), (B, 0, 0.5)]], r"has \('forward', 0, 0.5\); .* whole numbers"),
        ([[(F, "0", 0), (B, "0", 0)]], r"has \('forward', '0', 0\); .* whole numbers"),
        (
            [
                [(F, 0, 0), (B, 0, 0), (F, 0, 1), (B, 0, 1)],
                [(F, 1, 1), (B, 1, 1), (F, 1, 0), (B, 1, 0)],
            ],
            "the backward of stage 0, microbatch 0 on rank 0 waits for the backward of stage 1",
        ),
    ],
)
def test_orders_that_can_not_run(orders: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        PipelineSchedule(orders)


def test_sizes_below_one() -> None:
    for name, sizes in (("ranks", (0, 2, 1)), ("microbatches", (2, 0, 1)), ("chunks", (2, 2, -1))):
        with pytest.raises(GraphError, match=f"{name}=(0|-1): expected a whole number, 1 or more"):
            PipelineSchedule.gpipe(*sizes[:2], chunks=sizes[2])
    with pytest.raises(GraphError, match=r"microbatches=2\.0"):
        PipelineSchedule.gpipe(2, 2.0)


# -- steps on live ranks ---------------------------------------------------------------------------


def layers(device: torch.device) -> list[torch.nn.Module]:
    torch.manual_seed(4)
    return [torch.nn.Linear(WIDTH, WIDTH).to(device) for _ in range(4)]


def data(step: int, microbatches: int, device: torch.device) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(ROWS, WIDTH, generator=draw).to(device) for _ in range(microbatches)]


def loss(x: torch.Tensor, number: int) -> torch.Tensor:
    return (x - number).square().mean()


def reference(steps: int, schedule: PipelineSchedule, device: torch.device) -> list[Any]:
    """Return the losses of each step and the weights, by torch on one rank alone."""
    parts, losses = layers(device), []
    optimizer = torch.optim.SGD([x for part in parts for x in part.parameters()], lr=0.1)
    for step in range(steps):
        optimizer.zero_grad()
        results = []
        for number, x in enumerate(data(step, schedule.microbatches, device)):
            for part in parts:
                x = torch.tanh(part(x))
            results.append(loss(x, number))
        done = [x.microbatch for x in schedule.orders[-1] if x.kind == B and x.stage == 3]
        for number in done:  # sums of gradients are in the order of the backwards
            results[number].backward()
        optimizer.step()
        losses += [x.detach() for x in results]
    return [*losses, *(x.detach() for part in parts for x in part.parameters())]


def shuffled(microbatches: int) -> PipelineSchedule:
    """Return a schedule whose backwards come in another order than its forwards."""
    draw = random.Random(1)
    numbers = draw.sample(range(microbatches), microbatches)
    back = draw.sample(numbers, microbatches)
    orders = [
        [(F, s, m) for s in (rank, rank + 2) for m in numbers]
        + [(B, s, m) for s in (rank + 2, rank) for m in back]
        for rank in range(2)
    ]
    return PipelineSchedule(orders)


SCHEDULES = {"interleaved": PipelineSchedule.one_f_one_b(2, 4, chunks=2), "shuffled": shuffled(5)}


@pytest.mark.parametrize("whole", [False, True], ids=["stages", "whole"])
@pytest.mark.parametrize("name", SCHEDULES)
@runs_on("ranks")
def test_steps_over_edges(comm: Any, name: str, whole: bool) -> None:
    """Captured stages, or the captured whole step with its sends and receives: torch's bits."""
    schedule, parts = SCHEDULES[name], layers(comm.device)
    edges = schedule.connect(70, (ROWS, WIDTH))
    assert_equal(sorted(edges.rings), [(0, 1), (1, 0)], "directed edges")
    connected = [ring.report()["communicator"] for ring in edges.rings.values()]
    assert_equal(connected, [True, True], "edges are connected before their first call")
    numbers = (comm.rank, comm.rank + 2)
    params = [x for s in numbers for x in parts[s].parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    build: Any = torch.nn.Sequential if whole else lambda *stage: graph.pipeline(stage)
    stages = {s: build(parts[s], torch.nn.Tanh()) for s in numbers}

    def step(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        optimizer.zero_grad()
        losses = schedule.run(stages, inputs, loss, edges)
        optimizer.step()
        return losses

    call: Any = graph.capture(step, outputs="copy") if whole else step
    actual = [x for i in range(6) for x in call(data(i, schedule.microbatches, comm.device))]
    expected = reference(6, schedule, comm.device)
    losses, weights = expected[:-8], expected[-8:]
    assert_equal(len(actual), len(losses) * comm.rank, "losses on the last rank")
    mine = [x for s in numbers for x in weights[2 * s : 2 * s + 2]]
    results, wanted = [*actual, *params], [*losses * comm.rank, *mine]
    for number, (one, want) in enumerate(zip(results, wanted, strict=True)):
        assert_bits_equal(one.detach(), want, f"tensor {number}")
    if whole:
        calls = graph.report(call)[0]["collectives"]
        assert_equal(len(calls), 2 * 3 * schedule.microbatches, f"moves in the graph: {calls}")
    edges.close()


@runs_on("ranks")
def test_tensors_that_no_buffer_holds(comm: Any) -> None:
    """Two megabytes both ways at the same time: a send waits for no receive of another edge."""
    schedule = PipelineSchedule.one_f_one_b(2, 3, chunks=2)
    edges = schedule.connect(72, (512, 1024))
    stages: Any = {s: torch.nn.Identity() for s in (comm.rank, comm.rank + 2)}
    inputs = [torch.full((512, 1024), 1.0 + i, device=comm.device) for i in range(3)]
    weight = torch.ones(1, device=comm.device, requires_grad=True)
    losses = schedule.run(stages, [x * weight for x in inputs], lambda x, _: x.mean(), edges)
    assert_equal([float(x) for x in losses], [1.0, 2.0, 3.0] if comm.rank else [], "means")
    if comm.rank == 0:
        assert_bits_equal(weight.grad, torch.full((1,), 6.0), "gradient")
    edges.close()


class Nowhere:
    """A transport of one rank: sends are pending until they are waited for."""

    def __init__(self) -> None:
        self.pending = self.most = 0

    def send(self, x: torch.Tensor, move: graph.PipelineMove) -> Work[None]:
        self.pending += 1
        self.most = max(self.most, self.pending)
        return Work(None, self)

    def join(self, deadline: object = None) -> None:
        self.pending -= 1

    def receive(self, move: graph.PipelineMove) -> torch.Tensor:
        return torch.ones(ROWS, WIDTH)


def test_sends_do_not_add_up() -> None:
    """Two tensors at a time are kept for a stage, with any number of microbatches."""
    for microbatches in (2, 12):
        schedule, transport = PipelineSchedule.gpipe(2, microbatches), Nowhere()
        inputs = [torch.ones(ROWS, WIDTH)] * microbatches
        schedule.run({0: torch.nn.Linear(WIDTH, WIDTH)}, inputs, loss, transport)
        assert (transport.most, transport.pending) == (2, 0)


@runs_on("unified_ranks")
def test_steps_that_do_not_fit(comm: Any) -> None:
    schedule = PipelineSchedule.one_f_one_b(2, 3)
    stage, transport = torch.nn.Identity(), None
    with raises(GraphError, "2 inputs; expected one per microbatch, 3"):
        schedule.run({comm.rank: stage}, data(0, 2, comm.device), loss, transport)
    with raises(GraphError, "stages [0, 1]", "all stages of one rank"):
        schedule.run({0: stage, 1: stage}, [], loss, transport)
    with raises(GraphError, "transport=None", "exchanges tensors with others"):
        schedule.run({comm.rank: stage}, data(0, 3, comm.device), loss, transport)
    with raises(GraphError, "ranks=[0]", "expected 2, one per rank"):
        schedule.connect(74, (1,), ranks=[0])
    with raises(GraphError, "shape=6: expected the sizes"):
        schedule.connect(74, 6)
    with raises(GraphError, "rank=2: expected 0 to 1"):
        schedule.steps(2)
    assert_equal(74 in commlib.CommContextManager.instance().rings(), False, "no ring was made")


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (None, "NoneType"),
        ((1, 2), "tuple"),
        ({"x": 1}, "dict"),
        (torch.ones(2, dtype=torch.int64), "a tensor of torch.int64"),
        (torch.ones(2), "a tensor of shape \\(2,\\)"),
    ],
)
def test_results_that_can_not_be_passed_on(found: Any, text: str) -> None:
    """Of a stage, and of the loss, before the schedule goes on."""
    schedule, stage = PipelineSchedule.one_f_one_b(1, 2, chunks=2), torch.nn.Identity()
    inputs = [torch.ones(2)] * 2
    with pytest.raises(GraphError, match=r"loss\(output, 0\) returned .*; expected one number"):
        schedule.run({0: stage, 1: stage}, inputs, lambda y, number: found, None)
    if "shape" not in text:
        match = f"the forward of stage 0, microbatch 0 gave {text}; expected one tensor"
        with pytest.raises(GraphError, match=match):
            schedule.run({0: lambda x: found, 1: stage}, inputs, loss, None)
