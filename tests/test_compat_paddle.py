"""compat.paddle: the legacy names give the values, defaults, errors and gradients of upstream."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib.compat import paddle
from commlib.errors import (
    ArgumentError,
    DtypeError,
    PeerError,
    RingError,
    ShapeError,
)
from tests.support.checks import (
    assert_bits_equal,
    assert_equal,
    raises,
)
from tests.support.operator import ABSENT_RING, calls
from tests.support.runs_on import runs_on

Tensor = torch.Tensor

# -- argument orders and defaults, as the operators of Paddle 2.6 declare them ---------------------

NEEDED = inspect.Parameter.empty
CALC = ("use_calc_stream", False)
X, RING = ("x", NEEDED), ("ring_id", 0)
REDUCE = [X, RING, CALC, ("use_model_parallel", False)]
TO_ROOT = [X, RING, ("root_id", 0), CALC]
NOTHING = ("x", None)
COUNTS = [("local_count", NEEDED), ("global_count", NEEDED)]
SLICE = [("num", 1), ("id", 0)]
LOGITS = [("logits", NEEDED), ("label", NEEDED)]
SUMMARIES = [("batch_size", NEEDED), ("batch_sum", NEEDED), ("batch_square_sum", NEEDED)]
SIGNATURES: dict[str, list[tuple[str, Any]]] = {
    "alltoall": [X, RING, CALC],
    "assign_pos": [X, ("cum_count", NEEDED), ("eff_num_len", None)],
    "barrier": [NOTHING, RING],
    "c_allgather": [X, RING, ("nranks", None), CALC],  # required; Python wants a default there
    "c_allreduce_max": REDUCE,
    "c_allreduce_min": REDUCE,
    "c_allreduce_prod": REDUCE,
    "c_allreduce_sum": REDUCE,
    "c_broadcast": [X, RING, ("root", 0), CALC],
    "c_comm_init": [
        ("nranks", NEEDED),
        ("rank", NEEDED),
        ("device_id", -1),
        RING,
        ("endpoints", ""),
        NOTHING,
    ],
    "c_concat": [
        X,
        ("rank", 0),
        ("nranks", 1),
        RING,
        ("use_calc_stream", True),
        ("use_model_parallel", True),
    ],
    "c_embedding": [("weight", NEEDED), X, ("start_index", 0), ("vocab_size", -1)],
    "c_gen_nccl_id": [("rank", NEEDED), ("endpoint", ""), ("other_endpoints", ()), RING],
    "c_identity": [X, RING, ("use_calc_stream", True), ("use_model_parallel", True)],
    "c_reduce_max": TO_ROOT,
    "c_reduce_min": TO_ROOT,
    "c_reduce_prod": TO_ROOT,
    "c_reduce_sum": TO_ROOT,
    "c_reducescatter": [X, RING, ("nranks", 1), CALC],
    "c_scatter": [X, RING, ("root", 0), ("nranks", 0), CALC],
    "c_softmax_with_cross_entropy": [
        *LOGITS,
        ("ignore_index", -100),
        RING,
        ("rank", 0),
        ("nranks", 0),
    ],
    "c_split": [X, ("rank", 0), ("nranks", 1), RING, CALC, ("use_model_parallel", True)],
    "c_sync_calc_stream": [NOTHING],
    "c_sync_comm_stream": [NOTHING, RING],
    "c_wait_comm": [NOTHING, RING],
    "c_wait_compute": [NOTHING, RING],
    "class_center_sample": [
        ("label", NEEDED),
        ("num_classes", NEEDED),
        ("num_samples", NEEDED),
        RING,
        ("rank", 0),
        ("nranks", 1),
        ("fix_seed", False),
        ("seed", 0),
    ],
    "data_norm": [
        X,
        *SUMMARIES,
        ("scale_w", None),
        ("bias", None),
        ("epsilon", 1e-4),
        ("slot_dim", -1),
        ("summary_decay_rate", 0.9999999),
        ("enable_scale_and_shift", False),
        ("data_layout", "NCHW"),
        ("sync_stats", False),
        RING,
    ],
    "distributed_fused_lamb": [
        ("parameters", NEEDED),
        ("learning_rate", 0.001),
        ("lamb_weight_decay", 0.01),
        ("beta1", 0.9),
        ("beta2", 0.999),
        ("epsilon", 1e-6),
        ("max_global_grad_norm", -1.0),
        ("exclude_from_weight_decay_fn", None),
        ("clip_after_allreduce", True),
        ("is_grad_scaled_by_nranks", True),
        ("alignment", 128),
        ("use_master_param_norm", True),
        ("acc_steps", 1),
        ("use_master_acc_grad", True),
        ("nranks", None),
        ("ring_ids", (0,)),
        ("use_hierarchical_allreduce", False),
    ],
    "global_gather": [X, *COUNTS, RING, CALC],
    "global_scatter": [X, *COUNTS, RING, CALC],
    "limit_by_capacity": [("expert_count", NEEDED), ("capacity", NEEDED), ("n_worker", NEEDED)],
    "margin_cross_entropy": [
        *LOGITS,
        ("return_softmax", False),
        RING,
        ("rank", 0),
        ("nranks", 1),
        ("margin1", 1.0),
        ("margin2", 0.5),
        ("margin3", 0.0),
        ("scale", 64.0),
    ],
    "mp_allreduce_sum": [X, RING, CALC, ("use_model_parallel", True)],
    "number_count": [("numbers", NEEDED), ("upper_range", NEEDED)],
    "partial_allgather": [X, ("nranks", NEEDED), ("rank", NEEDED), RING, CALC],
    "partial_recv": [
        ("out_shape", ()),
        ("dtype", torch.float32),
        ("peer", 0),
        RING,
        CALC,
        *SLICE,
        ("device", None),
    ],
    "partial_send": [X, RING, ("peer", 0), CALC, *SLICE],
    "prune_gate_by_capacity": [
        ("gate_idx", NEEDED),
        ("expert_count", NEEDED),
        ("n_expert", NEEDED),
        ("n_worker", NEEDED),
    ],
    "random_routing": [
        ("topk_idx", NEEDED),
        ("topk_value", NEEDED),
        ("prob", NEEDED),
        ("topk", 2),
    ],
    "recv_v2": [
        ("out_shape", ()),
        ("dtype", torch.float32),
        ("peer", 0),
        RING,
        CALC,
        ("dynamic_shape", False),
        ("device", None),
    ],
    "send_v2": [X, RING, ("peer", 0), CALC, ("dynamic_shape", False)],
}


# The names that came after Paddle 2.6, and the forms in place; test_compat_paddle_phi.py has their
# values and refusals, test_compat_paddle_layers.py those of what is more than a collective.
NEWER: dict[str, list[tuple[str, Any]]] = {
    "all_gather": [X, RING, ("nranks", 0)],
    "all_reduce": [X, RING, ("reduce_type", 0)],
    "all_reduce_": [X, RING, ("reduce_type", 0)],
    "all_to_all": [X, RING],
    "alltoall_single": [
        *(("in_tensor", NEEDED), ("out_tensor", NEEDED), ("in_split_sizes", None)),
        *(("out_split_sizes", None), ("group", None), ("sync_op", True)),
    ],
    "broadcast": [X, RING, ("root", 0)],
    "broadcast_": [X, RING, ("root", 0)],
    "c_allreduce_avg": REDUCE,
    **{f"c_allreduce_{op}_": REDUCE for op in ("avg", "max", "min", "prod", "sum")},
    "c_broadcast_": [X, RING, ("root", 0), CALC],
    "c_comm_init_all": [("devices", ()), RING],
    "c_comm_init_multitrainer": [
        ("ntrainers", NEEDED),
        ("trainer_id", NEEDED),
        ("devices", ()),
        RING,
        NOTHING,
    ],
    "c_gen_xccl_id": SIGNATURES["c_gen_nccl_id"],
    "c_identity_": SIGNATURES["c_identity"],
    "c_reduce_avg": TO_ROOT,
    **{f"c_reduce_{op}_": TO_ROOT for op in ("avg", "max", "min", "prod", "sum")},
    "c_softmax_with_multi_label_cross_entropy": [
        *LOGITS,
        ("smooth_weight", NEEDED),
        ("ignore_index", -100),
        ("sum_multi_label_loss", True),
        RING,
        ("rank", 0),
        ("nranks", 0),
    ],
    "c_sync_calc_stream_": [X],
    "c_sync_comm_stream_": [X, RING],
    "coalesce_tensor": [
        ("input", NEEDED),
        ("dtype", NEEDED),
        ("copy_data", False),
        ("set_constant", False),
        ("persist_output", False),
        ("constant", 0.0),
        ("use_align", True),
        ("align_size", -1),
        ("size_of_dtype", -1),
        ("concated_shapes", ()),
        ("concated_ranks", ()),
    ],
    "comm_init_all": [("devices", ()), RING],
    "dist_concat": [X, RING, ("nranks", 1)],
    "moe_combine": [X, ("combine_weights", NEEDED), ("scatter_index", NEEDED)],
    "moe_gate_dispatch": [
        *(X, ("gate_logits", NEEDED), ("corr_bias", NEEDED), ("k", NEEDED), ("capacity", NEEDED)),
        ("use_pad", True),
    ],
    "moe_permute": [
        *((name, NEEDED) for name in ("hidden_states", "scale", "expert_routemap_topk")),
        *((name, NEEDED) for name in ("expert_prob_topk", "num_experts", "tokens_per_expert")),
        *(("padding_alignment", NEEDED), ("do_gather", True), ("using_ue8m0_scale", False)),
        *(("return_expert_indices", False), ("override_buffer_size", -1)),
    ],
    "moe_unpermute": [
        *((name, NEEDED) for name in ("hidden_states_unzipped", "zipped_expertwise_rowmap")),
        *((name, NEEDED) for name in ("expert_routemap_topk", "token_prob_unzipped")),
        *(("total_zipped_tokens_num", NEEDED), ("num_experts", NEEDED)),
        *(("use_mix_precision", True), ("using_weighted_combine", False)),
    ],
    "mp_allreduce_sum_": SIGNATURES["mp_allreduce_sum"],
    **{
        f"mp_allreduce_{op}{place}": SIGNATURES["mp_allreduce_sum"]
        for op in ("max", "min", "prod")
        for place in ("", "_")
    },
    "p_recv": [
        *(RING, ("peer", 0), ("dtype", torch.float32), ("out_shape", ())),
        ("dynamic_shape", False),
    ],
    "p_recv_array": [RING, ("peer", 0), ("dtype", torch.float32), ("out_shapes", ())],
    "p_send": [X, RING, ("peer", 0), ("dynamic_shape", False)],
    "p_send_array": [X, RING, ("peer", 0)],
    "partial_allgather_": SIGNATURES["partial_allgather"],
    "partial_concat": [X, ("start_index", 0), ("length", -1)],
    "partial_sum": [X, ("start_index", 0), ("length", -1)],
    "reduce": [X, RING, ("root_id", 0), ("reduce_type", 0)],
    "reduce_": [X, RING, ("root_id", 0), ("reduce_type", 0)],
    "reduce_scatter": [X, RING, ("nranks", 1)],
    "sync_batch_norm": [
        X,
        *((name, NEEDED) for name in ("mean", "variance", "scale", "bias")),
        *(("is_test", False), ("momentum", 0.9), ("epsilon", 1e-5), ("data_layout", "NCHW")),
        *(("use_global_stats", False), ("trainable_statistics", False), RING),
    ],
}
NEWER["sync_batch_norm_"] = NEWER["sync_batch_norm"]

# Their values and refusals are in other files.
ELSEWHERE = {
    "assign_pos",
    "c_softmax_with_cross_entropy",
    "class_center_sample",
    "data_norm",
    "distributed_fused_lamb",
    "global_gather",
    "global_scatter",
    "limit_by_capacity",
    "margin_cross_entropy",
    "number_count",
    "partial_allgather",
    "partial_recv",
    "partial_send",
    "prune_gate_by_capacity",
    "random_routing",
}
# What commlib adds, by keyword only.
OWN_ADDITIONS = {
    "assign_pos": ["total"],
    "c_split": ["legacy_grad"],
    "data_norm": ["behaviour"],
    "global_gather": ["capacity"],
    "global_scatter": ["capacity"],
}


def ordered(call: Callable[..., Tensor], *arguments: Any, **named: Any) -> Tensor:
    """Run a call of the comm stream as a legacy program does: the host waits before and after."""
    paddle.c_sync_calc_stream()
    result = call(*arguments, **named)
    assert_equal(paddle.c_sync_comm_stream(result) is result, True, "c_sync_comm_stream returns x")
    return result


def test_names() -> None:
    elsewhere = {"fused_attention", "fused_feedforward", "fused_multi_transformer"}
    elsewhere |= {"fused_multi_head_attention", "DistributedFusedLamb"}
    pipeline = {"LayerDesc", "PipelineLayer", "SharedLayerDesc"}
    assert paddle.__all__ == sorted({*SIGNATURES, *NEWER} | elsewhere | pipeline)


@pytest.mark.parametrize("name", [*SIGNATURES, *NEWER])
def test_arguments(name: str) -> None:
    parameters = inspect.signature(getattr(paddle, name)).parameters.values()
    legacy = [(p.name, p.default) for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    own_additions = [p.name for p in parameters if p.kind is not p.POSITIONAL_OR_KEYWORD]

    assert legacy == {**SIGNATURES, **NEWER}[name]
    assert own_additions == OWN_ADDITIONS.get(name, [])


@pytest.mark.parametrize("name", [*SIGNATURES, *NEWER])
def test_documented(name: str) -> None:
    assert f"``{name}``" in str(inspect.getdoc(getattr(paddle, name)))


# -- errors ----------------------------------------------------------------------------------------

FLOAT = torch.zeros(2, 4)


WrongCalls = list[tuple[Callable[[], Any], type[Exception], tuple[Any, ...]]]


def place(comm: Any) -> tuple[str, str]:
    """Return what an error says of where it is raised."""
    return "ring 0", f"rank {comm.rank} of 2"


def wrong_sizes(comm: Any, x: torch.Tensor) -> WrongCalls:
    context, other, me = place(comm), 1 - comm.rank, comm.rank
    said = ("nranks=3", "pass nranks=2", *context)
    return [
        (lambda: paddle.c_allgather(x), ArgumentError, ("nranks is missing", "pass nranks=2")),
        (lambda: paddle.c_allgather(x, nranks=3), ArgumentError, said),
        (lambda: paddle.c_allgather(x, nranks=1), ArgumentError, ("nranks=1",)),
        (lambda: paddle.c_reducescatter(x), ArgumentError, ("nranks=1", *context)),
        (lambda: paddle.c_reducescatter(x, nranks=3), ArgumentError, said),
        (lambda: paddle.c_scatter(x), ArgumentError, ("nranks=0", *context)),
        (lambda: paddle.c_scatter(x, nranks=3), ArgumentError, said),
        (lambda: paddle.c_concat(x), ArgumentError, ("nranks=1", *context)),
        (lambda: paddle.c_concat(x, me, 3), ArgumentError, said),
        (lambda: paddle.c_concat(x, other, 2), ArgumentError, (f"rank={other}", f"rank={me}")),
        (lambda: paddle.c_concat(x, 2, 2), ArgumentError, ("rank=2", *context)),
        (lambda: paddle.c_split(x), ArgumentError, ("nranks=1", *context)),
        (lambda: paddle.c_split(x, me, 3), ArgumentError, said),
        (lambda: paddle.c_split(x, other, 2), ArgumentError, (f"rank={other}", f"rank={me}")),
        (lambda: paddle.c_split(x, -1, 2), ArgumentError, ("rank=-1",)),
    ]


def wrong_peers(comm: Any, x: torch.Tensor) -> WrongCalls:
    context, me = place(comm), comm.rank
    return [
        (lambda: paddle.c_broadcast(x, root=-1), PeerError, ("root=-1", "0 to 1", *context)),
        (lambda: paddle.c_broadcast(x, root=2), PeerError, ("root=2", *context)),
        (lambda: paddle.c_broadcast(x, root=None), PeerError, ("root=None",)),
        (lambda: paddle.c_broadcast(x, root=True), PeerError, ("root=True",)),
        (lambda: paddle.c_reduce_sum(x, root_id=-1), PeerError, ("root_id=-1", *context)),
        (lambda: paddle.c_reduce_max(x, root_id=2), PeerError, ("root_id=2", "c_reduce_max")),
        (lambda: paddle.c_scatter(x, root=-1, nranks=2), PeerError, ("root=-1", *context)),
        (lambda: paddle.c_scatter(x, root=2, nranks=2), PeerError, ("root=2", *context)),
        (lambda: paddle.send_v2(x, peer=-1), PeerError, ("peer=-1", "send_v2", *context)),
        (lambda: paddle.send_v2(x, peer=2), PeerError, ("peer=2", *context)),
        (lambda: paddle.send_v2(x, peer=me), PeerError, (f"peer={me}",)),
        (lambda: paddle.recv_v2([2], peer=-1), PeerError, ("peer=-1", "recv_v2", *context)),
        (lambda: paddle.recv_v2([2], peer=2), PeerError, ("peer=2", *context)),
        (lambda: paddle.recv_v2([2], peer=me), PeerError, (f"peer={me}",)),
    ]


def wrong_tensors(comm: Any, x: torch.Tensor) -> WrongCalls:
    context, other, me = place(comm), 1 - comm.rank, comm.rank
    odd, scalar = x.new_zeros(3, 5), x.new_zeros(())
    listed: Any = [1.0]
    return [
        (lambda: paddle.recv_v2(peer=other), ShapeError, ("out_shape=()", *context)),
        (lambda: paddle.recv_v2([2, 0], peer=other), ShapeError, ("(2, 0)", "1 or above")),
        (lambda: paddle.recv_v2([-1], peer=other), ShapeError, ("(-1,)",)),
        (lambda: paddle.recv_v2([2], 99, other), DtypeError, ("dtype=99", "float32", *context)),
        (lambda: paddle.recv_v2([2], "half", other), DtypeError, ("'half'", "float16")),
        (lambda: paddle.c_reducescatter(odd, nranks=2), ShapeError, ("(3, 5)", *context)),
        (lambda: paddle.alltoall(odd), ShapeError, ("(3, 5)", *context)),
        (lambda: paddle.alltoall(scalar), ShapeError, ("0-D", *context)),
        (lambda: paddle.c_scatter(scalar, nranks=2), ShapeError, ("0-D", *context)),
        (lambda: paddle.c_split(odd, me, 2), ShapeError, ("(3, 5)", *context)),
        (lambda: paddle.c_embedding(x, x.int(), -1), ArgumentError, ("start_index=-1",)),
        (lambda: paddle.c_embedding(x[0], x.int()), ShapeError, ("(4,)",)),
        (lambda: paddle.c_embedding(x[:0], x.int()), ShapeError, ("(0, 4)",)),
        (lambda: paddle.c_embedding(x[:, :0], x.int()), ShapeError, ("(2, 0)",)),
        (lambda: paddle.c_embedding(x, x), DtypeError, ("float32",)),
        (lambda: paddle.c_allreduce_sum(listed), ArgumentError, ("list",)),
        (lambda: paddle.alltoall(listed), ArgumentError, ("list",)),
        (lambda: paddle.send_v2(listed, 0, other), ArgumentError, ("list",)),
        (lambda: paddle.send_v2(listed, 0, other, True, True), ArgumentError, ("list",)),
        (lambda: paddle.c_allreduce_sum(x.short()), DtypeError, ("int16",)),
    ]


def wrong_groups(comm: Any, _: torch.Tensor) -> WrongCalls:
    other, me = 1 - comm.rank, comm.rank
    return [
        (lambda: paddle.c_gen_nccl_id(-1), PeerError, ("rank=-1",)),
        (lambda: paddle.c_gen_nccl_id(0, "here"), ArgumentError, ("'here'", "host:port")),
        (lambda: paddle.c_gen_nccl_id(0, "h:1", ["h"]), ArgumentError, ("'h'", "host:port")),
        (lambda: paddle.c_comm_init(0, 0), PeerError, ("nranks=0",)),
        (lambda: paddle.c_comm_init(2, 2), PeerError, ("rank=2",)),
        (lambda: paddle.c_comm_init(2, -1), PeerError, ("rank=-1",)),
        (lambda: paddle.c_comm_init(2, other, ring_id=9), ArgumentError, (f"rank={other}",)),
        (lambda: paddle.c_comm_init(2, me, endpoints="h:1"), ArgumentError, ("nranks=2", "h:1")),
    ]


def wrong_calls(comm: Any) -> WrongCalls:
    """Return calls that a legacy check refuses, with the error and what its text must say."""
    families = (wrong_sizes, wrong_peers, wrong_tensors, wrong_groups)
    return [row for family in families for row in family(comm, FLOAT.to(comm.device))]


@runs_on("ranks")
def test_errors(comm: Any) -> None:
    """A wrong call is an error on its rank, says what to type, and launches nothing."""
    before = calls(comm)
    for call, error, words in wrong_calls(comm):
        with raises(error, *words):
            call()
    x = FLOAT.to(comm.device)
    for name in sorted(set(SIGNATURES) - ELSEWHERE):
        call = getattr(paddle, name)
        if RING not in SIGNATURES[name]:
            continue
        needed = [argument for argument, default in SIGNATURES[name] if default is NEEDED]
        args: dict[str, Any] = {argument: x if argument == "x" else 1 for argument in needed}
        with raises(RingError, "ring_id=-1", name):
            call(**args, ring_id=-1)
        if name not in ("c_gen_nccl_id", "c_comm_init"):
            with raises(RingError, ABSENT_RING):
                call(**args, ring_id=ABSENT_RING)
    assert_equal(calls(comm), before, "calls launched by refused ones")
    assert_bits_equal(ordered(paddle.c_allreduce_sum, x + 1), FLOAT + 2, "after refusals")
