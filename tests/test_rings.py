"""Rings of some of the ranks: other sizes, other orders, several at once, all operators."""

from typing import Any

import torch

import commlib
from commlib import ops
from tests.support.checks import (
    assert_bits_equal,
    assert_equal,
    bits,
    from_bits,
    rounded,
    sample,
    wide,
)
from tests.support.formulas import (
    SUMMED,
    joined,
    own,
    own_columns,
    own_part_of_total,
    parts_for_rank,
    side_by_side,
    total,
)
from tests.support.operator import MODES, Operator
from tests.support.ranks import NewRanks

OPERATORS = (
    Operator(ops.all_reduce, total, reduces=True, dtypes=SUMMED),
    Operator(ops.all_gather, joined),
    Operator(ops.reduce_scatter, own_part_of_total, reduces=True, dtypes=SUMMED),
    Operator(ops.all_to_all, parts_for_rank),
    Operator(ops.identity, own, modes=("calc", "comm")),
    Operator(ops.concat, side_by_side, modes=("calc", "comm")),
    Operator(ops.split, own_columns, modes=("calc", "comm")),
)
SHAPE = (12, 12)  # divides by 2, 3 and 4
# Members overlap, and 13 holds them in another order than their global ranks.
RINGS = {10: (0, 1), 11: (2, 3), 12: (0, 2, 3), 13: (3, 1, 0, 2), 14: (1,)}


def on_ring(ring: Any, op: Operator, dtype: torch.dtype, **mode: bool) -> None:
    """Inputs are numbered by global rank; the result follows positions in the ring.

    Integers in floats, so that the order of a sum over more than two ranks does not count.
    """
    every = [sample(rank, SHAPE, torch.int32) % 8 for rank in ring.ranks]
    inputs = [x.to(dtype) for x in every]
    encode, decode = (wide, rounded) if op.reduces else (bits, from_bits)
    want = decode(op.formula([encode(x) for x in inputs], ring.rank), dtype)
    assert_bits_equal(
        op(inputs[ring.rank], ring.ring_id, **mode), want, f"{ring} {op.call.__name__} {mode}"
    )


def every_ring(comm: Any) -> None:
    made = {ring_id: commlib.new_ring(ring_id, ranks) for ring_id, ranks in RINGS.items()}
    for ring_id, ring in made.items():
        member = comm.rank in RINGS[ring_id]
        assert_equal(ring is not None, member, f"a context of ring {ring_id}")
        if ring is not None:
            assert_equal((ring.ranks, ring.size), (RINGS[ring_id], len(RINGS[ring_id])), "members")
            assert_equal(ring.ranks[ring.rank], comm.rank, "position")
    mine = [ring for ring in made.values() if ring is not None]
    for ring in [comm, *mine]:
        for op in OPERATORS:
            for name in op.modes:
                on_ring(ring, op, torch.float64, **MODES[name])
            on_ring(ring, op, torch.bfloat16)
        rooted(ring)
        around(ring)
    for ring in reversed(mine):
        commlib.CommContextManager.instance().close(ring.ring_id)
    assert_equal(commlib.CommContextManager.instance().rings(), [0], "rings left")


def rooted(ring: Any) -> None:
    """Roots are positions in the ring, each of them in turn."""
    every = [sample(rank, SHAPE, torch.float32) for rank in ring.ranks]
    x, ring_id = every[ring.rank], ring.ring_id
    for root in range(ring.size):
        assert_bits_equal(ops.broadcast(x, ring_id, root=root), every[root], f"{ring} broadcast")
        parts = every[root].chunk(ring.size)
        assert_bits_equal(ops.scatter(x, ring_id, root=root), parts[ring.rank], f"{ring} scatter")
        full = torch.cat(every)
        gathered = ops.gather(x, ring_id, root=root)
        assert_bits_equal(gathered, full if ring.rank == root else full[:0], f"{ring} gather")
        largest = torch.stack(every).amax(0) if ring.rank == root else x
        assert_bits_equal(ops.reduce(x, ring_id, root=root, op="max"), largest, f"{ring} reduce")


def around(ring: Any) -> None:
    """Everybody sends to the next position and receives from the one before."""
    if ring.size == 1:
        return
    x = torch.full((5,), float(ring.rank))
    out = torch.zeros(5)
    with ring.group():
        ring.send(x, peer=(ring.rank + 1) % ring.size)
        ring.recv(out, peer=(ring.rank - 1) % ring.size)
    assert_bits_equal(out, torch.full((5,), float((ring.rank - 1) % ring.size)), f"{ring} around")


def test_rings_of_four_ranks(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        ranks(every_ring, deadline=120)


def interleaved(comm: Any) -> None:
    """Calls of two rings over the same ranks, in another order on each rank, do not mix."""
    rings = [commlib.new_ring(ring_id, range(comm.size)) for ring_id in (15, 16)]
    xs = [torch.full((3,), 10.0 * n + comm.rank) for n in range(2)]
    order = (0, 1) if comm.rank == 0 else (1, 0)
    works = {n: ops.all_reduce(xs[n], 15 + n, use_calc_stream=False, sync_op=False) for n in order}
    for n in order:
        assert_bits_equal(works[n].wait(), torch.full((3,), 20.0 * n + 1), f"ring {15 + n}")
    assert_equal(len(rings), 2, "rings")
    commlib.shutdown()
    commlib.init()


def test_interleaved_rings(new_ranks: NewRanks) -> None:
    with new_ranks(2) as ranks:
        ranks(interleaved)


def every_operator_alone(comm: Any) -> None:
    """Every operator of a ring of one rank is the identity, strided inputs and modes included."""
    assert_equal((comm.rank, comm.size, comm.ranks), (0, 1, (0,)), "ring")
    for op in OPERATORS:
        for name in op.modes:
            on_ring(comm, op, torch.float64, **MODES[name])
        x = sample(0, (4, 6), torch.float64).t()
        assert_bits_equal(op(x), x, f"strided {op.call.__name__}")
    rooted(comm)
    ops.barrier()


def test_ring_of_one(new_ranks: NewRanks) -> None:
    with new_ranks(1) as ranks:
        ranks(every_operator_alone)
