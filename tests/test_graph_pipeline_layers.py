"""graph.pipeline: copies, replaced and frozen layers, slots that can't be captured, edges."""

import copy
from typing import Any
from unittest import mock

import torch
from torch.nn import Linear, Tanh

from commlib import graph
from commlib.graph import GraphError, PipelineSchedule
from commlib.graph.replaying.slot import Slot
from commlib.graph.watching.host import OtherValue
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

WIDTH = 6
SHAPE = (2, WIDTH)


def parts(device: torch.device) -> list[Any]:
    torch.manual_seed(3)
    layers = [Linear(WIDTH, WIDTH).to(device) for _ in range(3)]
    return [layers[0], graph.eager(layers[1]), layers[2]]


@runs_on("unified_ranks")
def test_a_copy_is_independent(comm: Any) -> None:
    """A copied pipeline computes with its own layers, the eager ones too."""
    pipeline, x = graph.pipeline(parts(comm.device)), torch.ones(SHAPE, device=comm.device)
    want = pipeline(x).detach().clone()
    copied = copy.deepcopy(pipeline)
    with torch.no_grad():
        for weight in pipeline.parameters():
            weight.zero_()
    for turn in range(3):
        out = copied(x)
        assert_bits_equal(out.detach(), want, f"turn {turn}")
        out.sum().backward()
    assert [x.grad is None for x in copied.parameters()] == [False] * 6
    assert [x.grad is None for x in pipeline.parameters()] == [True] * 6


@runs_on("unified_ranks")
def test_a_replaced_layer_is_refused(comm: Any) -> None:
    pipeline, x = graph.pipeline(parts(comm.device)), torch.ones(SHAPE, device=comm.device)
    pipeline(x)
    setattr(pipeline, "2", Linear(WIDTH, WIDTH))
    with raises(GraphError, "layer 2 was replaced by Linear", "make a new pipeline"):
        pipeline(x)


@runs_on("unified_ranks")
def test_weights_of_functions_are_found(comm: Any) -> None:
    """A block that a function calls is tied with the same block elsewhere."""
    block = torch.nn.Sequential(Linear(WIDTH, WIDTH), Tanh()).to(comm.device)
    pipeline = graph.pipeline([block, graph.eager(Tanh()), lambda x: block(x)])
    assert_equal([stretch.eager for stretch in pipeline.stretches], [True] * 3)


@runs_on("unified_ranks")
def test_slots_that_can_not_be_captured(comm: Any) -> None:
    """The call is made once, and the slots that were captured stay in use."""
    for error in (GraphError("no memory"), OtherValue("another way")):
        torch.manual_seed(1)
        norm = torch.nn.BatchNorm1d(WIDTH)
        model = torch.nn.Sequential(Linear(WIDTH, WIDTH), norm).to(comm.device)
        captured = graph.capture(model, slots=3, inputs="copy", outputs="copy")
        x, weight = (torch.randn(4, WIDTH, device=comm.device) for _ in range(2))
        with mock.patch.object(Slot, "capture", _failing(error)):
            first = captured(x)
        assert_equal(int(norm.num_batches_tracked), 1, f"calls with {error}")
        outs = [first, captured(x), captured(x)]  # the last one has no slot and runs eagerly
        for out in outs:
            assert_bits_equal(out.detach(), outs[0].detach(), "outputs")
            (out * weight).sum().backward()
        assert_equal(int(norm.num_batches_tracked), 3, "calls")


def _failing(error: Exception) -> Any:
    """Return a capture of slots whose third call fails."""
    capture, calls = Slot.capture, list[bool]()

    def call(self: Slot, *given: Any, later: bool, **more: Any) -> None:
        calls.append(later)
        assert calls == [False, True, True][: len(calls)]
        if len(calls) == 3:
            raise error
        capture(self, *given, later=later, **more)

    return call


@runs_on("unified_ranks")
def test_frozen_stages(comm: Any) -> None:
    """A stage without gradients, and one that does not use its input, let the step go on."""
    schedule = PipelineSchedule.one_f_one_b(1, 2, chunks=2)
    frozen, last = (Linear(WIDTH, WIDTH).to(comm.device) for _ in range(2))
    frozen.requires_grad_(False)
    inputs = [torch.ones(SHAPE, device=comm.device) * (n + 1) for n in range(2)]
    ways: dict[str, Any] = {"frozen": last, "unused": lambda x: last(torch.ones_like(x))}
    for label, stage in ways.items():
        last.zero_grad()
        losses = schedule.run({0: frozen, 1: stage}, inputs, lambda y, n: y.sum(), mock.Mock())
        want = [stage(frozen(x)).sum() for x in inputs]
        for loss, one in zip(losses, want, strict=True):
            assert_bits_equal(loss, one.detach(), label)
        assert last.weight.grad is not None and frozen.weight.grad is None


@runs_on("unified_ranks")
def test_edges_refuse_other_tensors(comm: Any) -> None:
    """The rank that sends another shape or dtype raises before it sends."""
    schedule = PipelineSchedule.one_f_one_b(2, 1)
    edges = schedule.connect(90, SHAPE)
    (move,) = [x for x in schedule.steps(0) if getattr(x, "source", None) == 0]
    if comm.rank == 0:
        for wrong in (torch.ones(1, WIDTH), torch.ones(SHAPE, dtype=torch.bfloat16)):
            with raises(GraphError, "send on ring", "expected (2, 6) and torch.float32", "connect"):
                edges.send(wrong.to(comm.device), move)
    comm.barrier()
    edges.close()
