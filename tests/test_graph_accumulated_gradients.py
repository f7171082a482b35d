"""gradients="accumulate": added to `.grad` by one kernel, where nothing else would see them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from commlib import graph
from commlib.graph import GraphError
from tests.support import two_layers
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on
from tests.support.torch_groups import OURS, initialised
from tests.support.two_layers import WIDTH, rows, same_grads

STEPS = 6


def pair(device: torch.device, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    return two_layers.pair(device, "accumulate", **options)


def go_back(model: Callable[[Tensor], Tensor], turn: int, device: torch.device) -> None:
    model(rows(turn, device)).square().sum().backward()


class Arrivals:
    """Counts the gradients that reach the node of a weight."""

    def __init__(self, weight: Tensor) -> None:
        self.count = 0
        self._node = get_gradient_edge(weight).node
        self._node.register_prehook(self._note)

    def _note(self, grads: Any) -> None:
        self.count += grads[0] is not None


@runs_on("unified_ranks")
def test_training(comm: Any) -> None:
    """Steps that drop gradients, that set them to zero, and that let them add up."""
    for zero in (
        lambda optimizer: optimizer.zero_grad(set_to_none=True),
        lambda optimizer: optimizer.zero_grad(set_to_none=False),
        lambda optimizer: None,
    ):
        eager, graphed, captured = pair(comm.device)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (eager, graphed)]
        for turn in range(STEPS):
            for part in range(3):
                for model in (eager, captured):
                    go_back(model, 3 * turn + part, comm.device)
            same_grads(eager, graphed, f"turn {turn}")
            for optimizer in optimizers:
                optimizer.step()
                zero(optimizer)


@runs_on("unified_ranks")
def test_which_gradients_are_added(comm: Any) -> None:
    """Only those without a ``.grad`` reach the node of a weight, and those of verified calls."""
    _, graphed, captured = pair(comm.device, verify=False)
    for turn in range(2):
        go_back(captured, turn, comm.device)
    arrivals = Arrivals(next(graphed.parameters()))
    for turn in range(STEPS):
        go_back(captured, turn, comm.device)
    assert_equal(arrivals.count, 0, "gradients at the node, with a .grad")
    for turn in range(STEPS):
        graphed.zero_grad()
        go_back(captured, turn, comm.device)
        go_back(captured, turn, comm.device)
    assert_equal(arrivals.count, STEPS, "gradients at the node, after as many zero_grad()")

    _, graphed, captured = pair(comm.device, verify=True)
    for turn in range(2):
        go_back(captured, turn, comm.device)
    arrivals = Arrivals(next(graphed.parameters()))
    for turn in range(STEPS):
        go_back(captured, turn, comm.device)
    assert_equal(arrivals.count, STEPS, "gradients at the node of verified calls")


@runs_on("unified_ranks")
def test_forwards_in_flight(comm: Any) -> None:
    """Each backward adds its own gradients, in the order of the backwards."""
    eager, graphed, captured = pair(comm.device)
    for turn in range(STEPS):
        for model in (eager, captured):
            outs = [model(rows(3 * turn + i, comm.device)).square().sum() for i in range(3)]
            for out in reversed(outs):
                out.backward()
            del outs, out
        same_grads(eager, graphed, f"turn {turn}")


@runs_on("unified_ranks")
def test_hooks(comm: Any) -> None:
    """Hooks of a weight get its gradient, and hooks after its node find it in ``.grad``."""
    eager, graphed, captured = pair(comm.device, verify=False)
    seen: list[list[list[Tensor]]] = []
    nodes = []  # each lives as long as this, and its hook with it
    go_back(captured, 0, comm.device)  # the capture: torch takes no node of the default stream
    graphed.zero_grad()
    for model in (eager, graphed):
        first, second, third, _ = model.parameters()
        notes: list[list[Tensor]] = [[], [], []]
        of_weight, of_sum, of_node = notes
        first.register_hook(lambda grad, notes=of_weight: notes.append(grad.clone()))
        second.register_post_accumulate_grad_hook(
            lambda weight, notes=of_sum: notes.append(weight.grad.clone())
        )
        nodes.append(get_gradient_edge(third).node)
        nodes[-1].register_hook(
            lambda *_, weight=third, notes=of_node: notes.append(weight.grad.clone())
        )
        seen.append(notes)
    for turn in range(STEPS):
        for each in (eager, captured):
            go_back(each, turn, comm.device)
        same_grads(eager, graphed, f"turn {turn}")
    for i, (wanted, actual) in enumerate(zip(*seen, strict=True)):
        assert_equal(len(actual), STEPS, f"calls of hook {i}")
        for turn, (one, other) in enumerate(zip(wanted, actual, strict=True)):
            assert_bits_equal(other, one, f"what hook {i} got in turn {turn}")


@runs_on("unified_ranks")
def test_gradients_that_are_asked_for(comm: Any) -> None:
    """``autograd.grad`` and ``inputs=`` return gradients and leave other ``.grad`` alone."""
    eager, graphed, captured = pair(comm.device, verify=False)
    for turn in range(STEPS):
        grads = []
        for model, call in ((eager, eager), (graphed, captured)):
            weights = [*model.parameters()]
            if turn == 0:
                go_back(call, turn, comm.device)
            grads.append(torch.autograd.grad(call(rows(turn, comm.device)).sum(), weights[:2]))
            call(rows(turn, comm.device)).square().sum().backward(inputs=weights[2:])
        same_grads(eager, graphed, f"turn {turn}")
        for i, (one, other) in enumerate(zip(*grads, strict=True)):
            assert_bits_equal(other, one, f"turn {turn}, gradient {i}")


@runs_on("unified_ranks")
def test_weights_that_are_used_twice(comm: Any) -> None:
    """By the program too, and by two captured calls: whole numbers, whose sums have no order."""
    leaves = [rows(i, comm.device).round().requires_grad_() for i in range(2)]
    captured = graph.capture(lambda x: (x * leaves[0] + leaves[1]).sum(), gradients="accumulate")
    want = [torch.zeros_like(x) for x in leaves]
    for turn in range(STEPS):
        x, y = (rows(7 * turn + i, comm.device).round() for i in range(2))
        (captured(x) + captured(y) + (leaves[0] * 3).sum()).backward()
        want[0] += x + y + 3
        want[1] += 2
        for i, leaf in enumerate(leaves):
            assert_bits_equal(leaf.grad, want[i], f"turn {turn}, leaf {i}")


@runs_on("unified_ranks")
def test_grads_of_other_forms(comm: Any) -> None:
    """A shared, transposed or absent ``.grad`` gives what eager code gives."""
    eager, graphed, captured = pair(comm.device, verify=False)
    for turn in range(STEPS):
        for model in (eager, graphed):
            weights = [*model.parameters()]
            weights[0].grad = torch.ones(WIDTH, WIDTH, device=comm.device).t().contiguous().t()
            weights[1].grad = weights[3].grad = torch.zeros(WIDTH, device=comm.device)
            weights[2].grad = None
        for call in (eager, captured):
            go_back(call, turn, comm.device)
        same_grads(eager, graphed, f"turn {turn}")


@runs_on("unified_ranks")
def test_no_second_derivative(comm: Any) -> None:
    """With ``create_graph=True`` gradients are tensors that raise where they are derived from."""
    _, graphed, captured = pair(comm.device, verify=False)
    for turn in range(2):
        go_back(captured, turn, comm.device)
    weights = [*graphed.parameters()]
    before = [x.grad.clone() for x in weights if x.grad is not None]
    loss = captured(rows(2, comm.device)).square().sum()
    grads = torch.autograd.grad(loss, weights, create_graph=True)
    with raises(GraphError, "no second derivatives"):
        grads[0].sum().backward()
    for weight, old in zip(weights, before, strict=True):
        assert_bits_equal(weight.grad, old, "a .grad")


@runs_on("unified_ranks", deadline=120)
def test_ddp(comm: Any) -> None:
    """The hooks of DDP, which sit after the nodes of weights, find the sums."""
    with initialised(comm, OURS[comm.device.type]):
        eager, graphed, captured = pair(comm.device)
        go_back(captured, 0, comm.device)  # the capture: DDP makes nodes of the default stream
        graphed.zero_grad()
        both = [DistributedDataParallel(model) for model in (eager, captured)]
        for turn in range(STEPS):
            for model in both:
                with model.no_sync():
                    go_back(model, 2 * turn + comm.rank, comm.device)
                go_back(model, 2 * turn + 1 + comm.rank, comm.device)
            same_grads(eager, graphed, f"turn {turn}")
        captured.reset()


@runs_on("unified_ranks")
def test_grads_that_no_kernel_may_write(comm: Any) -> None:
    """Lazy negatives, and memory that two share, are left to torch: it adds one after the other."""
    eager, graphed, captured = pair(comm.device, verify=False)
    for turn in range(STEPS):
        for model in (eager, graphed):
            first, bias, second, last = model.parameters()
            memory = torch.zeros(WIDTH * WIDTH + WIDTH, device=comm.device)
            first.grad = torch._neg_view(torch.ones_like(first))
            second.grad = memory[: WIDTH * WIDTH].view(WIDTH, WIDTH)
            last.grad, bias.grad = memory[3 : 3 + WIDTH], memory[-WIDTH:]
        for call in (eager, captured):
            go_back(call, turn, comm.device)
        for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(other.grad, one.grad, msg=f"turn {turn}")


def into_one_memory(weights: list[nn.Parameter]) -> None:
    memory = torch.zeros(2 * WIDTH, device=weights[1].device)
    weights[1].grad, weights[3].grad = memory[3 : 3 + WIDTH], memory[-WIDTH - 3 : -3]


def negated(weights: list[nn.Parameter]) -> None:
    weights[0].grad = torch._neg_view(torch.ones_like(weights[0]))


def transposed(weights: list[nn.Parameter]) -> None:
    weights[0].grad = torch.ones_like(weights[0]).t()


def gone(weights: list[nn.Parameter]) -> None:
    weights[2].grad = None


def with_a_gradient(weights: list[nn.Parameter]) -> None:
    assert weights[0].grad is not None
    weights[0].grad.requires_grad_()


def with_a_hook(weights: list[nn.Parameter]) -> None:
    weights[1].register_hook(lambda grad: grad * 2)


def with_a_hook_of_the_sum(weights: list[nn.Parameter]) -> None:
    def double(weight: Tensor) -> None:
        assert weight.grad is not None
        weight.grad.mul_(2)

    weights[1].register_post_accumulate_grad_hook(double)


PLACES = (into_one_memory, negated, transposed, gone)
OBSERVERS = (with_a_gradient, with_a_hook, with_a_hook_of_the_sum)


@runs_on("unified_ranks")
def test_changes_after_added_gradients(comm: Any) -> None:
    """What the program changes before a backward, after others that added to all ``.grad``."""
    for change in (*PLACES, *OBSERVERS):
        eager, graphed, captured = pair(comm.device, verify=False)
        for turn in range(STEPS):
            for model, call in ((eager, eager), (graphed, captured)):
                loss = call(rows(turn, comm.device)).square().sum()
                if turn == STEPS // 2:  # the next forward has another key: hooks are in it
                    change([*model.parameters()])
                loss.backward()
        for one, other in zip(eager.parameters(), graphed.parameters(), strict=True):
            assert one.grad is not None and other.grad is not None
            torch.testing.assert_close(other.grad, one.grad, msg=change.__name__)
