"""compat.paddle: Paddle's deep import paths, and the names of layers that lead to them."""

import importlib
import subprocess
import sys
from typing import Any

import pytest
import torch

from commlib.compat.paddle import distributed as dist
from commlib.compat.paddle.distributed import mp_ops
from commlib.compat.paddle.distributed.import_paths import PATHS, ROOT
from commlib.errors import ArgumentError, ShapeError
from tests.support.checks import assert_bits_equal, raises, sample
from tests.support.paddle_groups import own_groups
from tests.support.runs_on import runs_on

# What programs of Paddle import from where.
IMPORTS = {
    "fleet.layers.mpu.mp_ops": ["_c_identity", "_mp_allreduce", "_linear", "_parallel_linear"],
    "fleet.layers.mpu.mp_layers": ["ColumnParallelLinear", "VocabParallelEmbedding"],
    "fleet.layers.mpu": ["mp_ops", "RowParallelLinear", "get_rng_state_tracker"],
    "fleet.base.topology": ["CommunicateTopology", "HybridCommunicateGroup", "ParallelMode"],
    "communication.all_reduce": ["ReduceOp", "all_reduce"],
    "communication.all_to_all": ["alltoall", "alltoall_single"],
    "communication.gather": ["gather"],
    "communication.recv": ["irecv", "recv"],
    "communication.reduce_scatter": ["ReduceOp", "reduce_scatter"],
    "communication.scatter": ["scatter", "scatter_object_list"],
    "communication.send": ["isend", "send"],
    "communication.stream": ["all_reduce", "alltoall_single"],
    "communication.stream.all_gather": ["all_gather"],
    "communication.stream.all_reduce": ["ReduceOp", "all_reduce"],
    "communication.stream.all_to_all": ["alltoall", "alltoall_single"],
    "communication.stream.broadcast": ["broadcast"],
    "communication.stream.gather": ["gather"],
    "communication.stream.recv": ["recv"],
    "communication.stream.reduce": ["ReduceOp", "reduce"],
    "communication.stream.reduce_scatter": ["ReduceOp", "reduce_scatter"],
    "communication.stream.scatter": ["scatter"],
    "communication.stream.send": ["send"],
    "communication.group": ["Group", "get_group", "wait"],
    "communication.reduce": ["ReduceOp", "reduce"],
    "collective": ["Group", "new_group", "all_gather", "split"],
    "parallel": ["init_parallel_env", "ParallelEnv"],
    "utils.moe_utils": ["global_scatter", "global_gather"],
    "fleet.layers.mpu.random": ["MODEL_PARALLEL_RNG", "get_rng_state_tracker"],
    "models.moe.utils": ["_number_count", "_limit_by_capacity", "_random_routing"],
    "fleet.meta_parallel.pp_utils.p2p_communication": ["batch_send_recv_on_calc_stream"],
    "fleet.meta_parallel.parallel_layers.pp_layers": ["PipelineLayer", "LayerDesc"],
}


@pytest.mark.parametrize("path", IMPORTS)
def test_names_of_a_path(path: str) -> None:
    module = importlib.import_module(f"{ROOT}.{path}")
    for name in IMPORTS[path]:
        assert getattr(module, name) is not None
    parent: Any = dist
    for step in path.split("."):
        parent = getattr(parent, step)
    assert parent is module or callable(parent)  # a function has the module's name
    with pytest.raises(AttributeError, match="no attribute 'zzz'; commlib does not have it"):
        _ = module.zzz


def test_the_same_objects() -> None:
    deep = importlib.import_module(f"{ROOT}.fleet.layers.mpu.mp_ops")
    assert deep._c_identity is mp_ops._c_identity
    communication: Any = importlib.import_module(f"{ROOT}.communication")
    for name in ("all_reduce", "gather", "scatter", "send"):
        plain = importlib.import_module(f"{ROOT}.communication.{name}")
        of_stream = importlib.import_module(f"{ROOT}.communication.stream.{name}")
        assert getattr(plain, name) is getattr(dist, name)
        assert getattr(of_stream, name) is getattr(dist.stream, name)
        assert getattr(communication, name) is getattr(dist, name)


def test_every_path_in_a_new_process() -> None:
    """A path is found although nothing else was imported before."""
    lines = [f"import {ROOT}.{path} as it; it.__name__" for path in reversed(PATHS)]
    lines.append(f"from {ROOT}.fleet.layers.mpu import mp_ops; mp_ops.split")
    code = "\n".join(line.replace("; ", "\n") for line in lines)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@runs_on("ranks")
def test_parts_of_layers(ring: Any) -> None:
    """``_parallel_linear`` and ``_parallel_embedding`` give what the whole weight gives."""
    with own_groups():
        group = dist.new_group()
        rank, size, device = ring.rank, ring.size, ring.device
        x = sample(7, (3, 8), torch.float64).to(device)
        weight = sample(8, (8, 6), torch.float64).to(device)
        bias = sample(9, (6,), torch.float64).to(device)
        want = mp_ops._linear(x, weight, bias)
        columns, part = weight.chunk(size, 1)[rank], bias.chunk(size)[rank]
        rank_args = (rank, size)
        got: Any = mp_ops._parallel_linear(
            x, 8, 6 // size, 1, columns, part, True, *rank_args, False, None, group
        )
        torch.testing.assert_close(got, want)
        rows = weight.chunk(size, 0)[rank]
        got = mp_ops._parallel_linear(
            x, 8 // size, 6, 0, rows, bias, True, *rank_args, True, None, group
        )
        torch.testing.assert_close(got, want)
        ids = torch.tensor([0, 7, 3], device=device)
        got = mp_ops._parallel_embedding(ids, 8 // size, (8, 6), rows, *rank_args, None, group)
        assert_bits_equal(got, weight[ids])
        with raises(ArgumentError, "_parallel_linear", "nranks=9", f"nranks={size}"):
            mp_ops._parallel_linear(x, 8, 3, 1, columns, None, True, rank, 9, False, None, group)
        with raises(ShapeError, "_parallel_embedding", "param_attr"):
            mp_ops._parallel_embedding(ids, 5, (10, 6), rows, *rank_args, None, group)
        mp_ops.set_var_distributed(weight)
        assert vars(weight) == {"is_distributed": True}
