"""compat.paddle.distributed_fused_lamb: the legacy arguments give the same steps."""

import inspect
from typing import Any

import torch

import commlib
from commlib.compat import paddle
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.lamb import Case, close_rings, optimizer, parameters, small, train
from tests.support.runs_on import runs_on

Legacy: Any = paddle.distributed_fused_lamb
CASES = [
    small(Case(torch.float16, max_grad_norm=0.3)),
    small(Case(is_grad_scaled_by_nranks=False, max_grad_norm=0.3, clip_after_allreduce=False)),
    small(Case(torch.float16, gradient_accumulation_steps=3, use_master_acc_grad=False)),
    small(Case(torch.bfloat16, use_master_param_norm=False)),
    small(Case(shards=1)),
    small(Case(shards=1, crosses=True)),
]


@runs_on("ranks")
def test_legacy_arguments(comm: Any) -> None:
    for case in CASES:
        params, legacy = parameters(case, comm.device), parameters(case, comm.device)
        made = optimizer(comm, case, params)
        rings = [comm.ring_id]
        rings += [20 + comm.rank] if case.shards else []
        rings += [30] if case.crosses else []
        skipped = {id(legacy[n]) for n in range(3, len(legacy), 4)}
        other = Legacy(
            legacy,
            case.lr,
            case.weight_decay,
            *(0.9, 0.999, 1e-6),
            case.max_grad_norm or -1.0,
            lambda p, skipped=skipped: id(p) in skipped,
            case.clip_after_allreduce,
            case.is_grad_scaled_by_nranks,
            128,
            case.use_master_param_norm,
            case.gradient_accumulation_steps,
            case.use_master_acc_grad,
            comm.size,
            rings,
            case.crosses,
        )
        train(case, made, params, comm.rank, 0, 3)
        train(case, other, legacy, comm.rank, 0, 3)
        for n, (param, wanted) in enumerate(zip(legacy, params, strict=True)):
            assert_bits_equal(param, wanted.detach(), f"parameter {n} of {case}")
        close_rings()


@runs_on("cpu_ranks")
def test_wrong_rings(comm: Any) -> None:
    params = parameters(CASES[0], comm.device)
    with raises(ArgumentError, "ring_ids=[0, 1]", "pass ring_ids=[0, 1, 2]"):
        Legacy(params, ring_ids=[0, 1], use_hierarchical_allreduce=True)
    with raises(ArgumentError, "ring_ids=[]"):
        Legacy(params, ring_ids=[])
    with raises(ArgumentError, "nranks=5", f"pass nranks={comm.size}"):
        Legacy(params, nranks=5)


# Of Paddle 2.6.2, in order.
ARGUMENTS = """
learning_rate lamb_weight_decay beta1 beta2 epsilon parameters grad_clip
exclude_from_weight_decay_fn clip_after_allreduce is_grad_scaled_by_nranks alignment
use_master_param_norm gradient_accumulation_steps use_master_acc_grad nproc_per_node
use_hierarchical_allreduce name
"""


def test_signature() -> None:
    assert [*inspect.signature(paddle.DistributedFusedLamb).parameters] == ARGUMENTS.split()


class ClipGradByGlobalNorm:
    """As Paddle's: the optimizer reads the limit."""

    def __init__(self, clip_norm: float) -> None:
        self.clip_norm = clip_norm


@runs_on("ranks")
def test_class(comm: Any) -> None:
    """The class gives the steps of the operator; each node of one rank has its own ring."""
    for case in (CASES[0], CASES[4], CASES[5]):
        params, legacy = parameters(case, comm.device), parameters(case, comm.device)
        made = optimizer(comm, case, params)
        skipped = {id(legacy[n]) for n in range(3, len(legacy), 4)}
        other = paddle.DistributedFusedLamb(
            case.lr,
            case.weight_decay,
            parameters=legacy,
            grad_clip=ClipGradByGlobalNorm(case.max_grad_norm) if case.max_grad_norm else None,
            exclude_from_weight_decay_fn=lambda p, skipped=skipped: id(p) in skipped,
            nproc_per_node=case.shards or None,
            use_hierarchical_allreduce=case.crosses,
        )
        train(case, made, params, comm.rank, 0, 3)
        train(case, other, legacy, comm.rank, 0, 3)
        for n, (param, wanted) in enumerate(zip(legacy, params, strict=True)):
            assert_bits_equal(param, wanted.detach(), f"parameter {n} of {case}")
        other.clear_grad()
        assert legacy[0].grad is not None
        assert_equal(bool(legacy[0].grad.any()), False, "cleared")
        other.clear_grad(set_to_zero=False)
        assert_equal(legacy[0].grad is None, True, "dropped")
        close_rings()
    for ring in (1, 2):
        commlib.close_ring(ring)


@runs_on("cpu_ranks")
def test_bad_constructors(comm: Any) -> None:
    make: Any = paddle.DistributedFusedLamb
    params = parameters(CASES[0], comm.device)
    with raises(ArgumentError, "parameters is None", "pass parameters=model.parameters()"):
        make()
    with raises(ArgumentError, "grad_clip is float; expected a ClipGradByGlobalNorm"):
        make(parameters=params, grad_clip=1.0)
    for each in (0, 3, True, "1"):
        with raises(ArgumentError, f"nproc_per_node={each!r}; expected a divisor of 2"):
            make(parameters=params, nproc_per_node=each)
    make(parameters=params, lamb_weight_decay=None).step()
