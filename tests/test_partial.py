"""ops.partial_send, partial_recv and partial_all_gather: equal slices of flattened tensors."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import commlib
from commlib import ops
from commlib.compat import paddle
from commlib.errors import ArgumentError, PeerError, RingError, ShapeError
from commlib.ops.pipeline_parallel.slices import fill, joined, slice_views
from tests.support.checks import (
    STRIDED,
    Array,
    Framed,
    assert_bits_equal,
    assert_equal,
    bits,
    from_bits,
    laid_out,
    raises,
    sample,
)
from tests.support.examples import examples
from tests.support.operator import ABSENT_RING, MODES, Operator, calls, compile_whole
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on
from tests.support.suites import (
    compiled,
    compiled_out,
    layouts,
    lazy_bits,
    raw,
    suite_of,
    values,
    waiting,
)

lengths = st.lists(st.integers(1, 4), min_size=1, max_size=4)


@examples(150)
@given(shape=lengths, data=st.data())
def test_pieces(shape: list[int], data: Any) -> None:
    """Any run of elements of any strides: views that hold it in order, and nothing else."""
    order = data.draw(st.permutations(range(len(shape))))
    step = data.draw(st.integers(1, 2))
    buffer = torch.zeros([n * step for n in shape])
    x = buffer[tuple(slice(None, None, step) for _ in shape)].permute(order)
    count = x.numel()
    x.copy_(torch.arange(1.0, count + 1).view(x.shape))
    first = data.draw(st.integers(0, count))
    last = data.draw(st.integers(first, count))
    pieces = slice_views(x, first, last)
    assert len(pieces) <= max(1, 2 * x.dim() - 1)
    assert joined(pieces).reshape(-1).tolist() == list(range(first + 1, last + 1))
    fill(pieces, torch.full((last - first,), -1.0))
    want = [-1.0 if first < n <= last else float(n) for n in range(1, count + 1)]
    assert x.reshape(-1).tolist() == want
    assert int((buffer != 0).sum()) == count


DTYPES = (torch.float64, torch.bfloat16, torch.float8_e5m2, torch.bool, torch.complex128)


def own_slices(inputs: list[Array], rank: int) -> Array:
    """Slice r of the flattened result is rank r's."""
    shape, size = inputs[0].shape, len(inputs)
    flat = [x.reshape(-1) for x in inputs]
    part = flat[0].size // size
    full = flat[0].copy()
    for r, x in enumerate(flat):
        full[r * part : (r + 1) * part] = x[r * part : (r + 1) * part]
    return full.reshape(shape)


GATHER = Operator(ops.partial_all_gather, own_slices, divides=True, in_place=True)


test_gather = suite_of(
    GATHER, only=(values, layouts, lazy_bits, waiting, raw, compiled, compiled_out)
)


def in_place(comm: Any) -> None:
    """The normal use: a tensor of which this rank has its own slice is completed where it is."""
    for layout in STRIDED:
        every = [sample(r, (2 * comm.size, 3), torch.float64) for r in range(comm.size)]
        want = from_bits(own_slices([bits(x) for x in every], comm.rank), torch.float64)
        for mode in MODES.values():
            frame = Framed(tuple(want.shape), torch.float64, comm.device, layout)
            x = frame.view.copy_(every[comm.rank])
            result = ops.partial_all_gather(x, out=x, **mode)
            result = result.wait() if isinstance(result, commlib.Work) else result
            assert_equal(result.data_ptr(), x.data_ptr(), "address")
            assert_bits_equal(x, want, f"{layout} {mode}")
            frame.intact(layout)


def test_gather_in_place(ranks: Ranks) -> None:
    ranks(in_place)


def test_gather_in_place_on_three(three_ranks: Ranks) -> None:
    three_ranks(in_place)


def handed(comm: Any, num: int, dtype: torch.dtype, layout: str, **mode: bool) -> None:
    """Rank 0 sends slice after slice; rank 1 puts each in its place and touches nothing else."""
    shape = (num, 3)
    x, old = sample(0, shape, dtype), sample(1, shape, dtype)
    for id in range(num):
        if comm.rank == 0:
            done: Any = ops.partial_send(
                laid_out(x, layout, comm.device), peer=1, num=num, id=id, **mode
            )
            assert_equal(done is None, mode.get("sync_op", True), "what partial_send returns")
        else:
            frame = Framed(shape, dtype, comm.device, layout)
            done = ops.partial_recv(frame.view.copy_(old), peer=0, num=num, id=id, **mode)
            result = done.wait() if isinstance(done, commlib.Work) else done
            assert_equal(result is frame.view, True, "returns out")
            want = old.clone()
            want[id] = x[id]
            assert_bits_equal(result, want, f"slice {id} of {num} {layout} {mode}")
            frame.intact(f"slice {id}")
        if isinstance(done, commlib.Work):
            done.wait()


@runs_on("ranks")
def test_slices(comm: Any) -> None:
    for dtype in DTYPES:
        for mode in MODES.values():
            handed(comm, 4, dtype, "contiguous", **mode)
    for layout in ("transposed", "stepped"):
        handed(comm, 3, torch.float32, layout)
        handed(comm, 1, torch.float32, layout, use_calc_stream=False)


@runs_on("ranks")
def test_torn_slices(comm: Any) -> None:
    """A slice in several pieces, on either side or both, in every form that can have one."""
    want = sample(0, (5, 4, 3), torch.float32)
    old = sample(1, (5, 4, 3), torch.float32)
    expected = old.view(-1).clone()
    expected[20:40] = want.view(-1)[20:40]
    for mine, theirs in (("transposed", "contiguous"), ("contiguous", "transposed"), (STRIDED[1:])):
        for mode in MODES.values():
            if comm.rank == 0:
                sent = ops.partial_send(
                    laid_out(want, mine, comm.device), peer=1, num=3, id=1, **mode
                )
                if isinstance(sent, commlib.Work):
                    sent.wait()
                continue
            frame = Framed((5, 4, 3), torch.float32, comm.device, theirs)
            frame.view.copy_(old)
            alone = {**mode, "sync_op": True} if theirs != "contiguous" else mode
            got = ops.partial_recv(frame.view, peer=0, num=3, id=1, **alone)
            got = got.wait() if isinstance(got, commlib.Work) else got
            assert_bits_equal(got, expected.view(5, 4, 3), f"{mine} to {theirs} {mode}")
            frame.intact(theirs)


@runs_on("ranks")
def test_in_a_group(comm: Any) -> None:
    """Slices of one group; one in pieces would be put in place before it came, so it is refused."""
    x, out = sample(comm.rank, (4, 3), torch.float32).to(comm.device), torch.zeros(4, 3)
    out, peer = out.to(comm.device), 1 - comm.rank
    with comm.group():
        for id in range(4):
            ops.partial_send(x.t().contiguous().t(), peer=peer, num=4, id=id)
            ops.partial_recv(out, peer=peer, num=4, id=id)
    assert_bits_equal(out, sample(peer, (4, 3), torch.float32), "four slices both ways")
    before = calls(comm)
    with raises(ArgumentError, "ring.group()", "contiguous()"), comm.group():
        ops.partial_recv(out.view(3, 4).t(), peer=peer, num=3, id=1)
    assert_equal(calls(comm), before, "calls launched by a refused one")


@runs_on("ranks")
def test_opcheck(comm: Any) -> None:
    op = torch.ops.commlib.partial_all_gather.default
    for shape in ((4, 3), (2,), (0, 2)):
        torch.library.opcheck(op, (sample(0, shape, torch.float32).to(comm.device), 0, True))


@runs_on("ranks")
def test_compiled_torn_slices(comm: Any) -> None:
    full = sample(0, (4, 3), torch.float32).to(comm.device)
    if comm.rank == 0:
        compile_whole(lambda x: ops.partial_send(x.t(), peer=1, num=2, id=1))(full)
    else:
        out = torch.zeros(4, 3, device=comm.device).t()
        compile_whole(lambda out: ops.partial_recv(out, peer=0, num=2, id=1))(out)
        want = full.t().reshape(-1).cpu()
        want[:6] = 0
        assert_bits_equal(out, want.view(3, 4), "compiled, in pieces")


@runs_on("ranks")
def test_compiled_slices(comm: Any) -> None:
    x = sample(0, (4, 3), torch.float32).to(comm.device)
    if comm.rank == 0:
        compile_whole(lambda x: ops.partial_send(x * 2, peer=1, num=4, id=2))(x)
    else:
        out = torch.zeros(4, 3, device=comm.device)
        compile_whole(lambda out: ops.partial_recv(out, peer=0, num=4, id=2) + 0)(out)
        assert_bits_equal(
            out, torch.cat([torch.zeros(2, 3), x[2:3].cpu() * 2, torch.zeros(1, 3)]), "compiled"
        )


def pipeline(comm: Any, legacy: bool) -> None:
    """Two stages of two tensor-parallel ranks: each pair moves half, the stage completes it.

    Ranks 0 and 1 hold one activation; rank r sends its half to rank r + 2 over their pair ring,
    and ranks 2 and 3 complete theirs over their own.
    """
    stage, part = divmod(comm.rank, 2)
    pair, mates = commlib.new_ring(10 + part, [part, part + 2]), commlib.new_ring(20, [2, 3])
    assert pair is not None
    x = sample(7, (6, 5), torch.float32).to(comm.device)
    kwargs = {"use_calc_stream": True, "num": 2, "id": part}
    if stage == 0:
        send = paddle.partial_send if legacy else ops.partial_send
        send(x, pair.ring_id, peer=1, **kwargs)
        return
    assert mates is not None
    if legacy:
        got = paddle.partial_recv([6, 5], torch.float32, peer=0, ring_id=pair.ring_id, **kwargs)
        paddle.partial_allgather(got, nranks=2, rank=part, ring_id=20, use_calc_stream=True)
    else:
        got = ops.partial_recv(torch.zeros_like(x), pair.ring_id, peer=0, **kwargs)
        ops.partial_all_gather(got, 20, out=got)
    assert_bits_equal(got, x, f"the activation on rank {comm.rank}")


def pipelines(comm: Any) -> None:
    for legacy in (False, True):
        pipeline(comm, legacy)


def test_a_pipeline(new_ranks: NewRanks) -> None:
    with new_ranks(4) as ranks:
        ranks(pipelines)


@runs_on("all_gpu_ranks")
def test_many_elements(comm: Any) -> None:
    """Element counts of 64 bits: the slice is beyond what 32 bits can number."""
    count = 2**31 + 2**10
    half = count // 2
    x = torch.zeros(count, dtype=torch.uint8, device=comm.device)
    x[half:] = 1 + comm.rank
    if comm.rank == 0:
        ops.partial_send(x, peer=1, num=2, id=1)
    else:
        ops.partial_recv(x, peer=0, num=2, id=1)
        assert_equal(
            (int(x[:half].max()), int(x[half:].min()), int(x[half:].max())), (0, 1, 1), "halves"
        )
    x.fill_(5 + comm.rank)
    ops.partial_all_gather(x, out=x)
    assert_equal((int(x[0]), int(x[half - 1]), int(x[half]), int(x[-1])), (5, 5, 6, 6), "gathered")


@runs_on("all_gpu_ranks")
def test_captured(comm: Any) -> None:
    x, out = (torch.zeros(6, 4, device=comm.device) for _ in range(2))
    ops.partial_all_gather(x)

    def step() -> torch.Tensor:
        out.zero_()
        if comm.rank == 0:
            ops.partial_send(x, peer=1, num=3, id=1)
        else:
            ops.partial_recv(out, peer=0, num=3, id=1)
        gathered: torch.Tensor = ops.partial_all_gather(out + x)
        return gathered

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()
    for seed in range(3):
        x.copy_(sample(comm.rank, (6, 4), torch.float32, seed))
        graph.replay()
        assert_bits_equal(result.clone(), step(), f"replay {seed}")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    x, before, other = torch.zeros(6, 2, device=comm.device), calls(comm), 1 - comm.rank
    for call in (ops.partial_send, ops.partial_recv):
        for num in (0, -1, 1.5, True):
            with raises(ArgumentError, f"num={num!r}"):
                call(x, peer=other, num=num)
        for id in (-1, 3, None):
            with raises(ArgumentError, f"id={id!r}"):
                call(x, peer=other, num=3, id=id)
        with raises(ShapeError, "(6, 2)", "num=5"):
            call(x, peer=other, num=5)
        with raises(PeerError, f"{call.__name__} on ring 0", "peer=7"):
            call(x, peer=7, num=2)
        with raises(PeerError, "itself"):
            call(x, peer=comm.rank, num=2)
        with raises(RingError, ABSENT_RING):
            call(x, ABSENT_RING, peer=other, num=2)
        with raises(ArgumentError, "list"):
            call([1.0], peer=other)  # type: ignore[call-overload]
    with raises(ArgumentError, "overlaps itself"):
        ops.partial_recv(x[:1].expand(6, 2), peer=other, num=2)
    with raises(ArgumentError, "sync_op=False", "contiguous()"):
        ops.partial_recv(x.t(), peer=other, num=3, id=1, use_calc_stream=False, sync_op=False)
    with raises(ShapeError, "(3, 1)", "num=2"):
        ops.partial_all_gather(x[:3, :1])
    with raises(RingError, ABSENT_RING):
        ops.partial_all_gather(x, ABSENT_RING)
    assert_equal(calls(comm), before, "calls launched by refused ones")


@runs_on("ranks")
def test_legacy_errors(comm: Any) -> None:
    x, before = torch.zeros(6, 2, device=comm.device), calls(comm)
    for nranks, rank in ((3, comm.rank), (2, 1 - comm.rank)):
        with raises(ArgumentError, "partial_allgather"):
            paddle.partial_allgather(x, nranks, rank)
    with raises(RingError, "ring_id=-1"):
        paddle.partial_send(x, -1)
    with raises(PeerError, "peer=2"):
        paddle.partial_send(x, peer=2)
    with raises(ShapeError, "partial_recv", "out_shape=()"):
        paddle.partial_recv(peer=1 - comm.rank)
    with raises(ShapeError, "out_shape=(2, 0)"):
        paddle.partial_recv([2, 0], peer=1 - comm.rank)
    assert_equal(calls(comm), before, "calls launched by refused ones")
