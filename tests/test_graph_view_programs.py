"""Captured functions of random views: results and gradients as in eager calls."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from hypothesis import given
from hypothesis import strategies as st

from commlib import graph
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.examples import examples

Step = tuple[str, int, bool]  # what is done, to which value, and whether with gradients
Function = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]

VIEWS: dict[str, Callable[[torch.Tensor], Sequence[torch.Tensor]]] = {
    "all": lambda x: [x.view_as(x)],
    "column": lambda x: [x[..., 0]] if x.dim() else [x],
    "copies": lambda x: x.unsqueeze(0).expand(2, *x.shape).unbind(0),
    "detach": lambda x: [x.detach()],
    "diagonal": lambda x: [x.diagonal()] if x.dim() > 1 else [x],
    "double": lambda x: [x * 2],
    "gaps": lambda x: [x[::2]] if x.dim() else [x],
    "halves": lambda x: x.split(max(1, len(x) // 2)) if x.dim() else [x],
    "last": lambda x: [x[-1]] if x.dim() and len(x) else [x],
    "rest": lambda x: [x[1:]] if x.dim() else [x],
    "transpose": lambda x: [x.t()] if x.dim() < 3 else [x.transpose(0, 1)],
    "unsqueeze": lambda x: [x.unsqueeze(0)],
    "write": lambda x: [x.mul_(1.5)],
}
STEPS = st.tuples(st.sampled_from(sorted(VIEWS)), st.integers(0, 20), st.booleans())


def function(steps: Sequence[Step], returned: Sequence[int]) -> Function:
    """Return the function that takes these steps, and returns the values with these numbers."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        values = [x * weight]
        for name, number, with_gradients in steps:
            with nullcontext() if with_gradients else torch.no_grad():
                source = values[number % len(values)]
                _ = source.grad_fn  # torch refuses what is older than a write
                values.extend(VIEWS[name](source))
        return tuple(values[number % len(values)] for number in returned)

    return run


def outcome(fn: Function, turn: int) -> tuple[list[torch.Tensor], list[bool], list[torch.Tensor]]:
    """Return the results, whether they require grad, and the gradients of the arguments."""
    random = torch.Generator().manual_seed(turn)
    x, weight = (torch.rand(4, 4, generator=random).requires_grad_() for _ in range(2))
    results = fn(x, weight)
    require = [y.requires_grad for y in results]
    contents = [y.detach().clone() for y in results]
    leading = [y for y in results if y.requires_grad]
    torch.autograd.backward(leading, [torch.rand(y.shape, generator=random) for y in leading])
    grads = [torch.zeros(4, 4) if each.grad is None else each.grad for each in (x, weight)]
    return contents, require, grads


@examples(300)
@given(steps=st.lists(STEPS, min_size=1, max_size=7), returned=st.lists(st.integers(0, 20)))
def test_random_views(steps: list[Step], returned: list[int]) -> None:
    """Results are the bits of eager calls, however they share memory.

    Gradients may differ in their last digits: that of a returned view reaches what it is a view of
    before those of results that were made in between.
    """
    fn = function(steps, [*returned, 0])
    try:
        expected = [outcome(fn, turn) for turn in range(3)]
    except RuntimeError:  # torch refuses a write
        return
    captured = graph.capture(fn, outputs="copy")
    for turn, (results, require, grads) in enumerate(expected):
        actual = outcome(captured, turn)
        assert_equal(actual[1], require, f"turn {turn}, requires grad")
        for number, (one, other) in enumerate(zip(actual[0], results, strict=True)):
            assert_bits_equal(one, other, f"turn {turn}, result {number}")
        for one, other in zip(actual[2], grads, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
