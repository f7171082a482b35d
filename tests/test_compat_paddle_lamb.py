"""compat.paddle.distributed_fused_lamb: the legacy arguments give the same steps."""

from typing import Any

import torch

from commlib.compat import paddle
from commlib.errors import ArgumentError
from tests.support.checks import assert_bits_equal, raises
from tests.support.lamb import Case, close_rings, optimizer, parameters, small, train
from tests.support.ranks import Ranks

Legacy: Any = paddle.distributed_fused_lamb
CASES = [
    small(Case(torch.float16, max_grad_norm=0.3)),
    small(Case(is_grad_scaled_by_nranks=False, max_grad_norm=0.3, clip_after_allreduce=False)),
    small(Case(torch.float16, gradient_accumulation_steps=3, use_master_acc_grad=False)),
    small(Case(torch.bfloat16, use_master_param_norm=False)),
    small(Case(shards=1)),
    small(Case(shards=1, crosses=True)),
]


def steps(comm: Any) -> None:
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


def test_legacy_arguments(ranks: Ranks) -> None:
    ranks(steps)


def wrong(comm: Any) -> None:
    params = parameters(CASES[0], comm.device)
    with raises(ArgumentError, "ring_ids=[0, 1]", "pass ring_ids=[0, 1, 2]"):
        Legacy(params, ring_ids=[0, 1], use_hierarchical_allreduce=True)
    with raises(ArgumentError, "ring_ids=[]"):
        Legacy(params, ring_ids=[])
    with raises(ArgumentError, "nranks=5", f"pass nranks={comm.size}"):
        Legacy(params, nranks=5)


def test_wrong_rings(cpu_ranks: Ranks) -> None:
    cpu_ranks(wrong)
