"""Arguments of captured functions: memory that they share, and parameters."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib import graph
from commlib.compat import deepspeed
from commlib.graph import GraphError
from commlib.graph.operators.overlap import overlap, overlaps
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.examples import examples
from tests.support.runs_on import runs_on

# -- arguments -------------------------------------------------------------------------------------


@runs_on("unified_ranks")
def test_overlapping_arguments(comm: Any) -> None:
    """Tensors of one begin are distinguished, and columns of one table do not overlap."""
    x = torch.arange(6.0, device=comm.device)
    both = graph.capture(lambda a, b: b.sum() + a.sum(), outputs="copy")
    for turn in range(3):
        y = x + turn  # at another place
        assert_bits_equal(both(y[:2], y), y[:2].sum() + y.sum(), f"turn {turn}")

    @graph.capture(outputs="copy")
    def columns(a: torch.Tensor, b: torch.Tensor) -> None:
        a.add_(1)
        b.add_(2)

    for _ in range(2):
        table = torch.zeros(3, 5, device=comm.device)
        columns(table[:, :2], table[:, 2:4])
        assert_bits_equal(
            table, torch.tensor([[1.0, 1.0, 2.0, 2.0, 0.0]] * 3), "columns do not meet"
        )


def add_to_first(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a.add_(1)
    return b * 1


@runs_on("cpu_ranks")
def test_a_written_overlap(comm: Any) -> None:
    """A graph on a CPU has copies of its arguments from the start."""
    written, zeros = graph.capture(add_to_first, outputs="copy"), torch.zeros(6)
    with raises(GraphError, "overlap", "writes one"):
        written(zeros[:4], zeros[2:])
    assert_bits_equal(zeros, torch.zeros(6), "nothing has changed")


@runs_on("cpu_ranks")
def test_empty_arguments_of_other_shapes(comm: Any) -> None:
    f = graph.capture(lambda a, b: torch.zeros(b.shape[1]) + b.sum(0), outputs="copy")
    assert_equal(f(torch.empty(0, 3), torch.empty(0, 5)).shape, (5,), "empty")


@runs_on("gpu_ranks")
def test_a_written_overlap_that_is_where_it_was(comm: Any) -> None:
    """The graph works where the tensors are, as the function does."""
    written = graph.capture(add_to_first, outputs="copy")
    zeros, more = torch.zeros(6, device=comm.device), torch.zeros(6, device=comm.device)
    assert_bits_equal(written(zeros[:4], zeros[2:]), torch.tensor([1.0, 1.0, 0.0, 0.0]))
    assert_bits_equal(zeros, torch.tensor([1.0] * 4 + [0.0] * 2))
    with raises(GraphError, "overlap", "writes one"):
        written(more[:4], more[2:])
    assert_bits_equal(more, torch.zeros(6), "nothing has changed")


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "conjugate": lambda z: z.conj(),
    "transposed": lambda z: z.mH,
    "with gaps": lambda z: z[:, ::2].conj(),
    "negative": lambda z: z.conj().imag,
    "both": lambda z: torch._neg_view(z.conj()),
    "repeated": lambda z: z[:, :1].conj().expand(4, 3),
}


def doubled(z: torch.Tensor) -> torch.Tensor:
    return z * 2 + 1


def written(z: torch.Tensor) -> torch.Tensor:
    return z.mul_(2) + 1


@runs_on("unified_ranks")
def test_conjugate_and_negative_views(comm: Any) -> None:
    """A graph's own copy of such an argument is such a view too, with the same operators."""
    for name, view in VIEWS.items():
        for fn in (doubled, written)[: 1 if name == "repeated" else 2]:
            captured, held = graph.capture(fn, outputs="copy"), []
            for turn in range(4):
                ours = torch.full((4, 4), 1 + 2j, device=comm.device) + turn
                ours[0, 1] = comm.rank
                theirs = ours.clone()
                held.append(ours)  # each call has another address
                assert_bits_equal(captured(view(ours)), fn(view(theirs)), f"{name}, {turn}")
                assert_bits_equal(ours, theirs, f"{name}, argument {turn}")
            (row,) = graph.report(captured)
            assert_equal((row["replays"], row["eager"]), (3, None), name)


@runs_on("unified_ranks")
def test_gradients_of_a_conjugate_argument(comm: Any) -> None:
    def square(z: torch.Tensor) -> torch.Tensor:
        return z * z

    captured, held = graph.capture(square), []
    for turn in range(4):
        ours = torch.full((3,), turn + 2j, device=comm.device, requires_grad=True)
        theirs = ours.detach().clone().requires_grad_()
        held.append(ours)
        for x, fn in ((ours, captured), (theirs, square)):
            fn(x.conj()).abs().sum().backward()
        assert ours.grad is not None and theirs.grad is not None
        assert_bits_equal(ours.grad, theirs.grad, f"turn {turn}")


@pytest.mark.parametrize(
    ("one", "other", "meet"),
    [
        (np.s_[0:4], np.s_[2:6], True),
        (np.s_[0:4], np.s_[4:8], False),
        (np.s_[0:8:2], np.s_[1:8:2], False),
        (np.s_[0:8:2], np.s_[2:8:2], True),
        (np.s_[0:8:2], np.s_[1:8:3], True),  # they meet, and strides differ
        (np.s_[0:0], np.s_[0:8], False),
        (np.s_[3:3], np.s_[0:8], False),
    ],
)
def test_overlaps_of_one_dimension(one: Any, other: Any, meet: bool) -> None:
    x = torch.zeros(8)
    assert overlap(x[one], x[other]) is meet
    assert overlap(x[other], x[one]) is meet


@given(st.tuples(*[st.tuples(st.integers(0, 3), st.integers(0, 4)) for _ in range(6)]))
@examples(300)
def test_no_overlap_is_overlooked(bounds: Any) -> None:
    """Slices of one tensor that share an element are recognised, in three dimensions."""
    x, slices = np.arange(4 * 4 * 4).reshape(4, 4, 4), [slice(a, b) for a, b in bounds]
    tensor = torch.from_numpy(x)
    one, other = tuple(slices[:3]), tuple(slices[3:])
    if np.intersect1d(x[one], x[other]).size:
        assert overlap(tensor[one], tensor[other])
        pairs = overlaps([tensor[one], torch.zeros(3), tensor[other]])
        assert [set(pair) for pair in pairs] == [{0, 2}]


@runs_on("unified_ranks")
def test_one_tensor_twice(comm: Any) -> None:
    """A tensor that is given with and without its gradient keeps it."""
    g = graph.capture(lambda a, b: (a * b).sum())
    for turn in range(3):
        x = torch.full((3,), turn + 1.0, device=comm.device, requires_grad=True)
        g(x.detach(), x).backward()
        assert_bits_equal(x.grad, x)


@runs_on("unified_ranks")
def test_overlap_with_a_copy(comm: Any) -> None:
    """An argument that is written where it is, and one that has its own copy, may not overlap."""

    @graph.capture(outputs="copy")
    def written(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b * 1

    x, y, z = (torch.full((5,), turn, device=comm.device) for turn in (1.0, 2.0, 3.0))
    assert_bits_equal(written(x[:3], y[:3]), torch.full((3,), 2.0))
    assert_bits_equal(written(x[:3], z[:3]), torch.full((3,), 3.0))
    with raises(GraphError, "overlap"):
        written(x[:3], x[2:])
    assert_bits_equal(x, torch.tensor([3.0, 3.0, 3.0, 1.0, 1.0]), "nothing has changed")


@runs_on("unified_ranks")
def test_leaves_of_the_function(comm: Any) -> None:
    """Leaves that the function makes for itself are its own business."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().requires_grad_()
        y.sum().backward()
        assert y.grad is not None
        return y.grad * 1

    g = graph.capture(f, outputs="copy")
    for turn in range(2):
        assert_bits_equal(g(torch.full((3,), float(turn), device=comm.device)), torch.ones(3))


@runs_on("unified_ranks")
def test_parameters_in_one_memory(comm: Any) -> None:
    """Parameters that are in one memory each get their gradient, with an argument there too."""
    memory = torch.arange(12.0, device=comm.device)
    one, two = (torch.nn.Parameter(memory[i : i + 4]) for i in (0, 4))
    third = memory[8:].clone().requires_grad_()

    def product(x: torch.Tensor) -> torch.Tensor:
        return (x * one * two).sum()

    for x in (third, memory[8:].detach().requires_grad_()):
        grads = []
        for call in (product, graph.capture(product)):
            one.grad = two.grad = x.grad = None
            call(x).backward()
            grads.append([one.grad, two.grad, x.grad])
        for want, got in zip(*grads, strict=True):
            assert_bits_equal(got, want)


def decay(tensors: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    squares = [(p * p).sum() for p in tensors.values() if isinstance(p, torch.nn.Parameter)]
    return x * sum(squares, torch.ones_like(x))


class Scale(torch.nn.Parameter):
    """A class of a program."""


@pytest.mark.parametrize("verify", [False, True])
@runs_on("unified_ranks")
def test_functions_that_ask_for_parameters(comm: Any, verify: bool) -> None:
    """A graph's own copy of a ``Parameter`` is one too, and another tensor has another graph."""
    x, captured = torch.ones(2, device=comm.device), graph.capture(decay, verify=verify)
    for wants in (True, False):
        for turn in range(6):
            data = torch.full((3,), turn + 1.0, device=comm.device)
            other = data.clone().requires_grad_(wants)
            kinds: list[torch.Tensor] = [torch.nn.Parameter(data, requires_grad=wants), other]
            tensors = {"first": kinds[turn % 2], "second": Scale(data * 2, requires_grad=wants)}
            results = []
            for fn in (decay, captured):
                for p in tensors.values():
                    p.grad = None
                result = fn(tensors, x)
                if wants:
                    result.sum().backward()
                grads = [None if p.grad is None else p.grad.clone() for p in tensors.values()]
                results.append([result.detach().clone(), *grads])
            for want, got in zip(*results, strict=True):
                assert (want is None) is (got is None)
                if want is not None:
                    assert_bits_equal(got, want, f"{wants}, turn {turn}")
    assert_equal(sum(row["replays"] for row in graph.report(captured)), 8, "four graphs")


@runs_on("cpu_ranks")
def test_functions_that_ask_for_attributes_of_arguments(comm: Any) -> None:
    """A graph's copies of arguments are without them: the capture must not take another branch."""
    for wants in (False, True):
        captured = graph.capture(lambda x: x * getattr(x, "scale", 1.0), verify=False)
        x = torch.ones(2, requires_grad=wants)
        x.scale = 3.0  # type: ignore[attr-defined]
        with raises(GraphError, "mul", "differ"):
            captured(x)


UNREADABLE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str]] = {
    "sparse": (lambda x: x.to_sparse(), "torch.sparse_coo", "to_dense"),
    "compressed": (lambda x: x.to_sparse_csr(), "torch.sparse_csr", "to_dense"),
    "mkldnn": (lambda x: x.to_mkldnn(), "torch._mkldnn", "to_dense"),
    "nested": (lambda x: torch.nested.nested_tensor([*x]), "a nested tensor", "to_padded_tensor"),
    "jagged": (
        lambda x: torch.nested.nested_tensor([*x], layout=torch.jagged),
        "a nested tensor",
        "values",
    ),
    "meta": (lambda x: x.to("meta"), "on the meta device", "on another device"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR")
@pytest.mark.parametrize("kind", UNREADABLE)
@runs_on("cpu_ranks")
def test_tensors_that_no_graph_reads(comm: Any, kind: str) -> None:
    """They are refused by what they are, alone and next to another tensor, or the call is eager."""
    made, problem, remedy = UNREADABLE[kind]

    def f(odd: torch.Tensor, x: torch.Tensor | None = None) -> torch.Tensor:
        return odd * 2 if x is None else x * odd.dim()

    for more in ((), (torch.ones(3),)):
        odd = made(torch.eye(3))
        with raises(GraphError, f"tensor 0 of the arguments is {problem}", remedy):
            graph.capture(f)(odd, *more)
        captured, want = graph.capture(f, on_fail="eager"), f(odd, *more)
        for turn in range(3):
            result = captured(odd, *more)
            assert_equal((result.layout, result.dtype), (want.layout, want.dtype), f"turn {turn}")
            if more:
                assert_bits_equal(result, want, f"turn {turn}")
        assert_equal(len(captured.entries), 0, "graphs")
        full = graph.capture(f, on_fail="eager", max_graphs=1)
        for x in (torch.ones(3), odd):  # the log names how the second differs
            assert_equal(full(x, *more).layout, f(x, *more).layout, "without a graph left")


@runs_on("unified_ranks")
def test_gradients_are_apart(comm: Any) -> None:
    """Each gradient has its own memory and version."""
    module = torch.nn.Linear(100, 100).to(comm.device)
    x = torch.ones(1, 100, device=comm.device, requires_grad=True)
    weight, bias, of_x = torch.autograd.grad(
        graph.capture(module)(x).sum(), (module.weight, module.bias, x)
    )
    assert_equal(of_x.untyped_storage().nbytes(), of_x.nbytes, "memory that is kept")
    leaf = torch.ones(100, device=comm.device, requires_grad=True)
    loss = (bias * leaf).sum()
    weight.mul_(0.5)
    loss.backward()
    assert_bits_equal(leaf.grad, bias)


@runs_on("unified_ranks")
def test_deepspeed_defaults(comm: Any) -> None:
    """Functions of one code with other defaults are distinguished, by value and type."""
    x = torch.ones(1, device=comm.device, dtype=torch.int64)

    def named(scale: Any) -> Any:
        def f(x: torch.Tensor, *, scale: Any = scale) -> torch.Tensor:
            return x * scale  # type: ignore[no-any-return]

        return f

    def plain(scale: Any) -> Any:
        def f(x: torch.Tensor, scale: Any = scale, more: Any = [1]) -> torch.Tensor:  # noqa: B006
            return x * scale  # type: ignore[no-any-return]

        return f

    for make in (named, plain):
        for scale in (2, 3, 1, 1.0, True):
            result = deepspeed.graph_process(True, make(scale), x)
            assert_equal(result.tolist(), [scale], f"{scale}")
            assert_equal(result.dtype, (x * scale).dtype, f"type of {scale}")
    deepspeed.graph_clear()


@runs_on("unified_ranks")
def test_parameters_that_hold_each_other(comm: Any) -> None:
    """Attributes of two arguments lead in a circle; the capture ends."""
    one, other = (torch.nn.Parameter(torch.ones(2, device=comm.device)) for _ in range(2))
    one.tied, other.tied = other, one  # type: ignore[attr-defined]
    captured = graph.capture(lambda x: x * 2, outputs="copy")
    for _ in range(3):
        assert_equal(captured(one).tolist(), [2.0, 2.0], "the result")
