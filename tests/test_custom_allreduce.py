"""The push kernels: their bits, their order with streams and graphs, and what a lost peer does.

The CPU engine runs the same programs where they have a meaning there; what only hardware shows
returns at once elsewhere.
"""

import contextlib
import random
import struct
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import commlib
import commlib.graph
from commlib import ops
from commlib.errors import ArgumentError
from commlib.p2p import kernel_table, peer_memory
from tests.support.checks import (
    assert_bits_equal,
    assert_equal,
    bits,
    on_gpu,
    raises,
    rounded,
    settle,
    wide,
)
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
SPECIALS = (0.0, -0.0, float("nan"), float("inf"), -float("inf"), 1e-40, -1e-40, 3e38, 6e-8)


@contextlib.contextmanager
def another(comm: Any, ring_id: int, timeout: float | None = None) -> Iterator[Any]:
    """Give a ring of the same ranks, aborted after the block: it may be broken by then.

    The ranks meet before: an abort ends the calls that a peer has not finished.
    """
    yield commlib.new_ring(ring_id, range(comm.size), timeout=timeout)
    comm.exchange([])
    commlib.CommContextManager.instance().close(ring_id, abort=True)


def drawn(seed: int, items: int, dtype: torch.dtype, size: int) -> list[torch.Tensor]:
    """Return every rank's tensor: normal values, and at the front all pairs of special ones."""
    values = np.random.default_rng(seed)
    inputs = [rounded(values.standard_normal(items), dtype) for _ in range(size)]
    count = min(items, len(SPECIALS) ** 2)
    for rank, x in enumerate(inputs):
        for i in range(count):
            x[i] = SPECIALS[i // len(SPECIALS) if rank % 2 else i % len(SPECIALS)]
    return inputs


def reduced(inputs: list[torch.Tensor], op: str) -> torch.Tensor:
    """Reduce in rank order in float32 from +0, round once, and give zeros no sign."""
    total = np.zeros(inputs[0].shape, np.float32)
    with np.errstate(all="ignore"):
        for rank, x in enumerate(inputs):
            each = wide(x).astype(np.float32)
            if op in ("sum", "avg"):
                total = total + each
            else:
                total = each if rank == 0 else _EXTREME[op](total, each)
        if op == "avg":
            total = total / np.float32(len(inputs))
    result = torch.from_numpy(total).to(inputs[0].dtype)
    return torch.where(result == 0, torch.zeros_like(result), result)


_EXTREME = {"max": np.maximum, "min": np.minimum}


def alike(actual: torch.Tensor, expected: torch.Tensor, what: object) -> None:
    """Raise unless all bits are equal; NaNs count as equal."""
    fixed = torch.where(actual.cpu().isnan(), torch.full_like(expected, float("nan")), actual.cpu())
    wanted = torch.where(expected.isnan(), torch.full_like(expected, float("nan")), expected)
    assert_bits_equal(fixed, wanted, what)


def equal_everywhere(comm: Any, x: torch.Tensor, what: object) -> None:
    """Raise unless all ranks hold the same bits, NaNs included."""
    digests = comm.exchange([zlib.crc32(bits(x).tobytes())])
    assert_equal(digests, [digests[0]] * comm.size, f"{what}: digest of the bits on each rank")


def values(comm: Any, sizes: list[int]) -> None:
    """Any byte count, place and operation gives the stated reference, on all ranks alike."""
    for items in sizes:
        for dtype in FLOATS:
            for op in ("sum", "avg", "max", "min"):
                inputs = drawn(items, items, dtype, comm.size)
                want, label = reduced(inputs, op), f"{op} of {items} x {dtype}"
                flat = torch.zeros(items + 1, dtype=dtype, device=comm.device)
                for shift in (0, 1):
                    x = flat[shift : shift + items].copy_(inputs[comm.rank])
                    out = torch.full_like(x, 7)
                    alike(comm.all_reduce(out, x, op=op), want, label)
                    equal_everywhere(comm, out, label)
                    alike(x, inputs[comm.rank], f"{label}: x afterwards")
                    alike(comm.all_reduce(x, x, op=op), want, f"{label} in place")


SMALL = [1, 2, 3, 7, 8, 9, 63, 64, 65, 511, 1025, 4099]
LARGE = [32768, 70001, 131073, 300007, 1_000_003, 4_194_304, 20_000_001]


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_values(gpu_ranks: Ranks, sizes: list[int]) -> None:
    gpu_ranks(values, sizes, deadline=240)


def test_values_of_more_ranks(many_gpu_ranks: Ranks) -> None:
    many_gpu_ranks(values, [1, 9, 1025, 20_011, 70_001, 300_007, 1_000_003], deadline=240)


@runs_on("gpu_ranks", deadline=120)
def test_every_length(comm: Any) -> None:
    """Every odd number of bytes up to 600, and some up to 64 KiB, moved."""
    for nbytes in [*range(1, 600, 2), *range(601, 65536, 997)]:
        parts = [
            torch.arange(nbytes, dtype=torch.int32).add(7 * r).byte() for r in range(comm.size)
        ]
        x = parts[comm.rank].to(comm.device)
        out = torch.zeros(comm.size * nbytes, dtype=torch.uint8, device=comm.device)
        assert_bits_equal(comm.all_gather(out, x), torch.cat(parts), f"{nbytes} bytes")


def movements(comm: Any, part: int) -> None:
    """all_gather, all_to_all and reduce_scatter, at sizes on both sides of what is pushed."""
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        every = [
            torch.arange(part * comm.size).add(1000 * r).remainder(97).to(dtype)
            for r in range(comm.size)
        ]
        x = every[comm.rank].to(comm.device)
        segments = [t.view(comm.size, part) for t in every]
        out = torch.zeros(comm.size * part, dtype=dtype, device=comm.device)
        want = torch.cat([p[comm.rank] for p in segments])
        assert_bits_equal(comm.all_to_all(out, x), want, f"all_to_all {part} {dtype}")
        assert_bits_equal(
            comm.all_gather(out, x[:part]), torch.cat([t[:part] for t in every]), "all_gather"
        )
        inside = out[comm.rank * part : (comm.rank + 1) * part]
        inside.copy_(x[:part])
        assert_bits_equal(
            comm.all_gather(out, inside), torch.cat([t[:part] for t in every]), "in place"
        )
        if dtype.itemsize > 1:
            total = (
                torch.stack(segments)[:, comm.rank].double().sum(0).to(dtype)
            )  # small whole numbers
            assert_bits_equal(
                comm.reduce_scatter(out[:part], x), total, f"reduce_scatter {part} {dtype}"
            )
            assert_bits_equal(
                comm.reduce_scatter(x.view(comm.size, -1)[comm.rank], x), total, "in place"
            )


@pytest.mark.parametrize("part", [1, 3, 1000, 40_001, 600_000])
def test_movements(unified_ranks: Ranks, part: int) -> None:
    unified_ranks(movements, part)


def test_movements_of_more_ranks(many_ranks: Ranks) -> None:
    for part in (3, 40_001):
        many_ranks(movements, part)


# The calls of a script, and how often each of them is chosen.
KINDS = {"sum": 11, "gather": 2, "scatter": 2, "exchange": 2, "experts": 2, "begin": 2}
MOST, TOKENS, WIDTH = 1 << 19, 64, 64


class Script:
    """The same mixed calls on every rank, each checked against what they must give."""

    def __init__(self, comm: Any, seed: int) -> None:
        self.comm, self.dice = comm, random.Random(seed)
        # Whole numbers whose sums are exact: right in any order, so on every engine.
        inputs = [
            rounded(np.random.default_rng(r).integers(-16, 17, MOST), torch.bfloat16)
            for r in range(comm.size)
        ]
        self.inputs = [x.to(comm.device) for x in inputs]
        self.x = self.inputs[comm.rank]
        self.out = torch.zeros(MOST, dtype=torch.bfloat16, device=comm.device)
        self.gathered = torch.zeros(comm.size << 12, dtype=torch.bfloat16, device=comm.device)
        self.total = reduced(inputs, "sum").to(comm.device)

    def call(self, check: bool) -> None:
        """Make one call of a random kind and size."""
        items = 1 << self.dice.randrange(0, 19)
        items = self.dice.randint(items, 2 * items)
        kind = self.dice.choices(list(KINDS), list(KINDS.values()))[0]
        actual, want = getattr(self, kind)(items)
        assert_equal(check and not torch.equal(actual, want), False, f"{kind} of {items} items")

    def sum(self, items: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.comm.all_reduce(self.out[:items], self.x[:items])
        return out, self.total[:items]

    def begin(self, items: int) -> tuple[torch.Tensor, torch.Tensor]:
        work = self.comm.all_reduce_begin(self.out[:items], self.x[:items])
        self.x.add_(0)
        return work.wait(), self.total[:items]

    def gather(self, items: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = items % 4096 + 1
        out = self.comm.all_gather(self.gathered[: self.comm.size * count], self.x[:count])
        return out, torch.cat([x[:count] for x in self.inputs])

    def scatter(self, items: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = items // self.comm.size
        out = self.comm.reduce_scatter(self.out[:count], self.x[: count * self.comm.size])
        return out, self.part(self.total, count)

    def exchange(self, items: int) -> tuple[torch.Tensor, torch.Tensor]:
        count = items // self.comm.size
        total = count * self.comm.size
        out = self.comm.all_to_all(self.out[:total], self.x[:total])
        return out, torch.cat([self.part(x, count) for x in self.inputs])

    def part(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """Return this rank's part of ``count`` items."""
        return x[self.comm.rank * count : (self.comm.rank + 1) * count]

    def experts(self, items: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Send tokens to two experts each, which multiply them by the number of their rank + 1."""
        comm, tokens = self.comm, items % TOKENS + 1
        x = self.x[: tokens * WIDTH].view(tokens, WIDTH)
        first = torch.arange(tokens, device=comm.device) + items + comm.rank
        ids = torch.stack([first, first + 1], 1) % (2 * comm.size)
        sent = ops.expert_dispatch(x, ids, 2 * comm.size, TOKENS * comm.size, comm.ring_id)
        out = ops.expert_combine(sent.rows * (comm.rank + 1), sent.handle)
        factors = (ids // 2 + 1).sum(1, keepdim=True)
        return out, x * factors  # whole numbers below 256: exact


def mixed(comm: Any, count: int, seed: int) -> None:
    """Random calls while each rank is held up at random; every so many are checked."""
    count = count if on_gpu(comm) else 50
    script, rng = Script(comm, seed), random.Random(seed * 8 + comm.rank)
    for number in range(count):
        if on_gpu(comm) and rng.random() < 0.05:
            torch.cuda._sleep(rng.randrange(200_000))
        script.call(check=number % 7 == 0 or count - number < 20)
    settle(comm)


def test_mixed_calls(unified_ranks: Ranks, request: pytest.FixtureRequest) -> None:
    unified_ranks(mixed, request.config.getoption("mixed_calls"), 3, deadline=900)


def test_mixed_calls_of_more_ranks(many_ranks: Ranks, request: pytest.FixtureRequest) -> None:
    many_ranks(mixed, request.config.getoption("mixed_calls"), 4, deadline=900)


@runs_on("gpu_ranks")
def test_call_numbers_wrap(comm: Any) -> None:
    """The numbers of calls pass 2**32: halves go on taking turns."""
    with another(comm, 80) as ring:
        torch.cuda.synchronize()
        ring.exchange([])
        done = 2**32 - 8 << 13  # as in channel.cuh
        ring._engine._push._memory.put(0, struct.pack("<Q", done))
        ring.exchange([])
        mixed(ring, 40, 5)


def answers(comm: Any) -> list[str]:
    return [comm.explain(n, d) for n in (4, 10**5, 10**10) for d in (torch.bfloat16, torch.int32)]


@runs_on("unified_ranks")
def test_explain(comm: Any) -> None:
    """Says what runs, the same on every rank."""
    said = answers(comm)
    assert_equal(
        len({tuple(row) for row in comm.exchange([zlib.crc32("".join(said).encode())])}), 1, said
    )
    assert_equal(comm.explain(0, torch.float32), "nothing is sent: no bytes", "no bytes")
    for wrong in (3, -2):
        with raises(ArgumentError, f"nbytes={wrong}", "multiple of 2"):
            comm.explain(wrong, torch.bfloat16)
    with another(comm, 88) as ring:
        ring.abort()
        assert_equal("aborted" in ring.explain(4, torch.float32), True, "of a ring that has ended")
    assert_equal("float64" in comm.explain(8, torch.float64), True, "a dtype without a kernel")


@runs_on("cpu_ranks")
def test_explain_on_a_cpu(comm: Any) -> None:
    assert_equal({text.split(":")[0] for text in answers(comm)}, {comm.engine})


@runs_on("gpu_ranks")
def test_explain_on_a_gpu(comm: Any) -> None:
    """Says which sizes push kernels take, and the flag turns all of it off."""
    heads = ["one_shot", "NCCL:", "one_shot", "NCCL:", "NCCL:", "NCCL:"]
    assert_equal([text.split()[0] for text in answers(comm)], heads)
    with (
        commlib.flags.override("FLAGS_custom_allreduce", comm.rank == 0),
        another(comm, 85) as ring,
    ):
        assert_equal("FLAGS_custom_allreduce" in ring.explain(64, torch.float32), True, "explained")
        x = torch.ones(9, device=comm.device)
        assert_equal(set(ring.all_reduce(x, x).tolist()), {float(comm.size)}, "by NCCL")
        assert_equal(
            "FLAGS_" in ring.explain(4, torch.float32, "premul_sum"), True, "of a scaled sum"
        )
        assert_equal(ring.all_reduce_begin(x, x).wait().unique().tolist(), [comm.size**2], "begun")


@runs_on("gpu_ranks")
def test_ranks_that_push_kernels_can_t_serve(comm: Any) -> None:
    """A rank with another table, or whose memory its peers can't prove, leaves all of them NCCL."""
    text, probe = kernel_table.text, peer_memory.PROBE
    is_root, x = comm.rank == 0, torch.ones(9, device=comm.device)
    try:
        if is_root:
            kernel_table.text = lambda: text() + "\n"  # type: ignore[assignment]
        with another(comm, 89) as ring:
            assert_equal(
                "different tables or kernels" in ring.explain(64, torch.float32), True, "table"
            )
            assert_equal(set(ring.all_reduce(x, x * 1).tolist()), {float(comm.size)}, "by NCCL")
        kernel_table.text = text
        if is_root:
            peer_memory.PROBE = probe.with_name("missing.cu")
        with another(comm, 89) as ring:
            assert_equal("no peer access" in ring.explain(64, torch.float32), True, "probe")
            assert_equal(
                set(ring.all_reduce(x, torch.ones_like(x)).tolist()), {float(comm.size)}, "NCCL"
            )
    finally:
        kernel_table.text, peer_memory.PROBE = text, probe
