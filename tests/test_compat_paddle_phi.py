"""compat.paddle: forms in place, the names of Paddle 3, and the bring-up of several devices."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import commlib
from commlib.compat import paddle
from commlib.errors import ArgumentError, PeerError, RingError
from tests.support.checks import (
    Array,
    assert_bits_equal,
    assert_equal,
    raises,
    rounded,
    sample,
    wide,
)
from tests.support.formulas import (
    ROOT,
    from_root,
    joined,
    largest,
    own_part_of_total,
    parts_for_rank,
    product,
    side_by_side,
    smallest,
    total,
)
from tests.support.operator import ABSENT_RING, calls
from tests.support.runs_on import runs_on
from tests.test_compat_paddle import ordered

Tensor = torch.Tensor
Formula = Callable[[list[Array], int], Array]


def mean(inputs: list[Array], rank: int) -> Array:
    return total(inputs, rank) / len(inputs)


REDUCTIONS: dict[str, Formula] = {
    "sum": total,
    "max": largest,
    "min": smallest,
    "prod": product,
    "avg": mean,
}
SHAPE, SEEDED = (4, 6), torch.float32


def inputs_of(comm: Any) -> list[Array]:
    return [wide(sample(rank, SHAPE, SEEDED)) for rank in range(comm.size)]


@pytest.mark.parametrize("op", REDUCTIONS)
@runs_on("ranks")
def test_reductions_in_place(comm: Any, op: str) -> None:
    """The form in place returns x with the bits of the formula, on either stream."""
    want = rounded(REDUCTIONS[op](inputs_of(comm), comm.rank), SEEDED)
    for calc in (False, True):
        local = sample(comm.rank, SHAPE, SEEDED).to(comm.device)
        everywhere, at_root, copy = local.clone(), local.clone(), local.clone()
        name = f"c_allreduce_{op}"
        assert ordered(getattr(paddle, f"{name}_"), everywhere, 0, calc) is everywhere
        assert_bits_equal(everywhere, want, name)
        assert_bits_equal(ordered(getattr(paddle, name), copy, 0, calc), want, name)
        ordered(getattr(paddle, f"c_reduce_{op}_"), at_root, 0, ROOT, calc)
        expected = want if comm.rank == ROOT else local
        assert_bits_equal(at_root, expected, f"c_reduce_{op}_")
        assert_bits_equal(ordered(getattr(paddle, f"c_reduce_{op}"), copy, 0, ROOT, calc), expected)


@runs_on("ranks")
def test_broadcast_in_place(comm: Any) -> None:
    for calc in (False, True):
        x = sample(comm.rank, SHAPE, SEEDED).to(comm.device)
        assert ordered(paddle.c_broadcast_, x, 0, ROOT, calc) is x
        assert_bits_equal(x, sample(ROOT, SHAPE, SEEDED), f"{calc}")
    assert paddle.c_sync_calc_stream_(x) is x
    assert paddle.c_sync_comm_stream_(x) is x


@runs_on("ranks")
def test_gradients_in_place(comm: Any) -> None:
    """The sum passes its gradient on, the identity sums it, and x is the same tensor."""
    weights = sample(comm.rank, SHAPE, SEEDED, seed=1).to(comm.device)
    both = [sample(rank, SHAPE, SEEDED, seed=1) for rank in range(comm.size)]
    summed = rounded(total([wide(one) for one in both], comm.rank), SEEDED)
    for call, gradient in ((paddle.mp_allreduce_sum_, weights), (paddle.c_identity_, summed)):
        leaf = sample(comm.rank, SHAPE, SEEDED).to(comm.device).requires_grad_()
        x = leaf * 2
        result: Any = call(x)
        assert_equal(result is x, True, "the same tensor")
        (result * weights).sum().backward()
        assert leaf.grad is not None
        assert_bits_equal(leaf.grad, gradient.to(comm.device) * 2, f"{call}")
    leaf = sample(comm.rank, SHAPE, SEEDED).to(comm.device).requires_grad_()
    with torch.no_grad():  # a parameter, whose sum is raw
        assert paddle.c_identity_(leaf) is leaf
        assert ordered(paddle.mp_allreduce_sum_, leaf) is leaf
    assert_bits_equal(leaf.detach(), rounded(total(inputs_of(comm), comm.rank), SEEDED), "no_grad")
    plain = sample(comm.rank, SHAPE, SEEDED).to(comm.device)
    want = rounded(total(inputs_of(comm), comm.rank), SEEDED)
    assert_bits_equal(ordered(paddle.mp_allreduce_sum_, plain), want, "without a gradient")
    assert paddle.c_identity_(plain) is plain


CASES: dict[str, tuple[Callable[[Tensor, Any], Tensor], Formula]] = {
    "all_gather": (lambda x, c: paddle.all_gather(x, 0, c.size), joined),
    "all_to_all": (lambda x, c: paddle.all_to_all(x), parts_for_rank),
    "broadcast": (lambda x, c: paddle.broadcast(x, 0, ROOT), from_root),
    "dist_concat": (lambda x, c: paddle.dist_concat(x, 0, c.size), side_by_side),
    "reduce_scatter": (lambda x, c: paddle.reduce_scatter(x, 0, c.size), own_part_of_total),
    **{
        f"all_reduce {op}": (
            lambda x, c, number=number: paddle.all_reduce(x, 0, number),
            REDUCTIONS[op],
        )
        for number, op in enumerate(REDUCTIONS)
    },
}


@pytest.mark.parametrize("name", CASES)
@runs_on("ranks")
def test_names_of_paddle_3(comm: Any, name: str) -> None:
    call, formula = CASES[name]
    x = sample(comm.rank, SHAPE, SEEDED).to(comm.device).requires_grad_()
    result = call(x, comm)
    assert_bits_equal(result, rounded(formula(inputs_of(comm), comm.rank), SEEDED), name)
    assert not result.requires_grad


@runs_on("ranks")
def test_reduce_of_paddle_3(comm: Any) -> None:
    x = sample(comm.rank, SHAPE, SEEDED).to(comm.device)
    for number, formula in enumerate(REDUCTIONS.values()):
        want = formula(inputs_of(comm), comm.rank) if comm.rank == ROOT else wide(x)
        assert_bits_equal(paddle.reduce(x, 0, ROOT, number), rounded(want, SEEDED), f"{number}")


@runs_on("ranks")
def test_sends_of_paddle_3(comm: Any) -> None:
    peer = 1 - comm.rank
    shapes = [(2, 3), (5,), (1, 1, 4)]
    mine, theirs = ([sample(r, shape, SEEDED) for shape in shapes] for r in (comm.rank, peer))
    if comm.rank:
        paddle.p_send(mine[0].to(comm.device), peer=peer)
        paddle.p_send(mine[1].to(comm.device), peer=peer, dynamic_shape=True)
        paddle.p_send_array([one.to(comm.device) for one in mine], peer=peer)
    else:
        assert_bits_equal(paddle.p_recv(0, peer, 5, shapes[0]), theirs[0])
        assert_bits_equal(paddle.p_recv(0, peer, "float32", dynamic_shape=True), theirs[1])
        for got, want in zip(paddle.p_recv_array(0, peer, 5, shapes), theirs, strict=True):
            assert_bits_equal(got, want)


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """A wrong call is an error on its rank and launches nothing."""
    before, x = calls(comm), torch.ones(2, 2, device=comm.device)
    said = ("pass nranks=2", "ring 0")
    wrong: list[tuple[Callable[[], Any], type[Exception], tuple[Any, ...]]] = [
        (lambda: paddle.all_gather(x), ArgumentError, ("all_gather", "nranks=0", *said)),
        (lambda: paddle.reduce_scatter(x), ArgumentError, ("reduce_scatter", "nranks=1", *said)),
        (lambda: paddle.dist_concat(x), ArgumentError, ("dist_concat", "nranks=1", *said)),
        (lambda: paddle.all_reduce(x, 0, 5), ArgumentError, ("reduce_type=5", "4 avg")),
        (lambda: paddle.reduce(x, 0, 0, True), ArgumentError, ("reduce_type=True", "0 sum")),
        (lambda: paddle.reduce(x, 0, 2), PeerError, ("root_id=2",)),
        (lambda: paddle.broadcast(x, 0, 2), PeerError, ("broadcast", "root=2")),
        (lambda: paddle.c_broadcast_(x, 0, -1), PeerError, ("c_broadcast_", "root=-1")),
        (lambda: paddle.p_send(x, peer=2), PeerError, ("p_send", "peer=2")),
        (lambda: paddle.p_recv(peer=-1), PeerError, ("p_recv", "peer=-1")),
        (lambda: paddle.p_send_array([x], peer=2), PeerError, ("p_send_array",)),
        (lambda: paddle.p_recv_array(peer=2), PeerError, ("p_recv_array",)),
        (lambda: paddle.all_to_all(x, ABSENT_RING), RingError, (ABSENT_RING,)),
        (lambda: paddle.c_identity_(x, -1), RingError, ("c_identity_", "ring_id=-1")),
    ]
    for call, error, words in wrong:
        with raises(error, *words):
            call()
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_bring_up_of_devices(comm: Any) -> None:
    """A process has one device: all devices of a process are a ring of one, of trainers all."""
    gpus = [comm.device.index] if comm.device.type == "cuda" else []
    alone = paddle.c_comm_init_all(gpus, 7)
    assert_equal((alone.ranks, paddle.comm_init_all(gpus, 7) is alone), ((comm.rank,), True))
    every = paddle.c_comm_init_multitrainer(comm.size, comm.rank, gpus, 8)
    assert_equal((every.ranks, commlib.comm(8) is every), (comm.ranks, True))
    for call in (paddle.c_comm_init_all, paddle.comm_init_all):
        with raises(ArgumentError, "devices=[0, 1]", "one device per process", "torchrun"):
            call([0, 1], 9)
    with raises(ArgumentError, "c_comm_init_multitrainer: devices=[0, 1]"):
        paddle.c_comm_init_multitrainer(2, 0, [0, 1], 9)
    with raises(ArgumentError, "'here'", "host:port"):
        paddle.c_gen_xccl_id(0, "here")
    paddle.c_gen_xccl_id(0, "127.0.0.1:6170")
