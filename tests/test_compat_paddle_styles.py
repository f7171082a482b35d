"""compat.paddle: names of Paddle 3 in place, reductions of tensor parallelism, codes of dtypes."""

from typing import Any

import torch

from commlib.compat import paddle
from commlib.errors import ArgumentError, DtypeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.runs_on import runs_on

PAIRS = ("use_calc_stream", True, "ring_id", 0, "use_model_parallel", True)


@runs_on("ranks")
def test_mp_allreduce_sum_in_all_styles(comm: Any) -> None:
    """Paddle's own layers pass use_model_parallel."""
    plain, pairs = paddle._C_ops, paddle._legacy_C_ops
    x = sample(comm.rank, (3,), torch.float32).to(comm.device)
    want = paddle.c_allreduce_sum(x, use_calc_stream=True)
    assert_bits_equal(plain.mp_allreduce_sum(x, 0, True, True), want)
    assert_bits_equal(pairs.mp_allreduce_sum(x, *PAIRS), want)
    assert_bits_equal(plain.mp_allreduce_sum(x, ring_id=0, use_model_parallel=False), want)
    calls: list[Any] = [
        lambda buf: plain.mp_allreduce_sum_(buf, 0, True, True),
        lambda buf: pairs.mp_allreduce_sum_(buf, *PAIRS),
        lambda buf: pairs.mp_allreduce_sum(buf, buf, *PAIRS),
    ]
    for call in calls:
        buf = x.clone()
        assert call(buf) is buf
        assert_bits_equal(buf, want)


@runs_on("ranks")
def test_other_reductions_of_tensor_parallelism(comm: Any) -> None:
    for op in ("max", "min", "prod"):
        x = sample(comm.rank, (3,), torch.float32).to(comm.device)
        want = getattr(paddle, f"c_allreduce_{op}")(x, use_calc_stream=True)
        assert_bits_equal(getattr(paddle, f"mp_allreduce_{op}")(x, 0, True, True), want)
        buf = x.clone()
        assert getattr(paddle._legacy_C_ops, f"mp_allreduce_{op}_")(buf, *PAIRS) is buf
        assert_bits_equal(buf, want)


@runs_on("ranks")
def test_names_of_paddle_3_in_place(comm: Any) -> None:
    x = sample(comm.rank, (4, 3), torch.float32).to(comm.device)
    for name in ("all_reduce", "broadcast", "reduce"):
        want, buf = getattr(paddle, name)(x, 0), x.clone()
        assert getattr(paddle, f"{name}_")(buf, 0) is buf
        assert_bits_equal(buf, want if name != "reduce" or comm.rank == 0 else x, name)
    buf = x.clone()
    paddle.all_reduce_(buf, reduce_type=1)
    assert_bits_equal(buf, paddle.all_reduce(x, reduce_type=1))
    with raises(ArgumentError, "all_reduce_", "reduce_type=9"):
        paddle.all_reduce_(x, reduce_type=9)
    statistics = [torch.zeros(3), torch.ones(3), torch.ones(3), torch.zeros(3)]
    one, two = ([each.to(comm.device) for each in statistics] for _ in range(2))
    want = paddle.sync_batch_norm(x, *one)
    got = paddle.sync_batch_norm_(x, *two)
    assert_equal((len(got), got[1] is two[0], got[5].numel()), (6, True, 0), "six results")
    for a, b in zip(got[:5], want, strict=True):
        assert_bits_equal(a, b)


@runs_on("ranks")
def test_alltoall_single(comm: Any) -> None:
    x = torch.arange(4.0, device=comm.device) + 10 * comm.rank
    out = torch.empty(4, device=comm.device)
    paddle.alltoall_single(x, out)
    assert_bits_equal(out, paddle.alltoall(x, use_calc_stream=True))


@runs_on("cpu_ranks")
def test_codes_and_orders(comm: Any) -> None:
    tensors = [torch.ones(3), torch.zeros(2)]
    for dtype in (5, "float32", torch.float32):
        views, fused = paddle.coalesce_tensor(tensors, dtype, copy_data=True)
        assert_equal((views[0].tolist(), fused.dtype), ([1.0] * 3, torch.float32), str(dtype))
    pairs = ("dtype", 5, "copy_data", True)
    assert_equal(paddle._legacy_C_ops.coalesce_tensor(tensors, *pairs)[0][0].tolist(), [1.0] * 3)
    with raises(DtypeError, "coalesce_tensor: dtype=99", "pass dtype=torch.float32"):
        paddle.coalesce_tensor(tensors, 99)
    legacy: Any = paddle
    with raises(ArgumentError, "c_gen_nccl_id: rank='127.0.0.1:1'", "by keyword"):
        legacy.c_gen_xccl_id("127.0.0.1:1", ["127.0.0.1:2"], 0, 0)
    with raises(ArgumentError, "c_comm_init_multitrainer: ntrainers=None", "by keyword"):
        legacy.c_comm_init_multitrainer(None, 2, 0)
