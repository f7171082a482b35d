"""compat.paddle.distributed: names, argument orders, groups, the environment, unknown names."""

import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch

import commlib
import commlib.compat.paddle.distributed as dist
from commlib.compat import paddle
from commlib.compat.paddle.distributed import fleet, mp_ops, pp_utils, stream
from commlib.compat.paddle.distributed.process_group import _FUNCTIONS, ProcessGroup
from commlib.errors import ArgumentError, DeviceError, PeerError, RingError
from tests.support.checks import assert_equal, raises
from tests.support.paddle_groups import FIRST_ID, own_groups
from tests.support.processes import run
from tests.support.runs_on import runs_on

NEEDED = inspect.Parameter.empty
SUM = dist.ReduceOp.SUM
GROUP = ("group", None)
SYNC = (GROUP, ("sync_op", True))
STREAM = (*SYNC, ("use_calc_stream", False))
X = ("tensor", NEEDED)
MOE = (("x", NEEDED), ("local_count", NEEDED), ("global_count", NEEDED), GROUP)
SLICE = (("nranks", 1), ("rank_id", 0))
CALC = ("use_calc_stream", True)


def needed(*names: str) -> tuple[tuple[str, Any], ...]:
    return tuple((name, NEEDED) for name in names)


# As Paddle 2.6 declares them.
SIGNATURES: dict[Callable[..., Any], tuple[tuple[str, Any], ...]] = {
    dist.all_reduce: (X, ("op", SUM), *SYNC),
    dist.all_gather: (*needed("tensor_list", "tensor"), *SYNC),
    dist.reduce: (X, *needed("dst"), ("op", SUM), *SYNC),
    dist.broadcast: (X, *needed("src"), *SYNC),
    dist.scatter: (X, ("tensor_list", None), ("src", 0), *SYNC),
    dist.gather: (X, ("gather_list", None), ("dst", 0), *SYNC),
    dist.reduce_scatter: (*needed("tensor", "tensor_list"), ("op", SUM), *SYNC),
    dist.alltoall: (*needed("in_tensor_list", "out_tensor_list"), *SYNC),
    dist.alltoall_single: (
        *needed("in_tensor", "out_tensor"),
        ("in_split_sizes", None),
        ("out_split_sizes", None),
        *SYNC,
    ),
    dist.send: (X, ("dst", 0), *SYNC),
    dist.recv: (X, ("src", 0), *SYNC),
    dist.isend: (*needed("tensor", "dst"), GROUP),
    dist.irecv: (X, ("src", None), GROUP),
    dist.batch_isend_irecv: needed("p2p_op_list"),
    dist.P2POp: (*needed("op", "tensor", "peer"), GROUP),
    dist.wait: (X, GROUP, CALC),
    dist.barrier: (GROUP,),
    dist.all_gather_object: (*needed("object_list", "obj"), GROUP),
    dist.broadcast_object_list: (*needed("object_list", "src"), GROUP),
    dist.scatter_object_list: (
        *needed("out_object_list"),
        ("in_object_list", None),
        ("src", 0),
        GROUP,
    ),
    dist.new_group: (("ranks", None), ("backend", None), ("timeout", None)),
    dist.get_group: (("id", 0),),
    dist.Group: (*needed("rank_in_group", "id", "ranks"), ("pg", None), ("name", None)),
    dist.destroy_process_group: (GROUP,),
    dist.get_rank: (GROUP,),
    dist.get_world_size: (GROUP,),
    dist.get_backend: (GROUP,),
    dist.global_scatter: (*MOE, CALC),
    dist.global_gather: (*MOE, CALC),
    dist.split: (
        *needed("x", "size", "operation"),
        ("axis", 0),
        ("num_partitions", 1),
        ("gather_out", True),
        ("weight_attr", None),
        ("bias_attr", None),
        ("name", None),
    ),
    stream.all_reduce: (X, ("op", SUM), *STREAM),
    stream.all_gather: (*needed("tensor_or_tensor_list", "tensor"), *STREAM),
    stream.reduce: (X, ("dst", 0), ("op", SUM), *STREAM),
    stream.broadcast: (X, *needed("src"), *STREAM),
    stream.scatter: (X, ("tensor_or_tensor_list", None), ("src", 0), *STREAM),
    stream.gather: (X, ("gather_list", None), ("dst", 0), *STREAM),
    stream.reduce_scatter: (*needed("tensor", "tensor_or_tensor_list"), ("op", SUM), *STREAM),
    stream.alltoall: (*needed("out_tensor_or_tensor_list", "in_tensor_or_tensor_list"), *STREAM),
    stream.alltoall_single: (
        *needed("out_tensor", "in_tensor"),
        ("out_split_sizes", None),
        ("in_split_sizes", None),
        *STREAM,
    ),
    stream.send: (X, ("dst", 0), *STREAM),
    stream.recv: (X, ("src", 0), *STREAM),
    mp_ops._c_identity: (X, GROUP, ("skip_c_identity_dynamic", False)),
    mp_ops._c_concat: (X, GROUP),
    mp_ops._c_split: (X, GROUP),
    mp_ops._mp_allreduce: (
        *(X, ("op", SUM), GROUP, CALC, ("use_model_parallel", True)),
        ("skip_c_identity_dynamic", False),
    ),
    mp_ops._c_lookup_table: (
        *needed("table", "index"),
        *(("start_index", 0), ("vocab_size", -1), ("name", None)),
    ),
    mp_ops._c_softmax_with_cross_entropy: (
        *needed("logits", "label"),
        *(GROUP, ("return_softmax", False), ("ignore_index", -100)),
    ),
    pp_utils.allgather_partial: (X, *SLICE, GROUP, CALC),
    pp_utils.send_partial: (X, ("dst", 0), *SLICE, GROUP, CALC),
    pp_utils.recv_partial: (X, ("src", 0), *SLICE, GROUP, CALC),
    pp_utils._send_on_calc_stream: (*needed("tensor", "group", "dst"), *SLICE),
    pp_utils._recv_on_calc_stream: (*needed("tensor", "group", "src"), *SLICE),
    pp_utils.P2pHelper: (("use_cache", True), ("dynamic_shape", False)),
    pp_utils.P2pHelper.send_forward_recv_forward: (
        *needed("self", "output_tensor", "recv_prev"),
        *(("batch_p2p_comm", True), ("overlap_p2p_comm", False), ("skip_check_meta", False)),
    ),
    pp_utils.P2pHelper.send_backward_recv_backward: (
        *needed("self", "input_tensor_grad", "recv_next"),
        *(("batch_p2p_comm", True), ("overlap_p2p_comm", False)),
    ),
    fleet.meta_optimizers.DygraphShardingOptimizer: needed("optimizer", "hcg"),
    pp_utils.P2PonCalcStream: (*needed("op", "tensor", "peer", "group"), *SLICE),
    pp_utils.batch_send_recv_on_calc_stream: needed("p2p_op_list"),
    pp_utils.initialize_p2p_groups: (
        *needed("hcg"),
        *(("enable_partial_send_recv", True), ("enable_timer", False)),
    ),
    fleet.init: (
        ("role_maker", None),
        *(("is_collective", False), ("strategy", None), ("log_level", "INFO")),
    ),
    fleet.meta_parallel.ParallelCrossEntropy: (
        *(("mp_group", None), ("name", None), ("ignore_index", -100)),
    ),
    fleet.meta_parallel.VocabParallelEmbedding: (
        *needed("num_embeddings", "embedding_dim"),
        *(("weight_attr", None), ("mp_group", None), ("name", None)),
    ),
    fleet.meta_parallel.ColumnParallelLinear: (
        *needed("in_features", "out_features"),
        *(("weight_attr", None), ("has_bias", None), ("gather_output", True)),
        *(("fuse_matmul_bias", False), ("mp_group", None), ("name", None)),
    ),
    fleet.meta_parallel.RowParallelLinear: (
        *needed("in_features", "out_features"),
        *(("weight_attr", None), ("has_bias", True), ("input_is_parallel", False)),
        *(("fuse_matmul_bias", False), ("mp_group", None), ("name", None)),
    ),
}


@pytest.mark.parametrize("call", SIGNATURES, ids=lambda call: f"{call.__module__}.{call.__name__}")
def test_arguments(call: Callable[..., Any]) -> None:
    parameters = inspect.signature(call).parameters.values()
    assert tuple((p.name, p.default) for p in parameters) == SIGNATURES[call]


def test_names() -> None:
    assert dist.__all__ == sorted(dist.__all__)
    assert stream.__all__ == sorted(stream.__all__)
    assert paddle.distributed is dist
    for module in (dist, stream, fleet, fleet.meta_parallel):
        missing = [name for name in module.__all__ if not inspect.getdoc(getattr(module, name))]
        assert not missing


def test_reductions_have_the_legacy_numbers() -> None:
    numbers = [(op.name, op.value) for op in dist.ReduceOp]
    assert numbers == [("SUM", 0), ("MAX", 1), ("MIN", 2), ("PROD", 3), ("AVG", 4)]


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (dist, "all_reduc", "did you mean 'all_reduce'?"),
        (dist, "spawn", "start programs with torchrun"),
        (dist, "xyz", "commlib does not have it; docs/paddle.md lists the names that exist"),
        (dist, "send_object_list", "call send for each tensor, or broadcast_object_list"),
        (dist, "recv_object_list", "call recv for each tensor, or broadcast_object_list"),
        (dist, "shutdown_process_group", "call destroy_process_group"),
        (dist, "restart_process_group", "call group.ring.resume()"),
        (dist, "Shard", "use torch.distributed.tensor"),
        (dist, "set_mesh", "use torch.distributed.tensor"),
        (dist, "parallelize", "use torch.distributed.tensor.parallel"),
        (fleet, "rank", "call worker_index"),
        (fleet, "local_rank", "read ParallelEnv().device_id"),
        (fleet, "node_num", "LOCAL_WORLD_SIZE, or PADDLE_LOCAL_SIZE"),
        (fleet, "is_worker", "every process is a worker"),
        (fleet, "util", "call all_reduce, all_gather_object or barrier"),
        (fleet, "server_endpoints", "parameter servers are out of scope"),
        (fleet, "init_server", "parameter servers are out of scope"),
        (fleet, "worker_indx", "did you mean 'worker_index'?"),
        (fleet.meta_parallel, "RowParallelLiner", "did you mean 'RowParallelLinear'?"),
        (fleet.meta_parallel, "TensorParallel", "call fleet.distributed_model"),
        (fleet.meta_optimizers, "DygraphShardingOptimizerV2", "use DygraphShardingOptimizer"),
        (dist.pp_utils, "P2PHelper", "did you mean 'P2pHelper'?"),
        (dist.stream, "alltoall_singl", "did you mean 'alltoall_single'?"),
        (dist.mp_ops, "_c_identiti", "did you mean '_c_identity'?"),
        (paddle, "nop", "leave it away"),
        (paddle, "dgc_momentum", "gradient compression is not ported"),
        (paddle, "rpc", "torch.distributed.rpc"),
        (paddle, "save_state_dict", "torch.distributed.checkpoint.save"),
        (paddle, "fused_gemm_epilogue", "it does not communicate"),
        (paddle, "int_bincount", "it is not an operator of communication"),
        (paddle, "c_concat_grad", "gradients come from autograd"),
    ],
)
def test_unknown_names(module: Any, name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as caught:
        getattr(module, name)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("all_reduce", "call all_reduce(..., group=group) of paddle.distributed; roots and peers"),
        ("allgather", "call all_gather(..., group=group)"),
        ("all_to_all_single", "call alltoall_single(..., group=group)"),
        ("send_on_calc_stream", "call stream.send(..., group=group, use_calc_stream=True)"),
        ("xyz", "the functions of paddle.distributed take group=group"),
    ],
)
def test_methods_of_a_process_group(name: str, words: str) -> None:
    """Methods that upstream's process group has in addition to those for slices."""
    process_group: Any = object.__new__(ProcessGroup)
    with pytest.raises(AttributeError, match=f"no attribute '{name}'") as caught:
        getattr(process_group, name)
    assert words in str(caught.value)


def test_functions_for_methods_of_a_process_group() -> None:
    for name in set(_FUNCTIONS.values()):
        assert name in dist.__all__ and name in dist.stream.__all__


# -- groups ----------------------------------------------------------------------------------------


@runs_on("three_ranks")
def test_groups(ring: Any) -> None:
    with own_groups():
        every, two, last = dist.new_group(), dist.new_group([2, 0]), dist.new_group([2])
        assert_equal([one.id for one in (every, two, last)], [FIRST_ID + i for i in range(3)])
        assert_equal((every.ranks, every.rank, every.nranks), ([0, 1, 2], ring.rank, 3))
        assert_equal(two.ranks, [0, 2], "ranks in ascending order")
        assert_equal(two.rank, {0: 0, 1: -1, 2: 1}[ring.rank], "position in the group")
        assert_equal(two.world_size, -1 if ring.rank == 1 else 2, "world_size")
        assert_equal(two.is_member(), ring.rank != 1, "is_member")
        assert_equal(two.get_group_rank(2), -1 if ring.rank == 1 else 1, "get_group_rank")
        assert_equal(two.get_group_rank(1), -1, "get_group_rank of a rank outside")
        assert_equal(last.is_member(), False, "upstream's rule for a group of one")
        assert_equal((dist.get_rank(two), dist.get_world_size(two)), (two.rank, two.world_size))
        assert_equal(dist.get_group(two.id) is two, True, "get_group")
        world: Any = dist.get_group()
        assert_equal(world.ranks, [0, 1, 2], "the global group")
        assert_equal(repr(every).startswith(f"rank: {ring.rank}, nranks: 3, id: 900"), True)
        if ring.rank == 1:
            with raises(RingError, "this rank is not a member of ring 901"):
                two.ring  # noqa: B018
        else:
            assert_equal((two.ring.ring_id, two.ring.ranks), (two.id, (0, 2)), "its ring")
            assert_equal(dist.get_backend(two), "GLOO", "backend")
            total = paddle.c_allreduce_sum(torch.ones(2), ring_id=two.id, use_calc_stream=True)
            assert_equal(total.tolist(), [2.0, 2.0], "group.id is a ring_id")
        dist.destroy_process_group(two)
        with raises(RingError, "group 901 does not exist on this rank"):
            dist.destroy_process_group(two)


@runs_on("ranks")
def test_bad_groups(ring: Any) -> None:
    with own_groups():
        for ranks, words in (([0, 2], "0 to 1"), ([0, 0], "different"), ([], "one or more")):
            with raises(RingError, words):
                dist.new_group(ranks)
        with raises(ArgumentError, "backend='mpi'", "'nccl' or 'gloo'"):
            dist.new_group(backend="mpi")
        assert_equal(dist.new_group([ring.rank]).id, FIRST_ID, "a refused call takes no number")
        late = dist.new_group(timeout=timedelta(seconds=20))
        assert_equal(late.ring.timeout, 20.0, "timeout")
        on_cpu = dist.new_group(backend="gloo")
        assert_equal((on_cpu.ring.device.type, on_cpu.backend), ("cpu", "GLOO"), "backend")
        with raises(ArgumentError, "all_reduce: group=1", "expected a Group"):
            dist.all_reduce(torch.ones(1, device=ring.device), group=1)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            assert_equal(dist.get_group(5000), None, "an unknown group")
        # Garbage of other tests may warn too.
        warned = any("group 5000 does not exist" in str(one.message) for one in said)
        assert_equal(warned, True, said)


@runs_on("cpu_ranks")
def test_a_group_for_gpus_without_any(ring: Any) -> None:
    with own_groups(), raises(DeviceError, "this process sees 0 GPUs"):
        dist.new_group([0], backend="nccl")


def calls_on(group: Any, x: torch.Tensor) -> list[Callable[[], Any]]:
    """Return a call of each kind on a group."""
    return [
        lambda: dist.all_reduce(x, group=group),
        lambda: dist.broadcast(x, 0, group),
        lambda: dist.reduce(x, 0, group=group),
        lambda: dist.reduce_scatter(x, [x, x], group=group),
        lambda: dist.scatter(x, [x, x], group=group),
        lambda: dist.gather(x, [], group=group),
        lambda: dist.alltoall([x, x], [], group),
        lambda: dist.alltoall_single(x, x, group=group),
        lambda: dist.send(x, 1, group),
        lambda: dist.recv(x, 1, group),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 1, group)]),
        lambda: dist.barrier(group),
        lambda: dist.wait(x, group),
        lambda: dist.all_gather_object([], 1, group),
        lambda: dist.broadcast_object_list([1], 0, group),
        lambda: dist.scatter_object_list([], [1, 2], 0, group),
        lambda: dist.global_scatter(x, x, x, group),
        lambda: dist.global_gather(x, x, x, group),
        lambda: mp_ops._c_identity(x, group),
        lambda: mp_ops._c_concat(x, group),
        lambda: mp_ops._c_split(x, group),
        lambda: mp_ops._mp_allreduce(x, group=group),
        lambda: mp_ops._c_softmax_with_cross_entropy(x, x, group),
        lambda: pp_utils.send_partial(x, 1, group=group),
        lambda: pp_utils.recv_partial(x, 1, group=group),
        lambda: pp_utils.allgather_partial(x, 2, 0, group),
    ]


@runs_on("three_ranks")
def test_calls_of_other_processes_do_nothing(ring: Any) -> None:
    """Upstream warns and returns None; for all_gather it raises."""
    with own_groups():
        group, x = dist.new_group([0, 1]), torch.ones(2)
        if ring.rank != 2:
            return
        for number, call in enumerate(calls_on(group, x)):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                assert_equal(call(), None, f"call {number}")
            warned = any(f"not in group {group.id}" in str(one.message) for one in said)
            assert_equal(warned, True, number)
        assert_equal(x.tolist(), [1.0, 1.0], "the tensor")
        with raises(RingError, "all_gather: this rank is not in group"):
            dist.all_gather([], x, group)


@runs_on("three_ranks")
def test_peers_are_global_ranks(ring: Any) -> None:
    """A group of ranks 1 and 2: its positions 0 and 1 are other numbers."""
    with own_groups():
        group = dist.new_group([1, 2])
        if ring.rank == 0:
            return
        x = torch.full((2,), float(ring.rank))
        dist.broadcast(x, 2, group)
        assert_equal(x.tolist(), [2.0, 2.0], "broadcast from global rank 2")
        for call in (dist.broadcast, dist.reduce, dist.isend, dist.irecv):
            with raises(PeerError, "=0; expected a global rank of the group, one of [1, 2]"):
                call(x, 0, group=group)
        with raises(PeerError, "src=None"):
            dist.irecv(x, group=group)


# -- the environment -------------------------------------------------------------------------------

ALONE = """
import commlib
import commlib.compat.paddle.distributed as dist
from commlib.errors import RingError

print(dist.is_available(), dist.is_initialized(), dist.get_rank(), dist.get_world_size())
try:
    dist.new_group([0])
except RingError as error:
    print(error)
for _ in range(2):
    group = dist.init_parallel_env()
    print(group, dist.is_initialized())
    print([dist.new_group([0]).id for _ in range(2)])
    dist.destroy_process_group()
    print(dist.is_initialized(), commlib.CommContextManager.instance().rings())
"""


def test_one_process() -> None:
    """Numbers begin with 10, also after everything was destroyed."""
    code, out, err = run("-c", ALONE)
    assert code == 0, err
    first, refused, *rounds = out.splitlines()
    assert first == "True False 0 1"
    assert "call commlib.init() first" in refused
    life = ["rank: 0, nranks: 1, id: 0, ranks: 0; name: _default_pg0 True", "[10, 11]", "False []"]
    assert rounds == life * 2


# The data that ``second`` shows depends on which tensor is the input.
EXCHANGE = """
import torch
import commlib.compat.paddle.distributed as dist

dist.init_parallel_env()
first, second = torch.ones(2), torch.zeros(2)
dist.alltoall_single(in_tensor=first, out_tensor=first.clone())
for _ in range(2):
    dist.alltoall_single(first, second)
print(first.tolist(), second.tolist())
"""


@pytest.mark.parametrize("release", ["", "2", "3"])
def test_release_in_the_environment(release: str) -> None:
    """A script of Paddle 3 changes its imports alone; without the flag one warning names it."""
    code, out, err = run("-c", EXCHANGE, FLAGS_comm_paddle_version=release)
    assert code == 0, err
    assert out.strip() == ("[0.0, 0.0] [0.0, 0.0]" if release == "3" else "[1.0, 1.0] [1.0, 1.0]")
    words = "alltoall_single: read as in Paddle 2, input first"
    assert err.count(words) == (release == ""), err


HYBRID = """
import torch
from commlib.compat.paddle.distributed import destroy_process_group, fleet
from commlib.errors import ArgumentError

strategy = fleet.DistributedStrategy()
strategy.tensor_parallel_configs = {"tensor_init_seed": 3}
tracker = fleet.meta_parallel.get_rng_state_tracker()
for _ in range(2):
    fleet.init(is_collective=True, strategy=strategy)
    print(fleet.get_hybrid_communicate_group().nranks, list(tracker.get_states_tracker()))
    destroy_process_group()
    print(tracker.get_states_tracker())
    try:
        fleet.distributed_model(torch.nn.Linear(1, 1))
    except ArgumentError as error:
        print(error)
"""


def test_the_hybrid_group_ends_with_all_groups() -> None:
    code, out, err = run("-c", HYBRID)
    assert code == 0, err
    for line in (0, 3):
        alive, states, refused = out.splitlines()[line : line + 3]
        assert (alive, states) == ("1 ['model_parallel_rng']", "{}")
        assert refused.startswith("there is no hybrid group; call fleet.init")


ENVIRONMENT = """
import commlib.compat.paddle.distributed as dist

env = dist.ParallelEnv()
print(env.rank, env.local_rank, env.world_size, env.nranks, env.device_id, env.dev_id)
print(env.trainer_endpoints, env.current_endpoint, env.nrings, env.pg_timeout, env.device_type)
print(dist.get_rank(), dist.get_world_size(), dist.fleet.worker_endpoints(True))
"""


def test_paddle_environment() -> None:
    code, out, err = run(
        *("-c", ENVIRONMENT),
        PADDLE_TRAINER_ID="1",
        PADDLE_TRAINERS_NUM="2",
        PADDLE_TRAINER_ENDPOINTS="127.0.0.1:6170,127.0.0.1:6171",
        FLAGS_selected_gpus="3",
        FLAGS_comm_timeout_s="40",
        CUDA_VISIBLE_DEVICES="",
    )
    assert code == 0, err
    assert out.splitlines() == [
        "1 1 2 2 3 3",
        "['127.0.0.1:6170', '127.0.0.1:6171'] 127.0.0.1:6171 1 40000 cpu",
        "1 2 127.0.0.1:6170,127.0.0.1:6171",
    ]


@runs_on("ranks")
def test_init_returns_the_group_of_all_ranks(ring: Any) -> None:
    group = dist.init_parallel_env()
    assert_equal((group.id, group.rank, group.ranks), (0, ring.rank, [0, 1]), "the global group")
    assert_equal(group.ring is commlib.comm(0), True, "one set of rings")
    assert_equal(group.process_group.size(), 2, "process_group")
