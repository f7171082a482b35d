"""ops.DistributedFusedLamb: equal to LAMB in float64 NumPy, on any number of ranks."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commlib
from commlib import ops
from commlib.errors import ArgumentError
from commlib.ops.lamb import update
from commlib.ops.lamb.layout import ALIGNMENT, PIECE, Layout, pieces
from commlib.ops.lamb.part import Part
from tests.support.checks import assert_bits_equal, assert_equal, raises, sample
from tests.support.examples import examples
from tests.support.lamb import Case, agrees
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on

HALF, BRAIN = torch.float16, torch.bfloat16
CASES = [
    Case(),
    Case(max_grad_norm=0.3),
    Case(max_grad_norm=0.3, clip_after_allreduce=False),
    Case(max_grad_norm=0.3, clip_after_allreduce=False, is_grad_scaled_by_nranks=False),
    Case(max_grad_norm=1e6),
    Case(is_grad_scaled_by_nranks=False, max_grad_norm=0.2),
    Case(gradient_accumulation_steps=3, max_grad_norm=0.5),
    Case(HALF, max_grad_norm=0.3),
    Case(HALF, use_master_param_norm=False),
    Case(HALF, gradient_accumulation_steps=3),
    Case(HALF, gradient_accumulation_steps=2, use_master_acc_grad=False, max_grad_norm=0.5),
    Case(BRAIN, max_grad_norm=0.3, clip_after_allreduce=False),
    Case(shards=1),
]


def all_cases(comm: Any) -> None:
    for case in CASES:
        agrees(comm, case)


def test_two_ranks(ranks: Ranks) -> None:
    ranks(all_cases, deadline=120)


def test_one_rank(new_ranks: NewRanks) -> None:
    with new_ranks(1) as ranks:
        ranks(all_cases, deadline=120)


NODES = [
    Case(HALF, max_grad_norm=0.3),
    Case(shards=2, max_grad_norm=0.3),
    Case(HALF, shards=2, crosses=True, max_grad_norm=0.3),
    Case(shards=2, crosses=True, clip_after_allreduce=False, max_grad_norm=0.3),
    Case(shards=1, crosses=True),
    Case(shards=4, crosses=True),
]


def nodes(comm: Any) -> None:
    for case in NODES:
        agrees(comm, case)
    half = [commlib.new_ring(11 + n, [2 * n, 2 * n + 1]) for n in range(2)][comm.rank // 2]
    crossed = [commlib.new_ring(13 + n, [n, 3 - n]) for n in range(2)][comm.rank in (1, 2)]
    with raises(ArgumentError, "positions in their shard rings are [", "expected one position"):
        ops.DistributedFusedLamb(
            [torch.ones(2, device=comm.device, requires_grad=True)],
            comm,
            shard_ring=half,
            cross_ring=crossed,
        )


def test_four_ranks_and_nodes(new_ranks: NewRanks) -> None:
    """Shards over all ranks, over half of them, and a sum in one and in two stages."""
    with new_ranks(4) as ranks:
        ranks(nodes, deadline=120)


@runs_on("gpu_ranks")
def test_kernels(comm: Any) -> None:
    """The kernels of GPUs do what the torch operators do, with the same bits at each call."""
    for low, shards, skip in itertools.product((torch.float32, HALF, BRAIN), (1, 3), (False, True)):
        for rank, master in itertools.product(range(shards), (True, False)):
            label = f"{low}, shard {rank} of {shards}, skip {skip}, master norms {master}"
            args = (comm.device, low, shards, rank)
            plain, fused, again = (
                stepped(runs, *args, skip, master) for runs in (False, True, True)
            )
            for name in ("weights", "exp_avg", "exp_avg_sq"):
                assert_bits_equal(
                    getattr(fused, name), getattr(plain, name), f"{name} of {label}", atol=2e-6
                )
                assert_bits_equal(getattr(again, name), getattr(fused, name), f"{name} of {label}")
            if skip:
                assert_equal(fused.exp_avg.any().item(), False, f"moments of {label}")


def stepped(
    runs: bool, device: Any, low: torch.dtype, shards: int, rank: int, skip: bool, master: bool
) -> Part:
    """Return a shard after two steps by kernels (``runs``) or by torch operators."""
    shapes = ((3,), (9000,), (64,), (0,), (130,), (20000,))
    weights = [(sample(0, shape, torch.float32) * 0.1).to(device, low) for shape in shapes]
    params = [torch.nn.Parameter(weight) for weight in weights]
    part = Part(params, first=2, shards=shards, rank=rank, sum_dtype=None)
    gradient = torch.zeros(part.layout.numel, dtype=low, device=device)
    for n, view in enumerate(part.views(gradient)):
        view.copy_(sample(1, tuple(view.shape), torch.float32, n) * 0.3)
    gradient = gradient[part.layout.shard(rank)]
    rates = torch.linspace(0.001, 0.003, 8, device=device)
    factors = torch.tensor([0.5, 0.1, 0.001], device=device)
    skips = torch.tensor([skip], device=device)
    rule = update.Rule((0.9, 0.999), 1e-6, master, factors, rates, rates * 9, skips)
    norms = torch.zeros((8, 2), device=device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(update, "_runs_kernels", lambda x: runs)
        for _ in range(2):
            update.update_moments(part, gradient, rule, norms)
            update.update_weights(part, rule, update.trust_ratios(norms, rates))
    return part


SHAPE = st.lists(st.integers(0, 9), max_size=3).map(tuple)


@given(
    shapes=st.lists(st.one_of(SHAPE, st.just((9001,))), min_size=1, max_size=7).map(tuple),
    case=st.sampled_from(CASES),
)
@examples(12)
def test_any_parameters(cpu_ranks: Ranks, shapes: Any, case: Case) -> None:
    cpu_ranks(agrees, dataclasses.replace(case, shapes=shapes), 3)


@given(counts=st.lists(st.integers(0, 3 * PIECE), min_size=1, max_size=9), shards=st.integers(1, 9))
@examples(60)
def test_layout(counts: list[int], shards: int) -> None:
    """Segments and pieces cover each parameter once, in shards of one size."""
    layout = Layout(counts, shards)

    assert layout.numel == layout.shard_numel * shards
    assert layout.shard_numel % ALIGNMENT == 0
    assert layout.starts == Layout(counts, 1).starts
    covered: dict[int, int] = dict.fromkeys(range(len(counts)), 0)
    for rank in range(shards):
        segments = layout.segments(rank)
        for segment in segments:
            begin = layout.shard(rank).start + segment.start
            assert begin == layout.starts[segment.parameter] + covered[segment.parameter]
            covered[segment.parameter] += segment.length
            assert segment.start + segment.length <= layout.shard_numel
        cut = pieces(segments)
        assert sum(piece.length for piece in cut) == sum(each.length for each in segments)
        assert all(0 < piece.length <= PIECE for piece in cut)
        assert all(value % ALIGNMENT == 0 for piece in cut for value in piece[1:])
    for count, length in zip(counts, covered.values(), strict=True):
        assert count <= length < count + ALIGNMENT


@pytest.mark.parametrize("multiple", [1, 7])
def test_layout_pads_the_end_alone(multiple: int) -> None:
    layout = Layout([ALIGNMENT, 1], multiple)
    assert layout.starts == (0, ALIGNMENT)
    assert layout.numel == ALIGNMENT * (2 if multiple == 1 else 7)
