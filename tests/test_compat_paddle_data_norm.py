"""compat.paddle.data_norm: the legacy arguments, and what each legacy kernel ignores."""

import inspect
from typing import Any

import torch

from commlib import ops
from commlib.compat import paddle
from commlib.errors import ArgumentError, RingError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.operator import ABSENT_RING, calls, compile_whole
from tests.support.runs_on import runs_on

# Any: the tests also pass arguments that a type checker rejects.
data_norm: Any = ops.data_norm

ARGUMENTS = {
    "x": inspect.Parameter.empty,
    "batch_size": inspect.Parameter.empty,
    "batch_sum": inspect.Parameter.empty,
    "batch_square_sum": inspect.Parameter.empty,
    "scale_w": None,
    "bias": None,
    "epsilon": 1e-4,
    "slot_dim": -1,
    "summary_decay_rate": 0.9999999,
    "enable_scale_and_shift": False,
    "data_layout": "NCHW",
    "sync_stats": False,
    "ring_id": 0,
    "behaviour": "gpu",
}


def test_signature() -> None:
    parameters = inspect.signature(paddle.data_norm).parameters
    assert {name: one.default for name, one in parameters.items()} == ARGUMENTS
    assert parameters["behaviour"].kind is inspect.Parameter.KEYWORD_ONLY


def given(comm: Any, count: int = 5) -> list[torch.Tensor]:
    """Return x, the three summaries, scale_w and bias, all fresh, all wanting gradients."""
    x = sample(comm.rank, (count, 4), torch.float64)
    x[::2, 2] = 0
    columns = [sample(n, (4,), torch.float64).abs() + 0.5 for n in range(20, 25)]
    return [t.to(comm.device).clone().requires_grad_() for t in (x, *columns)]


def outcome(call: Any, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
    """Return the results, the gradients and the summaries after a backward."""
    results = call(*tensors)
    results[0].sum().backward()
    return [*results, *(t.grad for t in tensors), *tensors]


def alike(comm: Any, legacy: Any, operator: Any, what: str) -> None:
    """The legacy name gives the operator's results, gradients and summaries, bit for bit."""
    both = outcome(legacy, given(comm)), outcome(operator, given(comm))
    for one, other in zip(*both, strict=True):
        assert_equal((one is None), (other is None), what)
        if one is not None and other is not None:
            assert_bits_equal(one, other, what)


@runs_on("ranks")
def test_values(comm: Any) -> None:
    """Each kernel takes its own arguments and ignores the other's."""

    def gpu(*t: torch.Tensor, **how: Any) -> Any:
        return data_norm(*t[:4], return_moments=True, **how)

    def cpu(*t: torch.Tensor, **how: Any) -> Any:
        return data_norm(*t[:4], behaviour="cpu", return_moments=True, **how)

    name = paddle.data_norm
    alike(comm, lambda *t: name(*t[:4]), gpu, "defaults")
    alike(
        comm,
        lambda *t: name(*t, 1e-3, 2, 0.5, True, "NHWC"),
        lambda *t: gpu(*t, epsilon=1e-3, summary_decay_rate=0.5),
        "gpu ignores slots, scale and shift",
    )
    alike(
        comm,
        lambda *t: name(*t[:4], sync_stats=True),
        lambda *t: gpu(*t, sync_stats=True),
        "gpu synchronises",
    )
    alike(comm, lambda *t: name(*t, behaviour="cpu"), cpu, "cpu, not enabled")
    alike(
        comm,
        lambda *t: name(*t, 1e-3, 2, 0.5, True, "NCHW", True, 0, behaviour="cpu"),
        lambda *t: cpu(*t, epsilon=1e-3, slot_dim=2, scale_w=t[4], bias=t[5]),
        "cpu ignores decay and synchronising",
    )
    alike(comm, lambda *t: name(*t[:4], slot_dim=0, behaviour="cpu"), cpu, "no slots")
    before = calls(comm)
    y, means, scales = name(*given(comm)[:4], sync_stats=True)
    assert_equal((means.requires_grad, scales.requires_grad), (False, False), "moments")
    y.sum().backward()
    assert_equal(calls(comm) - before, 1, "collectives of a synchronised backward")


@runs_on("ranks")
def test_compiled(comm: Any) -> None:
    """Compiled as one graph it gives eager's bits and updates the summaries."""
    for behaviour in ("gpu", "cpu"):

        def body(*t: torch.Tensor, how: str = behaviour) -> Any:
            return paddle.data_norm(*t, sync_stats=True, enable_scale_and_shift=True, behaviour=how)

        inner = compile_whole(body)

        def graph(x: torch.Tensor, *t: torch.Tensor, how: str = behaviour, run: Any = inner) -> Any:
            # Compiled, what is updated may not want a gradient.
            return run(x, *(c.detach() if how == "gpu" else c for c in t))

        alike(comm, graph, body, f"compiled {behaviour}")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """Layouts, rings and missing scales are refused before any launch."""
    x, *columns = given(comm)
    summaries, (w, b) = columns[:3], columns[3:]
    before = calls(comm)
    for ring_id in (-1, ABSENT_RING):
        with raises(RingError, ring_id):
            paddle.data_norm(x, *summaries, ring_id=ring_id)
    for layout in ("CHWN", "", None):
        with raises(ArgumentError, f"data_layout={layout!r}", "NCHW", "ring 0"):
            paddle.data_norm(x, *summaries, data_layout=layout)
    for one in ({}, {"scale_w": w}, {"bias": b}):
        with raises(ArgumentError, "enable_scale_and_shift=True", "pass both"):
            paddle.data_norm(x, *summaries, enable_scale_and_shift=True, behaviour="cpu", **one)
    with raises(ArgumentError, "epsilon=0.01"):
        paddle.data_norm(x, *summaries, epsilon=0.01)
    with raises(ArgumentError, "behaviour='xpu'"):
        paddle.data_norm(x, *summaries, behaviour="xpu")
    with raises(ShapeError, "slot_dim=3"):
        paddle.data_norm(x, *summaries, slot_dim=3, behaviour="cpu")
    with raises(ShapeError, (20,), "[N, C]"):
        paddle.data_norm(x.flatten(), *summaries)
    assert_equal(calls(comm), before, "calls launched by refused ones")
