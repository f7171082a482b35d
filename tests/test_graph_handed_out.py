"""Tensors with a history that a captured function hands out, under names too."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from commlib import graph
from commlib.graph import GraphError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.runs_on import runs_on

NO_GRADIENT = "binds Gate.loss to a tensor that requires grad", "return the tensor too"
MADE = "a leaf that it makes", "pass it as an argument that requires grad", "x.detach()"
RETAINED = "a tensor whose gradient it retains", "call retain_grad() on what the call returns"


class Gate(nn.Module):
    """A gate that keeps an auxiliary loss, as those of experts do."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8, device=device)
        self.loss: Any = None

    def forward(self, x: Tensor, *, returns: bool = True) -> Tensor | None:
        y: Tensor = self.linear(x)
        self.loss = y.square().mean()
        return y if returns else None


@pytest.mark.parametrize("verify", [False, True])
@runs_on("unified_ranks")
def test_a_loss_under_a_name(comm: Any, verify: bool) -> None:
    """Its value is that of each call; a backward through it raises, and changes no gradient."""
    eager, gate = Gate(comm.device), Gate(comm.device)
    g = graph.capture(gate, verify=verify)
    for turn in range(5):
        x = torch.full((4, 8), turn + 1.0, device=comm.device)
        y, want = g(x), eager(x)
        assert_bits_equal(gate.loss.detach(), eager.loss.detach(), f"loss {turn}")
        assert_equal(gate.loss.requires_grad, True, f"requires grad at turn {turn}")
        if turn % 2 == 0:  # the first call is the function itself
            for out, model in ((y, gate), (want, eager)):
                model.zero_grad()
                (out.sum() if turn else out.sum() + model.loss).backward()
            assert_bits_equal(gate.linear.weight.grad, eager.linear.weight.grad, f"turn {turn}")
            continue
        weight: Any = gate.linear.weight
        before = weight.grad.clone()
        with raises(GraphError, *NO_GRADIENT):
            (y.sum() + gate.loss).backward()
        assert_bits_equal(weight.grad, before, f"gradient at turn {turn}")
        with raises(GraphError, *NO_GRADIENT):
            torch.autograd.grad(g(x).sum() + gate.loss, [weight])
        gate.loss.mul_(2)  # the program may write to it


@runs_on("unified_ranks")
def test_a_loss_that_is_only_read(comm: Any) -> None:
    """A loop that looks at it needs one slot."""
    gate, x = Gate(comm.device), torch.ones(4, 8, device=comm.device)
    g = graph.capture(gate)
    for turn in range(5):
        y: Any = g(x)
        y.sum().backward()
        assert_equal(gate.loss.item() > 0, True, f"turn {turn}")
    assert_equal(len(graph.report(g)), 1, "slots")


@runs_on("unified_ranks")
def test_a_loss_that_is_all_there_is(comm: Any) -> None:
    """Without an output that leads back, there is nothing else to derive from."""
    gate, x = Gate(comm.device), torch.ones(4, 8, device=comm.device)
    g = graph.capture(gate)
    for turn in range(4):
        g(x, returns=False)
        if turn:
            with raises(GraphError, *NO_GRADIENT):
                gate.loss.backward()


@runs_on("unified_ranks")
def test_views_under_names_keep_their_gradients(comm: Any) -> None:
    """Views of arguments and parameters are the program's own tensors."""
    results: list[list[Tensor]] = []
    for captured in (False, True):
        gate, views = Gate(comm.device), dict[str, Tensor]()

        def f(x: Tensor, gate: Gate = gate, views: dict[str, Tensor] = views) -> Tensor:
            views["row"], views["weight"] = x[0], gate.linear.weight[1]
            y: Tensor = gate.linear(x)
            return y

        call: Callable[..., Tensor] = graph.capture(f) if captured else f
        grads = []
        for turn in range(4):
            x = torch.full((4, 8), turn + 1.0, device=comm.device, requires_grad=True)
            gate.zero_grad()
            (call(x).sum() + 3 * views["row"].sum() + 5 * views["weight"].sum()).backward()
            grads += [x.grad, gate.linear.weight.grad]
        results.append(grads)
    for number, (want, grad) in enumerate(zip(*results, strict=True)):
        assert_bits_equal(grad, want, f"gradient {number}")


def _returned(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    moved = x.detach().clone().requires_grad_()
    return moved, moved * weight


def _of_the_argument(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    same = x.detach().requires_grad_()
    return same, same * weight


def _derived(x: Tensor, weight: Tensor) -> Tensor:
    moved = x.detach().clone().requires_grad_()
    (moved * weight.detach()).sum().backward()
    return moved


_kept: dict[str, Tensor] = {}


def _bound(x: Tensor, weight: Tensor) -> Tensor:
    _kept["moved"] = moved = x.detach().clone().requires_grad_()
    return moved * weight


def _retained(x: Tensor, weight: Tensor) -> Tensor:
    y = x * weight
    y.retain_grad()
    return y


def _retained_under_a_name(x: Tensor, weight: Tensor) -> Tensor:
    _kept["y"] = y = x * weight
    y.retain_grad()
    return y * 2


@pytest.mark.parametrize(
    ("fn", "grad", "reason"),
    [
        (_returned, 1.0, ("the function returns", *MADE)),
        (_of_the_argument, 1.0, ("the function returns", *MADE)),
        (_derived, None, ("the function returns", *MADE)),
        (_bound, 1.0, ("the function binds item 'moved' of a dict to", *MADE)),
        (_retained, 1.0, ("the function returns", *RETAINED)),
        (_retained_under_a_name, 2.0, ("the function binds item 'y' of a dict to", *RETAINED)),
    ],
)
def test_gradients_that_a_replay_would_not_give(
    fn: Callable[..., Any], grad: float | None, reason: tuple[str, ...]
) -> None:
    """``grad``: that of the weight after an eager call."""
    weight = torch.full((3,), 2.0, requires_grad=True)
    g = graph.capture(fn)
    with raises(GraphError, *reason):
        for _ in range(2):  # the first call that begins a gradient is not captured
            g(torch.ones(3), weight)
    out: Any = graph.capture(fn, on_fail="eager")(torch.ones(3), weight)
    (out[1] if isinstance(out, tuple) else out).sum().backward()
    wgrad: Any = weight.grad
    assert_equal(wgrad if wgrad is None else wgrad.tolist(), grad and [grad] * 3, "eager call")


def test_a_leaf_that_no_other_output_comes_from() -> None:
    """A new leaf is the program's to derive by, and so is an argument that is returned."""

    def f(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.detach().clone().requires_grad_(), weight, x * weight

    g = graph.capture(f)
    for turn in range(4):
        weight = torch.full((3,), 2.0, requires_grad=True)
        leaf, same, y = g(torch.full((3,), turn + 1.0), weight)
        (leaf * 3 + same * 5 + y).sum().backward()
        assert_bits_equal(leaf.grad, torch.full((3,), 3.0), f"leaf {turn}")
        assert_bits_equal(weight.grad, torch.full((3,), turn + 6.0), f"weight {turn}")


def test_a_write_to_an_argument_with_a_history() -> None:
    """Its history goes on through the write, so the call can't be undone."""

    def f(x: Tensor) -> Tensor:
        x.mul_(2)
        return x.sum()

    a = torch.ones(3, requires_grad=True)
    c = a * 1
    with pytest.raises(GraphError, match=r"tensor 0 of its arguments.*do not repeat it") as e:
        graph.capture(f)(c)
    assert e.value.done
    c.sum().backward()
    assert_bits_equal(a.grad, torch.full((3,), 2.0), "the call has counted, once")
    a.grad = None
    graph.capture(f, on_fail="eager")(a * 1).backward()
    assert_bits_equal(a.grad, torch.full((3,), 2.0), "an eager call")


def test_a_backward_after_the_first_call_of_another_kind() -> None:
    """That call shows that gradients belong to the key; graphs in flight stay until then."""
    weight = torch.ones(8, requires_grad=True)

    def f(x: Tensor, *, norm: bool) -> Tensor:
        if norm:
            assert weight.grad is not None
            return weight.grad.square().sum()
        return (x * weight).sum()

    g = graph.capture(f, verify=False, outputs="copy")
    for _ in range(3):
        g(torch.ones(4, 8), norm=False).backward()
    loss = g(torch.full((4, 8), 2.0), norm=False)
    g(torch.zeros(1), norm=True)
    loss.backward()
    assert_bits_equal(weight.grad, torch.full((8,), 3 * 4.0 + 8.0), "all four backwards")


def test_an_argument_that_is_returned_in_a_loop() -> None:
    """A verified call does not read the output that the replay before has handed back."""
    f = graph.capture(lambda x: (x.tanh(), x), verify=True)
    x = want = torch.ones(3)
    for _ in range(5):
        x, _ = f(x)
        want = want.tanh()
    assert_bits_equal(x.clone(), want, "after five calls")
