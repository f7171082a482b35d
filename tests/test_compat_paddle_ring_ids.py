"""The legacy operators pass their ring_id on: ring 5 is the only ring of this process."""

from collections.abc import Callable, Iterator

import pytest
import torch

import commlib
from commlib.compat import paddle
from commlib.errors import RingError

RING = 5
ONE = torch.ones(1, dtype=torch.int64)


@pytest.fixture(autouse=True)
def _only_ring_5() -> Iterator[None]:
    commlib.CommContextManager.instance().create(RING, [0], device="cpu")
    yield
    commlib.shutdown()


def summaries() -> list[torch.Tensor]:
    return [torch.full((2,), value) for value in (1e4, 0.0, 1e4)]


CALLS: dict[str, Callable[[torch.Tensor], object]] = {
    "alltoall": lambda x: paddle.alltoall(x, RING),
    "barrier": lambda x: paddle.barrier(x, RING),
    "c_allgather": lambda x: paddle.c_allgather(x, RING, 1),
    "c_allreduce_max": lambda x: paddle.c_allreduce_max(x, RING),
    "c_allreduce_min": lambda x: paddle.c_allreduce_min(x, RING),
    "c_allreduce_prod": lambda x: paddle.c_allreduce_prod(x, RING),
    "c_allreduce_sum": lambda x: paddle.c_allreduce_sum(x, RING),
    "c_broadcast": lambda x: paddle.c_broadcast(x, RING),
    "c_concat": lambda x: paddle.c_concat(x, 0, 1, RING),
    "c_identity": lambda x: paddle.c_identity(x, RING),
    "c_reduce_max": lambda x: paddle.c_reduce_max(x, RING),
    "c_reduce_min": lambda x: paddle.c_reduce_min(x, RING),
    "c_reduce_prod": lambda x: paddle.c_reduce_prod(x, RING),
    "c_reduce_sum": lambda x: paddle.c_reduce_sum(x, RING),
    "c_reducescatter": lambda x: paddle.c_reducescatter(x, RING, 1),
    "c_scatter": lambda x: paddle.c_scatter(x, RING, 0, 1),
    "c_softmax_with_cross_entropy": lambda x: paddle.c_softmax_with_cross_entropy(
        x, ONE[:, None] * 0, ring_id=RING
    ),
    "c_split": lambda x: paddle.c_split(x, 0, 1, RING),
    "c_sync_comm_stream": lambda x: paddle.c_sync_comm_stream(x, RING),
    "c_wait_comm": lambda x: paddle.c_wait_comm(x, RING),
    "c_wait_compute": lambda x: paddle.c_wait_compute(x, RING),
    "class_center_sample": lambda x: paddle.class_center_sample(ONE, 4, 2, RING),
    "data_norm": lambda x: paddle.data_norm(x, *summaries(), sync_stats=True, ring_id=RING),
    "distributed_fused_lamb": lambda x: paddle.distributed_fused_lamb(
        [x.requires_grad_()], ring_ids=[RING]
    ),
    "global_gather": lambda x: paddle.global_gather(x, ONE, ONE, RING),
    "global_scatter": lambda x: paddle.global_scatter(x, ONE, ONE, RING),
    "margin_cross_entropy": lambda x: paddle.margin_cross_entropy(x, ONE * 0, ring_id=RING),
    "mp_allreduce_sum": lambda x: paddle.mp_allreduce_sum(x, RING),
    "partial_allgather": lambda x: paddle.partial_allgather(x, 1, 0, RING),
    "partial_allgather_": lambda x: paddle.partial_allgather_(x, 1, 0, RING),
    "all_gather": lambda x: paddle.all_gather(x, RING, 1),
    "all_reduce": lambda x: paddle.all_reduce(x, RING),
    "all_to_all": lambda x: paddle.all_to_all(x, RING),
    "broadcast": lambda x: paddle.broadcast(x, RING),
    "c_allreduce_avg": lambda x: paddle.c_allreduce_avg(x, RING),
    "c_allreduce_avg_": lambda x: paddle.c_allreduce_avg_(x, RING),
    "c_allreduce_max_": lambda x: paddle.c_allreduce_max_(x, RING),
    "c_allreduce_min_": lambda x: paddle.c_allreduce_min_(x, RING),
    "c_allreduce_prod_": lambda x: paddle.c_allreduce_prod_(x, RING),
    "c_allreduce_sum_": lambda x: paddle.c_allreduce_sum_(x, RING),
    "c_broadcast_": lambda x: paddle.c_broadcast_(x, RING),
    "c_identity_": lambda x: paddle.c_identity_(x, RING),
    "c_reduce_avg": lambda x: paddle.c_reduce_avg(x, RING),
    "c_reduce_avg_": lambda x: paddle.c_reduce_avg_(x, RING),
    "c_reduce_max_": lambda x: paddle.c_reduce_max_(x, RING),
    "c_reduce_min_": lambda x: paddle.c_reduce_min_(x, RING),
    "c_reduce_prod_": lambda x: paddle.c_reduce_prod_(x, RING),
    "c_reduce_sum_": lambda x: paddle.c_reduce_sum_(x, RING),
    "c_softmax_with_multi_label_cross_entropy": lambda x: (
        paddle.c_softmax_with_multi_label_cross_entropy(
            x, ONE[:, None] * 0, torch.ones(1, 1), ring_id=RING
        )
    ),
    "c_sync_comm_stream_": lambda x: paddle.c_sync_comm_stream_(x, RING),
    "dist_concat": lambda x: paddle.dist_concat(x, RING, 1),
    "mp_allreduce_sum_": lambda x: paddle.mp_allreduce_sum_(x, RING),
    "mp_allreduce_max": lambda x: paddle.mp_allreduce_max(x, RING),
    "mp_allreduce_max_": lambda x: paddle.mp_allreduce_max_(x, RING),
    "mp_allreduce_min": lambda x: paddle.mp_allreduce_min(x, RING),
    "mp_allreduce_min_": lambda x: paddle.mp_allreduce_min_(x, RING),
    "mp_allreduce_prod": lambda x: paddle.mp_allreduce_prod(x, RING),
    "mp_allreduce_prod_": lambda x: paddle.mp_allreduce_prod_(x, RING),
    "all_reduce_": lambda x: paddle.all_reduce_(x, RING),
    "broadcast_": lambda x: paddle.broadcast_(x, RING),
    "reduce_": lambda x: paddle.reduce_(x, RING),
    "sync_batch_norm_": lambda x: paddle.sync_batch_norm_(
        x, *(torch.ones(x.shape[1]) for _ in range(4)), ring_id=RING
    ),
    "reduce": lambda x: paddle.reduce(x, RING),
    "reduce_scatter": lambda x: paddle.reduce_scatter(x, RING, 1),
    "sync_batch_norm": lambda x: paddle.sync_batch_norm(
        x, *(torch.ones(x.shape[1]) for _ in range(4)), ring_id=RING
    ),
}
HIDDEN = torch.full((1, 2, 2), 0.5)
SQUARE, WIDE, SCALE = torch.eye(2), torch.ones(2, 4), torch.ones(2)
HEAD = torch.ones(3, 1, 2, 2)
BLOCKS: dict[str, Callable[[int], object]] = {
    "fused_attention": lambda ring: paddle.fused_attention(HIDDEN, HEAD, SQUARE, ring_id=ring),
    "fused_feedforward": lambda ring: paddle.fused_feedforward(
        HIDDEN, WIDE, WIDE.t(), ring_id=ring
    ),
    "fused_multi_head_attention": lambda ring: paddle.fused_multi_head_attention(
        HIDDEN, HEAD, SQUARE, ring_id=ring
    ),
    "fused_multi_transformer": lambda ring: paddle.fused_multi_transformer(
        *(HIDDEN, [SCALE], None, [HEAD], None, [SQUARE], None, [SCALE], None, [WIDE], None),
        *([WIDE.t()], None),
        ring_id=ring,
    ),
}
# Counts, ids and streams know no ring; a ring of one has nobody to send to.
WITHOUT = {
    *("assign_pos", "c_comm_init", "c_embedding", "c_gen_nccl_id", "c_sync_calc_stream"),
    *("limit_by_capacity", "number_count", "prune_gate_by_capacity", "random_routing"),
    *("partial_recv", "partial_send", "recv_v2", "send_v2"),
    *("p_recv", "p_recv_array", "p_send", "p_send_array", "c_sync_calc_stream_"),
    *("coalesce_tensor", "partial_concat", "partial_sum"),
    *("moe_combine", "moe_gate_dispatch", "moe_permute", "moe_unpermute"),
    *("c_comm_init_all", "c_comm_init_multitrainer", "c_gen_xccl_id", "comm_init_all"),
    *("LayerDesc", "PipelineLayer", "SharedLayerDesc"),
    "DistributedFusedLamb",  # over ring 0, as upstream
    "alltoall_single",  # it takes a group
}


@pytest.mark.parametrize("name", CALLS)
def test_ring_id(name: str) -> None:
    """On ring 0, which does not exist, a call would raise."""
    CALLS[name](torch.full((1, 2), 0.5))


@pytest.mark.parametrize(
    "name",
    [
        "c_concat",
        "c_identity",
        "c_split",
        "data_norm",
        "global_gather",
        "global_scatter",
        "mp_allreduce_sum",
    ],
)
def test_ring_id_of_a_gradient(name: str) -> None:
    x = torch.full((1, 2), 0.5, requires_grad=True)
    result = CALLS[name](x)
    y = result[0] if isinstance(result, tuple) else result
    assert isinstance(y, torch.Tensor)

    y.sum().backward()

    assert x.grad is not None


@pytest.mark.parametrize("name", BLOCKS)
def test_ring_id_of_a_block(name: str) -> None:
    """The default, -1, means no ring."""
    BLOCKS[name](RING)
    with pytest.raises(RingError, match="ring 0"):
        BLOCKS[name](0)


def test_every_legacy_operator_is_here() -> None:
    assert {*CALLS, *WITHOUT, *BLOCKS} == {*paddle.__all__}
