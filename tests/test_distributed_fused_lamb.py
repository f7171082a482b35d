"""ops.DistributedFusedLamb: equal to LAMB in float64 NumPy, on any number of ranks."""

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import commlib
from commlib import ops
from commlib.errors import ArgumentError
from commlib.ops.lamb.layout import ALIGNMENT, PIECE, Layout, pieces
from tests.support.checks import refused
from tests.support.examples import examples
from tests.support.lamb import Case, agrees
from tests.support.ranks import Ranks, World

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


def test_one_rank(world: World) -> None:
    with world(1) as ranks:
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
    with refused(ArgumentError, "positions in their shard rings are [", "expected one position"):
        ops.DistributedFusedLamb(
            [torch.ones(2, device=comm.device, requires_grad=True)],
            comm,
            shard_ring=half,
            cross_ring=crossed,
        )


def test_four_ranks_and_nodes(world: World) -> None:
    """Shards over all ranks, over half of them, and a sum in one and in two stages."""
    with world(4) as ranks:
        ranks(nodes, deadline=120)


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
