"""Tests of every operator, written once: each suite runs inside live ranks on one operator."""

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from commlib.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    PeerError,
    RingError,
    ShapeError,
)
from tests.support.checks import (
    STRIDED,
    Framed,
    assert_bits_equal,
    assert_equal,
    bits,
    raises,
    sample,
    settle,
    until,
    wide,
)
from tests.support.operator import ABSENT_RING, MODES, Operator, calls, compile_whole
from tests.support.ranks import Ranks

Suite = Callable[[Any, Operator], None]


def values(comm: Any, op: Operator) -> None:
    """Every dtype and shape, in every mode, gives the bits of the formula."""
    for dtype in op.dtypes:
        for shape in op.shapes(comm.size):
            inputs = op.inputs(comm, shape, dtype)
            x, want = inputs[comm.rank], op.expected(comm, inputs)
            before = x.clone()
            for name, mode in op.ways().items():
                assert_bits_equal(op(x, **mode), want, f"{dtype} {shape} {name}")
            assert_bits_equal(x, before, f"input of {dtype} {shape} afterwards")


def layouts(comm: Any, op: Operator) -> None:
    """Inputs and outputs of any strides: the right values, and no byte written next to them."""
    for dtype in op.few():
        for name, layout, out_layout in _layouts():
            inputs = op.inputs(comm, op.shape(comm.size), dtype, layout=layout)
            want = op.expected(comm, inputs)
            for mode in MODES.values():
                frame = Framed(tuple(want.shape), dtype, comm.device, out_layout)
                label = f"{dtype} {name} {mode}"
                before = frame.view.clone()
                actual = op(inputs[comm.rank], out=frame.view, **mode)
                assert_equal(actual is frame.view, True, f"{label}: returns out")
                settle(comm)
                assert_bits_equal(frame.view, want if op.writes(comm) else before, label)
                frame.intact(label)


def _layouts() -> Iterator[tuple[str, str, str]]:
    for layout in (*STRIDED, "expanded"):
        for out_layout in STRIDED:
            yield f"{layout} -> {out_layout}", layout, out_layout


def lazy_bits(comm: Any, op: Operator) -> None:
    """A lazily conjugated or negated input counts with its values, not with its storage."""
    if torch.complex64 not in op.dtypes:
        return
    inputs = [x.conj() for x in op.inputs(comm, op.shape(comm.size), torch.complex64)]
    assert_bits_equal(op(inputs[comm.rank]), op.expected(comm, inputs), "conjugated")
    inputs = [x.imag for x in inputs]  # negated, and strided
    assert_bits_equal(op(inputs[comm.rank]), op.expected(comm, inputs), "negated")


def sharing(comm: Any, op: Operator) -> None:
    """Output and input in one buffer give the right values: in place, and one element apart."""
    for name, mode in MODES.items():
        for dtype in op.few():
            x, want = op.example(comm, dtype=dtype)
            if op.in_place:
                actual = op(x, out=x, **mode)
                assert_equal(actual.data_ptr(), x.data_ptr(), "address in place")
                assert_bits_equal(actual, want, f"in place {dtype} {name}")
                x, want = op.example(comm, dtype=dtype)
            buffer = x.new_empty(max(x.numel(), want.numel()) + 1)
            near = buffer[1 : 1 + x.numel()].view(x.shape).copy_(x)
            out = buffer[: want.numel()].view(want.shape)
            wanted = want if op.writes(comm) else out.clone()
            assert_bits_equal(op(near, out=out, **mode), wanted, f"one apart {dtype} {name}")


def waiting(comm: Any, op: Operator) -> None:
    """A Work: waited for twice, by a thread, out of order, with its input gone."""
    x, want = op.example(comm)
    work = op.start(x)
    del x
    junk = [torch.full_like(want, 1, device=comm.device) for _ in range(4)]
    assert_equal(work.wait() is work.wait() is work.result, True, "one result")
    assert_bits_equal(work.result, want, "waited for twice")
    until(work.done, "done after wait()")

    x, want = op.example(comm)
    strided = Framed(tuple(want.shape), want.dtype, comm.device, "stepped").view
    work = op.start(x, out=strided)
    work.wait().zero_()
    assert_bits_equal(
        work.wait(), torch.zeros_like(want), "what the program wrote between two waits"
    )

    examples = [op.example(comm, seed=seed) for seed in range(5)]
    works = [op.start(x) for x, _ in examples]
    for work, (_, want) in reversed(list(zip(works, examples, strict=True))):
        assert_bits_equal(work.wait(), want, "five under way")

    x, want = op.example(comm)
    work = op.start(x)
    by_thread: list[torch.Tensor] = []

    def wait_and_read() -> None:
        by_thread.append(work.wait().clone())
        settle(comm)

    thread = threading.Thread(target=wait_and_read)
    thread.start()
    thread.join(30)
    assert_equal(len(by_thread), 1, "results of the thread")
    assert_bits_equal(by_thread[0], want, "waited for by a thread")
    assert_bits_equal(work.wait(), want, "then by the main thread")
    del junk


def raw(comm: Any, op: Operator) -> None:
    """Without fences the program orders the streams; synchronising the device is one way."""
    x, want = op.example(comm)
    settle(comm)
    actual = op(x, use_calc_stream=False, fenced=False)
    settle(comm)
    assert_bits_equal(actual, want, "fenced=False")


def compiled(comm: Any, op: Operator) -> None:
    """Compiled as one graph, every mode and kind of dtype gives eager's bits."""
    examples = [op.example(comm, dtype=dtype) for dtype in op.few()]
    inputs = [x for x, _ in examples]
    modes = list(op.ways().values())
    if "async" in op.modes:
        modes.append({"use_calc_stream": False, "fenced": False})

    def body(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [op(x, **mode) for x in inputs for mode in modes]

    graph = compile_whole(body)
    wants = [want for _, want in examples for _ in modes]
    settle(comm)  # eager calls without fences need it, before and after
    results = graph(inputs), body(inputs)
    settle(comm)
    for actual, eager, want in zip(*results, wants, strict=True):
        assert_bits_equal(actual, eager, "compiled against eager")
        assert_bits_equal(actual, want, "compiled")


def compiled_out(comm: Any, op: Operator) -> None:
    """Compiled with out=, strided too, the values land in the given tensor and nowhere else."""
    x, want = op.example(comm)
    graph = compile_whole(lambda x, out: op(x, out=out))
    for layout in STRIDED:
        frame = Framed(tuple(want.shape), want.dtype, comm.device, layout)
        wanted = want if op.writes(comm) else frame.view.clone()
        actual = graph(x, frame.view)
        assert_bits_equal(frame.view, wanted, f"out {layout}")
        if op.writes(comm):
            assert_bits_equal(actual, want, f"result with out {layout}")
        frame.intact(layout)


def refusals(comm: Any, op: Operator) -> None:
    """A wrong call is one of our errors with the numbers in it; nothing is launched by it."""
    x, want = op.example(comm)
    before = calls(comm)
    with raises(RingError, ABSENT_RING):
        op(x, ABSENT_RING)
    with raises(ArgumentError, "use_calc_stream=False"):
        op(x, use_calc_stream=True, sync_op=False)
    with raises(ArgumentError, "list"):
        op([1.0, 2.0])
    with raises(DeviceError, "meta", comm.device):
        op(x.to("meta"))
    with raises(DeviceError, "sparse"):
        op(x.to_sparse())
    if x.device.type == "cpu":
        with raises(DeviceError, "quantized"):
            op(torch.quantize_per_tensor(x.float(), 0.1, 0, torch.qint8))
    if op.adjoint is not None:
        _refused_with_gradient(op, x, want)
    if op.divides:
        rows = x.shape[0] + 1
        with raises(ShapeError, rows, comm.size):
            op(x.new_empty(rows, *x.shape[1:]))
    if op.writes(comm):
        _refused_outputs(op, x, want)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    assert_bits_equal(op(x), want, "after refusals")


def _refused_with_gradient(op: Operator, x: torch.Tensor, want: torch.Tensor) -> None:
    """Wanting a gradient takes another way down, which must refuse as much as the plain one."""
    with raises(DeviceError, "meta", x.device):
        op(x.to("meta").requires_grad_())
    with raises(RingError, ABSENT_RING):
        op(x.clone().requires_grad_(), ABSENT_RING)
    with raises(ArgumentError, "out", "detach", tuple(want.shape)):
        op(x.clone().requires_grad_(), out=torch.empty_like(want, device=x.device))
    with raises(ArgumentError, "use_calc_stream=False"):
        op(x.clone().requires_grad_(), sync_op=False)


def _refused_outputs(op: Operator, x: torch.Tensor, want: torch.Tensor) -> None:
    shape = tuple(want.shape)
    long = x.new_empty((shape[0] + 1, *shape[1:]))
    with raises(ShapeError, tuple(long.shape)):
        op(x, out=long)
    with raises(DtypeError, "int16", x.dtype):
        op(x, out=torch.empty(shape, dtype=torch.int16, device=x.device))
    with raises(DeviceError, "meta"):
        op(x, out=x.new_empty(shape, device="meta"))
    with raises(ArgumentError, "overlaps itself", shape):
        op(x, out=x.new_empty(1).expand(shape))
    with raises(ArgumentError, "overlaps itself"):
        op(x, out=x.new_empty(x.numel() + want.numel()).as_strided(shape, [1] * len(shape)))


def gradients(comm: Any, op: Operator) -> None:
    """Gradients are the adjoint's bits, eager and compiled, for strided inputs too."""
    if op.adjoint is None:
        return
    ways = {name: functools.partial(op, **mode) for name, mode in op.ways().items()}
    ways["compiled"] = compile_whole(lambda x: op(x))
    for layout in ("contiguous", "transposed", "expanded"):
        inputs = op.inputs(comm, op.shape(comm.size), torch.float64, layout=layout, seed=3)
        shapes = [op.formula([bits(x) for x in inputs], rank).shape for rank in range(comm.size)]
        drawn = [sample(rank, s, torch.float64, seed=9) for rank, s in enumerate(shapes)]
        # The gradient of a plain sum is expanded from one element: the strided case.
        ones = [torch.ones(()).double().expand(shape) for shape in shapes]
        for name, call in ways.items():
            for weights in (drawn, ones):
                x = inputs[comm.rank].detach().requires_grad_()
                call(x).backward(weights[comm.rank].to(comm.device))
                want = op.adjoint([wide(w) for w in weights], comm.rank)
                assert_bits_equal(x.grad, want, f"gradient {layout} {name}")
    with torch.no_grad():
        assert_equal(op(x).requires_grad, False, "requires_grad under no_grad")


def wrong_roots(comm: Any, op: Operator) -> None:
    """A root outside the ring is refused with both numbers; the default root is 0."""
    x, _ = op.example(comm)
    before = calls(comm)
    for root in (-1, comm.size, True, 0.0, None):
        with raises(PeerError, f"root={root!r}"):
            op.call(x, root=root)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    assert_bits_equal(op.call(x), op.call(x, root=0), "default root")


SUITES = (
    values,
    layouts,
    lazy_bits,
    sharing,
    waiting,
    raw,
    compiled,
    compiled_out,
    refusals,
    gradients,
)


def suite_of(op: Operator, *more: Suite, only: tuple[Suite, ...] = (), **others: Operator) -> Any:
    """Return the test of an operator: a file has it under a name that begins with ``test``.

    Args:
        op: The operator that every suite runs on.
        more: Suites in addition.
        only: The suites that run on ``op``, in place of all.
        others: Its variants by name. Their values are checked, and those with a gradient are also
            compiled and differentiated.

    Returns:
        A test on live ranks, which has a case for each suite and variant.
    """
    cases = [("", suite, op) for suite in (*(only or SUITES), *more)]
    for name, other in others.items():
        suites = (values, compiled, gradients) if other.adjoint else (values,)
        cases += [(f"{name}-", suite, other) for suite in suites]

    @pytest.mark.parametrize(
        ("suite", "op"),
        [pytest.param(suite, op, id=name + suite.__name__) for name, suite, op in cases],
    )
    def test_suite(ranks: Ranks, suite: Suite, op: Operator) -> None:
        ranks(suite, op)

    return test_suite
