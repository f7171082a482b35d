"""compat.paddle: calls of Paddle's own code in the attribute style, with outputs and attributes."""

from typing import Any

import pytest
import torch

from commlib.compat import paddle
from commlib.errors import ArgumentError, DtypeError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.runs_on import runs_on

pairs, plain = paddle._legacy_C_ops, paddle._C_ops
CALC = ("use_calc_stream", True, "ring_id", 0)
RAW = ("use_calc_stream", False, "ring_id", 0)


@runs_on("ranks")
def test_outputs(comm: Any) -> None:
    """The result is in the given output; the input is not changed."""
    x = sample(comm.rank, (3, 2), torch.float32).to(comm.device)
    saved = x.clone()
    calls: dict[str, tuple[Any, ...]] = {"c_broadcast": ("root", 1), "c_reduce_sum": ("root_id", 1)}
    calls |= {"c_reduce_max": ("root_id", 0), "c_allreduce_prod": (), "c_allreduce_sum": ()}
    for name, attributes in calls.items():
        want = getattr(pairs, name)(x, *attributes, *CALC)
        for stream in (CALC, RAW):
            out = torch.full_like(x, 9.0)
            plain.c_sync_calc_stream()
            assert getattr(pairs, name)(x, out, *attributes, *stream) is out
            assert pairs.c_sync_comm_stream([out], [out], "ring_id", 0)[0] is out
            assert_bits_equal(out, want, name)
            assert_bits_equal(x, saved, "the input")
    out = torch.zeros_like(x)
    assert pairs.barrier(x, out, "ring_id", 0) is out
    assert_bits_equal(out, plain.c_allreduce_sum(x, use_calc_stream=True), "barrier")
    buffer = x.clone()
    assert pairs.barrier(buffer, buffer, "ring_id", 0) is buffer
    assert_bits_equal(buffer, out, "barrier in place")
    for name in ("c_sync_calc_stream", "c_sync_comm_stream"):
        other = torch.zeros_like(x)
        assert getattr(pairs, name)(x, x) is x
        assert getattr(pairs, name)(x, other) is other
        assert_bits_equal(other, x, name)


@runs_on("cpu_ranks")
def test_wrong_outputs(comm: Any) -> None:
    x = torch.ones(3)
    with raises(ShapeError, "c_broadcast: the output has shape (2,); expected (3,)"):
        pairs.c_broadcast(x, torch.ones(2), *CALC)
    with raises(DtypeError, "c_reduce_sum: the output is torch.int64; expected torch.float32"):
        pairs.c_reduce_sum(x, torch.ones(3, dtype=torch.int64), *CALC)
    with raises(ArgumentError, "c_broadcast: 3 tensors before the attributes"):
        pairs.c_broadcast(x, x, x, *CALC)
    with raises(ArgumentError, "c_broadcast", "x is list; expected a torch.Tensor"):
        pairs.c_broadcast([x], [x], *CALC)
    with raises(ArgumentError, "c_sync_comm_stream: 2 outputs for 1 results"):
        pairs.c_sync_comm_stream([x], [x, x])
    with raises(ArgumentError, "coalesce_tensor: 2 tensors before", "and the buffer"):
        pairs.coalesce_tensor([x], [x], "dtype", 5)


@pytest.mark.parametrize("length", [5, 3, 9], ids=["fits", "short", "long"])
def test_outputs_of_one_buffer(length: int) -> None:
    """Parameters become views of the buffer; one that fits keeps its memory."""
    weights = [torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.ones(3, 1))]
    buffer = torch.zeros(length)
    alias = buffer[:1]
    attributes = ("copy_data", True, "use_align", False, "dtype", weights[0].dtype)
    outputs, flat = pairs.coalesce_tensor(weights, weights, buffer, *attributes)
    assert flat is buffer and all(a is b for a, b in zip(outputs, weights, strict=True))
    assert_equal(flat.tolist(), [1.0, 2.0, 1.0, 1.0, 1.0])
    assert_equal(alias.tolist(), [1.0 if length == 5 else 0.0])
    flat.fill_(4.0)
    assert_equal([one.tolist() for one in weights], [[4.0] * 2, [[4.0]] * 3])
    assert_equal([one.requires_grad for one in weights], [True, True])
    with raises(DtypeError, "an output is torch.int64; expected torch.float32"):
        pairs.coalesce_tensor(weights, weights, buffer.long(), *attributes)


@runs_on("ranks")
def test_attributes_without_effect(comm: Any) -> None:
    x = sample(comm.rank, (4, 2), torch.float32).to(comm.device)
    assert_bits_equal(pairs.all_to_all(x, *CALC), plain.all_to_all(x))
    assert_bits_equal(pairs.c_identity(x, "with_quant_attr", False), x)
    if comm.rank:
        pairs.p_send_array([x], "ring_id", 0, "peer", 0, "dynamic_shape", True)
    else:
        shapes = ("out_shapes", [[4, 2]], "use_calc_stream", True)
        (got,) = pairs.p_recv_array("peer", 1, *shapes)
        assert_bits_equal(got, sample(1, (4, 2), torch.float32))
    size = ("dtype", 5, "copy_data", True, "user_defined_size_of_dtype", 2)
    assert_equal(pairs.coalesce_tensor([x], *size)[0][0].tolist(), x.tolist())
    with raises(ArgumentError, "all_to_all: attribute 'use_calc'; expected one of x, ring_id"):
        pairs.all_to_all(x, "use_calc", True)
    with raises(ArgumentError, "c_identity: attribute 'dynamic_shape'"):
        pairs.c_identity(x, "dynamic_shape", True)


def test_inputs_in_the_order_of_upstream() -> None:
    ids = torch.tensor([[0, 2], [0, 2]])
    total = plain.number_count(ids, 4).cumsum(0)
    for style in (pairs, plain):
        assert_equal(style.assign_pos(ids, total, total[-1]).tolist(), [2, 0, 3, 1])
    values, chances = torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0.5, 0.5])
    want = plain.random_routing(ids, values, chances)
    assert_equal(want.tolist(), [[0, -1], [0, 2]])
    assert_equal(pairs.random_routing(chances, values, ids).tolist(), want.tolist())
