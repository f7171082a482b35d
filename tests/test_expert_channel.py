"""The kernels of the expert exchange against its definition, whatever the shapes and the room."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import commlib
from commlib import flags, ops
from commlib.ops.expert_parallel import calls as kernel_calls
from commlib.ops.expert_parallel import plain_experts
from commlib.ops.expert_parallel.quantize import quantized
from commlib.p2p.experts.channel import ExpertChannel
from commlib.p2p.experts.layout import CALLS
from commlib.p2p.experts.tables import Choices, ExpertSpec
from tests.support.checks import Array, assert_bits_equal, assert_equal, rounded, sample, wide
from tests.support.experts import Routing, given, random_routing, tokens_of, with_weights
from tests.support.ranks import NewRanks, Ranks
from tests.support.runs_on import runs_on
from tests.test_custom_allreduce import another

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
LAUNCHES = 5  # of kernels in ``check``


def channel_of(ring: Any) -> ExpertChannel:
    """Return the ring's channel, which the first call or this one sets up."""
    channel = ring._engine.prepare_experts()
    assert isinstance(channel, ExpertChannel), f"no kernels: {ring._engine._experts._found}"
    return channel


def counted(ring: Any, calls: int) -> None:
    """Check that kernels have ended so many calls of the ring."""
    torch.cuda.synchronize(ring.device)
    state = torch.empty(1, dtype=torch.int64).numpy()
    from cupy.cuda import runtime

    channel = channel_of(ring)
    address = channel._memory.bases[ring.rank] + CALLS
    runtime.memcpy(state.ctypes.data, address, 8, runtime.memcpyDeviceToHost)
    assert_equal(int(state[0]), calls, "calls that kernels have carried")


def check(
    ring: Any, routing: Routing, dtype: torch.dtype, width: int = 64, back: int | None = None
) -> None:
    """Compare a dispatch, the gradient of a combine and a combine with the definition."""
    back = width if back is None else back
    rank, label = ring.rank, f"{dtype} {width} {back} {routing}"
    every = tokens_of(routing, width, dtype)
    kind = torch.int32 if width % 64 else torch.int64
    options = given(routing, ring, ring_id=ring.ring_id, ids=kind)
    sent = ops.expert_dispatch(every[rank].to(ring.device), **options)
    rows = rounded(routing.dispatched([wide(x) for x in every], rank), dtype)
    assert_bits_equal(sent.rows, rows, f"rows {label}")
    tables = routing.tables(rank)
    for name in ("positions", "sources", "demand"):
        assert_bits_equal(getattr(sent.handle, name), tables[name], f"{name} {label}")
    assert_bits_equal(sent.counts, tables["counts"], f"counts {label}")
    assert_bits_equal(sent.handle.row_weights, routing.row_weights(rank), f"weights {label}")
    shape = (routing.local, routing.capacity, back)
    ys = [sample(20 + r, shape, dtype) for r in range(ring.size)]
    grads = [sample(40 + r, (len(ids), back), dtype) for r, ids in enumerate(routing.ids)]
    y = ys[rank].to(ring.device).requires_grad_()
    for weighted in (True, False):
        out = ops.expert_combine(y, sent.handle, weighted=weighted)
        sums = routing.combined([wide(one) for one in ys], rank, weighted=weighted)
        assert_bits_equal(out.detach(), rounded(sums, dtype), f"sums {weighted} {label}")
    (gradient,) = torch.autograd.grad(
        ops.expert_combine(y, sent.handle), y, grads[rank].to(ring.device)
    )
    expected = routing.gradient_of_y([wide(grad) for grad in grads], rank)
    assert_bits_equal(gradient, rounded(expected, dtype), f"gradient {label}")


@runs_on("gpu_ranks")
def test_the_channel_is_used(comm: Any) -> None:
    """Every call of a ring on one host is one kernel, and the report names its memory."""
    with another(comm, 90) as ring:
        before = ring._engine.memory.workspace
        check(ring, random_routing(comm.size, 1), torch.bfloat16)
        counted(ring, LAUNCHES)
        assert_equal(ring._engine.memory.workspace - before, channel_of(ring).nbytes, "memory")


@runs_on("gpu_ranks")
def test_numbers_of_more_than_32_bits(comm: Any) -> None:
    """The low half of a number is never 0: counts that nobody has written would look complete."""
    with another(comm, 91) as ring:
        channel_of(ring)._memory.put(CALLS, (2**32 - 1).to_bytes(8, "little"))
        for seed in (1, 2):
            check(ring, random_routing(comm.size, seed), torch.bfloat16)
        counted(ring, 2**32 + 1 + 2 * LAUNCHES)


@runs_on("gpu_ranks", deadline=200)
def test_random_routings(comm: Any) -> None:
    """Random numbers of tokens, experts, choices and capacities, in rows of any width."""
    for seed in range(24):
        width = (8, 24, 64, 136, 1032, 4096)[seed % 6]
        back = (64, 8, 24, 1032, 4104)[seed % 5]  # sums of few vectors, and of an odd number
        check(comm, random_routing(comm.size, seed), DTYPES[seed % 3], width, back)


@pytest.mark.parametrize("size", [3, 4])
def test_more_ranks(new_gpu_ranks: NewRanks, size: int) -> None:
    """Ranks that share a GPU take turns on it: a wait for another one takes as long as its turn."""
    with new_gpu_ranks(size) as ranks:
        ranks(several, 6, 2, deadline=200)


def several(comm: Any, routings: int, turns: int) -> None:
    for seed in range(routings):
        check(comm, random_routing(comm.size, seed), DTYPES[seed % 3], (8, 512)[seed % 2])
    crowded(comm, turns)


def test_more_gpus(many_gpu_ranks: Ranks) -> None:
    many_gpu_ranks(several, 12, 6, deadline=200)


def extreme(size: int) -> list[Routing]:
    """Return routings at the borders of what the kernels take."""
    every = range(size)
    one = [[[size - 1, 0]] * (40 * (rank + 1)) for rank in every]  # all tokens for two experts
    nobody = [[[-1, 99]] * 5 for _ in every]
    lone = [[[e % 7 for e in range(3)]] * (9 if rank == size - 1 else 0) for rank in every]
    twice = [[[2, 2, 1, 2]] * 6 for _ in every]  # the same expert several times
    many = [[[*range(32)]] * 7 for _ in every]
    none: list[list[list[list[int]]]] = [[] for _ in every]
    shapes: list[tuple[int, int, Sequence[Any]]] = [
        (size, 4, one), (7, 3, nobody), (7, 5, lone), (3, 20, twice), (1000, 2, many), (5, 2, none),
    ]  # fmt: skip
    top_k = [2, 2, 3, 4, 32, 2]
    return [
        with_weights(Routing(experts, capacity, ids, k))
        for (experts, capacity, ids), k in zip(shapes, top_k, strict=True)
    ]


@runs_on("gpu_ranks", deadline=120)
def test_borders(comm: Any) -> None:
    for routing in extreme(comm.size):
        check(comm, routing, torch.float32, 16)


def crowded(comm: Any, turns: int) -> None:
    """More tokens than slots, unevenly to the ranks, and slots of another size in every call."""
    with flags.override(flags.CHANNEL, 1), another(comm, 91) as ring:
        values = np.random.default_rng(5)
        numbers = {"num_experts": 2 * comm.size + 1, "capacity": 70, "top_k": 3}
        widths = (512, 512), (2048, 512), (512, 1024)
        for turn in range(turns):
            tokens = values.integers(0, 150, comm.size).tolist()
            routing = random_routing(comm.size, turn, tokens=tokens, **numbers)
            for width, back in widths:
                check(ring, routing, torch.bfloat16, width, back)
        counted(ring, turns * len(widths) * LAUNCHES)


@runs_on("gpu_ranks", deadline=200)
def test_more_tokens_than_slots(comm: Any) -> None:
    crowded(comm, 6)


@runs_on("gpu_ranks", deadline=120)
def test_rows_of_alternate_ranks(comm: Any) -> None:
    """A sender's tokens for one rank all come after those for the other: no order between them."""
    with flags.override(flags.CHANNEL, 1), another(comm, 92) as ring:
        count, size = 200, comm.size
        ids = [
            [[rank if token < count // 2 else (rank + 1) % size] for token in range(count)]
            for rank in range(size)
        ]
        for turn in range(4):
            shuffled = [one[::-1] if (rank + turn) % 2 else one for rank, one in enumerate(ids)]
            routing = with_weights(Routing(size, 150, shuffled, 1), turn)
            check(ring, routing, torch.float32, 1024)


@runs_on("gpu_ranks", deadline=120)
def test_the_plain_form_gives_the_same_bits(comm: Any) -> None:
    """Both forms on one device, also rows in 8 bits with their scales."""
    for seed in range(9):
        dtype, routing = DTYPES[seed % 3], random_routing(comm.size, seed, capacity=6)
        x = tokens_of(routing, 256, dtype)[comm.rank].to(comm.device)
        if len(x):
            x[0, :128] = 0  # a scale without a magnitude
            x[-1, 130] = 3e4
        options = given(routing, comm)
        choices = Choices(options["expert_ids"], options["weights"] if seed % 2 else None, None)
        numbers = routing.num_experts, routing.capacity, routing.top_k, dtype, 256
        for quantize in (False, True):
            spec = ExpertSpec(*numbers, quantize=quantize, reports=False)
            actual, expected = (
                form.dispatch(comm, x, choices, spec, True)
                for form in (kernel_calls, plain_experts)
            )
            for one, other in zip(flat(actual), flat(expected), strict=True):
                assert_bits_equal(one, other, f"{seed} {quantize} {routing}")


def flat(result: Any) -> list[torch.Tensor]:
    rows, scales, tables, counts = result
    return [rows.view(torch.uint8), scales, *tables, *counts]


@runs_on("gpu_ranks")
def test_float8_rows(comm: Any) -> None:
    """Rows in 8 bits are those of the definition on a CPU."""
    for dtype in DTYPES:
        routing = random_routing(comm.size, 3, tokens=[17] * comm.size, capacity=40)
        every = tokens_of(routing, 384, dtype)
        sent = ops.expert_dispatch(
            every[comm.rank].to(comm.device), **given(routing, comm), quantize="fp8"
        )
        expected = [quantized(x) for x in every]
        codes: list[Array] = [one[0].view(torch.uint8).numpy() for one in expected]
        scales: list[Array] = [one[1].numpy() for one in expected]
        assert sent.scales is not None
        assert_bits_equal(sent.scales, routing.dispatched(scales, comm.rank), f"scales {dtype}")
        rows = sent.rows.view(torch.uint8)
        assert_bits_equal(rows, routing.dispatched(codes, comm.rank), f"rows {dtype}")


@runs_on("gpu_ranks")
def test_memory_of_a_suspended_ring(comm: Any) -> None:
    """suspend() frees the workspace; the next call sets it up again."""
    ring = commlib.new_ring(93, range(comm.size))
    assert ring is not None
    before = ring._engine.memory.workspace
    check(ring, random_routing(comm.size, 4), torch.float16)
    ring.suspend()
    assert_equal(ring._engine.memory.workspace, before, "workspace")
    ring.resume()
    check(ring, random_routing(comm.size, 5), torch.float16)
    commlib.CommContextManager.instance().close(93)
