"""Lists with a tensor per rank, in place of one tensor of all parts."""

from collections.abc import Iterator
from typing import Any

import torch

import commlib
from commlib import graph
from commlib.core.collectives.parts import adjacent
from commlib.errors import ArgumentError, DtypeError, PeerError, ShapeError
from tests.support.checks import assert_bits_equal, assert_equal, raises, rounded, sample, wide
from tests.support.runs_on import runs_on

ROOT = 1
UNEVEN = [(3, 2), (0, 2), (5,), (1, 2, 2)]  # of ranks
LATER = {"use_calc_stream": False, "sync_op": False}
MODES: list[dict[str, bool]] = [{}, {"use_calc_stream": False}, LATER]


def of(ring: Any, rank: int, to: int, even: bool, seed: int = 0) -> torch.Tensor:
    """Return what ``rank`` has for rank ``to``: of one size, or of the size of ``to``."""
    shape = (2, 3) if even else UNEVEN[to]
    return sample(rank, shape, torch.float32, seed + 10 * to).to(ring.device)


def places(given: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors as they are, and as parts of one tensor, at its start and inside it."""
    yield [part.clone() for part in given]
    for before in (0, 3):
        flat = torch.full((before + sum(part.numel() for part in given) + 2,), 9.0)
        parts = list(flat.to(given[0].device)[before:-2].split([p.numel() for p in given]))
        yield [a.copy_(b.view(-1)) for a, b in zip(parts, given, strict=True)]
    yield [torch.stack([part, part], -1)[..., 0] for part in given]  # strided


def finished(done: Any, mode: dict[str, bool]) -> Any:
    return done.wait() if mode is LATER else done


def check(actual: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    for part, value in zip(actual, expected, strict=True):
        assert_bits_equal(part.reshape(-1).cpu(), value.reshape(-1).cpu(), what)


@runs_on("ranks")
def test_all_gather(ring: Any) -> None:
    for even in (True, False):
        expected = [of(ring, rank, rank, even) for rank in range(ring.size)]
        for mode in MODES:
            for outs in places([x * 0 for x in expected]):
                done = finished(ring.all_gather(outs, expected[ring.rank], **mode), mode)
                assert_equal([a is b for a, b in zip(done, outs, strict=True)], [True] * 2)
                check(outs, expected, f"even {even}, {mode}")


@runs_on("ranks")
def test_reduce_scatter(ring: Any) -> None:
    for even in (True, False):
        sums = [wide(of(ring, rank, ring.rank, even)) for rank in range(ring.size)]
        expected = rounded(sum(sums), torch.float32)
        inputs = [of(ring, ring.rank, to, even) for to in range(ring.size)]
        for mode in MODES:
            for xs in places(inputs):
                out = torch.empty_like(inputs[ring.rank])
                done = finished(ring.reduce_scatter(out, xs, **mode), mode)
                assert_equal(done is out, True, "result")
                assert_bits_equal(out.cpu(), expected, f"even {even}, {mode}")


@runs_on("ranks")
def test_gather_and_scatter(ring: Any) -> None:
    inputs = [of(ring, rank, 0, even=True) for rank in range(ring.size)]
    parts = [of(ring, ROOT, to, even=True) for to in range(ring.size)]
    for mode in MODES:
        for outs in places([x * 0 for x in inputs]):
            done = finished(ring.gather(outs, inputs[ring.rank], root=ROOT, **mode), mode)
            assert_equal([a is b for a, b in zip(done, outs, strict=True)], [True] * 2)
            check(outs, inputs if ring.rank == ROOT else [x * 0 for x in inputs], f"gather {mode}")
        assert_equal(
            finished(ring.gather(None if ring.rank else outs, inputs[0], root=0, **mode), mode)
            is None,
            bool(ring.rank),
            "None on other ranks",
        )
        for xs in places(parts):
            out = torch.empty_like(inputs[0])
            sources = xs if ring.rank == ROOT else None
            finished(ring.scatter(out, sources, root=ROOT, **mode), mode)
            assert_bits_equal(out.cpu(), parts[ring.rank].cpu(), f"scatter {mode}")


@runs_on("ranks")
def test_all_to_all(ring: Any) -> None:
    for even in (True, False):
        inputs = [of(ring, ring.rank, to, even) for to in range(ring.size)]
        expected = [of(ring, rank, ring.rank, even) for rank in range(ring.size)]
        for mode in MODES:
            lists = zip(places([x * 0 for x in expected]), places(inputs), strict=True)
            for outs, xs in lists:
                finished(ring.all_to_all(outs, xs, **mode), mode)
                check(outs, expected, f"even {even}, {mode}")


@runs_on("three_ranks")
def test_three(ring: Any) -> None:
    expected = [of(ring, rank, rank, even=False) for rank in range(3)]
    outs = [torch.empty_like(x) for x in expected]
    check(ring.all_gather(outs, expected[ring.rank]), expected, "all_gather")
    inputs = [of(ring, ring.rank, to, even=False) for to in range(3)]
    expected = [of(ring, rank, ring.rank, even=False) for rank in range(3)]
    outs = [torch.empty_like(x) for x in expected]
    check(ring.all_to_all(outs, inputs), expected, "all_to_all")


@runs_on("ranks")
def test_adjacent_outputs_take_no_copy(ring: Any) -> None:
    """The collective writes to the tensor that they are views of; autograd notices it."""
    flat = torch.zeros(4, device=ring.device)
    outs, before = list(flat.chunk(2)), flat._version
    ring.all_gather(outs, torch.ones(2, device=ring.device) + ring.rank)
    assert_equal(flat.tolist(), [1.0, 1.0, 2.0, 2.0], "the tensor")
    assert_equal(flat._version > before, True, "version")
    base = adjacent(outs)
    assert_equal(base is not None and base.data_ptr(), flat.data_ptr(), "memory")
    twisted = list(torch.zeros(2, 2).t().chunk(2))
    for parts in (outs[::-1], [outs[0], outs[1].clone()], [flat[:1], flat[2:3]], twisted):
        assert_equal(adjacent(parts), None, "not adjacent")


@runs_on("three_ranks")
def test_shared_memory(ring: Any) -> None:
    """An output that overlaps another rank's part: all parts are read before it is written."""
    at, more = [(0, 3), (3, 5), (5, 6)], [(2, 5), (0, 2), (0, 1)]
    buffer = torch.arange(6.0) + 10 * ring.rank
    out = buffer[slice(*more[ring.rank])]
    ring.reduce_scatter(out, [buffer[slice(*one)] for one in at])
    total = 3 * torch.arange(6.0) + 10 * sum(range(3))
    assert_bits_equal(out, total[slice(*at[ring.rank])], "reduce_scatter")
    buffer = torch.arange(6.0) + 10 * ring.rank
    outs = [buffer[slice(*one)] for one in at]
    ring.all_gather(outs, buffer[slice(*more[ring.rank])])
    expected = [torch.arange(6.0)[slice(*more[r])] + 10 * r for r in range(3)]
    check(outs, expected, "all_gather")


@runs_on("ranks")
def test_inference_tensors(ring: Any) -> None:
    """Outputs that were made in inference mode are filled in it, and waited for anywhere."""
    with torch.inference_mode():
        outs = [torch.zeros(3, device=ring.device) for _ in range(ring.size)]
        flat = torch.zeros(3 * ring.size, device=ring.device)
    x = torch.ones(3, device=ring.device) + ring.rank
    for mode in MODES:
        with torch.inference_mode():
            done = ring.all_gather(outs, x, **mode)
        finished(done, mode)
        check(outs, [torch.ones(3) + rank for rank in range(ring.size)], f"{mode}")
        for outputs in (outs, list(flat.chunk(ring.size))):
            with raises(ArgumentError, "outs[0] is an inference tensor", "torch.inference_mode()"):
                ring.all_gather(outputs, x, **mode)
    ring.barrier()


@runs_on("ranks")
def test_captured(ring: Any) -> None:
    """Copies after the call are operators of the program: a graph has them."""

    def gathered(x: torch.Tensor) -> torch.Tensor:
        outs = [torch.empty_like(x) for _ in range(ring.size)]
        ring.all_gather(outs, x * 2)
        return torch.stack(outs) + 1

    captured: Any = graph.capture(gathered)
    for value in (1.0, 2.0, 3.0):
        x = torch.full((3,), value + ring.rank, device=ring.device)
        expected = torch.stack([torch.full((3,), 2 * (value + r) + 1) for r in range(ring.size)])
        assert_bits_equal(captured(x).cpu(), expected, f"value {value}")


def good_and_short(ring: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return a tensor per rank, and a shorter one per rank."""
    good = [torch.ones(3, device=ring.device) for _ in range(ring.size)]
    return good, [torch.ones(2, device=ring.device) for _ in range(ring.size)]


@runs_on("ranks")
def test_bad_lists(ring: Any) -> None:
    x = torch.ones(3, device=ring.device)
    good, short = good_and_short(ring)
    calls: list[Any] = [
        (lambda parts: ring.all_gather(parts, x), "outs"),
        (lambda parts: ring.gather(parts, x, root=ring.rank), "outs"),
        (lambda parts: ring.reduce_scatter(x, parts), "xs"),
        (lambda parts: ring.scatter(x, parts, root=ring.rank), "xs"),
        (lambda parts: ring.all_to_all(parts, good), "outs"),
        (lambda parts: ring.all_to_all(good, parts), "xs"),
    ]
    for call, role in calls:
        with raises(ShapeError, f"{role} has 1 tensors", f"one per rank, {ring.size}"):
            call(good[:1])
        with raises(ArgumentError, f"{role}[1] is int", "ring 0"):
            call([x, 1])
        with raises(DtypeError, f"{role}[1] is torch.int32", "expected one dtype"):
            call([x, x.int()])
    for call, role in calls[:4]:
        with raises(ShapeError, f"{role}[", "has 2 elements; expected 3"):
            call(short)
    ring.barrier()


@runs_on("ranks")
def test_bad_input(ring: Any) -> None:
    x = torch.ones(3, device=ring.device)
    good, short = good_and_short(ring)
    with raises(ShapeError, "this rank sends itself 2"):
        ring.all_to_all(good, short)
    with raises(ArgumentError, "out_splits or in_splits with lists"):
        ring.all_to_all(good, good, in_splits=[1, 2])
    with raises(ArgumentError, "outs is Tensor; expected a list"):
        ring.all_to_all(x, good)
    with raises(ArgumentError, "out is list and there is no x"):
        ring.all_gather(good)
    with raises(PeerError, "root=7"):
        ring.gather(good, x, root=7)
    with raises(ArgumentError, "out requires grad"):
        ring.all_gather([part.requires_grad_() for part in short], x[:2])
    forms: list[Any] = [
        lambda **how: ring.all_gather(good, x, **how),
        lambda **how: ring.gather(good, x, root=0, **how),
        lambda **how: ring.scatter(x, good, root=0, **how),
    ]
    for one in forms:
        with raises(ArgumentError, "a group is open already"), ring.group():
            one()
        with raises(ArgumentError, "fenced=False"):
            one(use_calc_stream=False, fenced=False)
    with raises(ArgumentError, "use_calc_stream=False"):
        ring.all_gather(good, x, sync_op=False)
    ring.barrier()


@runs_on("ranks")
def test_a_ring_of_one(ring: Any) -> None:
    alone: Any = commlib.new_ring(330, [ring.rank])
    x = torch.arange(3.0, device=ring.device)
    for call, arg in ((alone.all_gather, x), (alone.all_to_all, [x])):
        out = [torch.zeros(3, device=ring.device)]
        call(out, arg)
        assert_bits_equal(out[0].cpu(), torch.arange(3.0), "a ring of one")
    commlib.close_ring(330)
