"""`commlib bench --tune`: measure which kernel is fastest here, and write commlib's table.

Each rank times every candidate in a graph; the slowest rank counts, so all ranks see one answer.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import commlib
from commlib import CommContext, flags
from commlib.p2p import fused_norm, kernel_table
from commlib.p2p.kernel_table import VECTOR, Row
from commlib.p2p.push_channel import PushChannel
from commlib.p2p.push_collectives import PushCollective
from commlib.tools.bench.graph import Captured
from commlib.tools.bench.launch import launch
from commlib.tools.bench.machine import gpu_refusal
from commlib.tools.bench.rounds import spread

DTYPE = torch.bfloat16
SIZES = tuple(2**power for power in (11, 14, 16, 17, 18, 19, 20, 21, 23, 26))
PARTS = tuple(2**power for power in (12, 16, 17, 18, 19, 20, 21))
THREADS, BLOCKS = (32, 64, 128, 256, 512), (264, 2112)
BLOCK = 512  # threads, as in channel.cuh
REDUCTIONS = {"all_reduce": ("one_shot", "two_shot"), "reduce_scatter": ("scatter",)}
NORM_KERNELS = ("norm_one_shot", "norm_two_shot")
MOVEMENTS = {"all_gather": ("packets",), "all_to_all": ("packets",)}
NORM_ITEMS = 8192  # of a row; the tables' rows go by the bytes of all of them
NORM_ROWS = (1, 4, 8, 16, 24, 32, 64, 128, 256, 1024)
NORM_THREADS, NORM_BLOCKS = (512, 1024), (264, 1056)
MOST = 2**28  # an all_reduce is cut into pieces: what is fastest at 64 MiB is so at 256
ROUNDS = 3
WORTH = 0.97  # a separate row has to be faster by that much than the one before it

refusal = gpu_refusal


def tune(nproc: int, path: Path) -> dict[str, tuple[Row, ...]]:
    """Measure on ``nproc`` GPUs and write their rows into the table at ``path``; others stay.

    Returns the rows by collective. Raises ``LaunchError``.
    """
    results = launch("tune", nproc, rounds=ROUNDS)
    rows = {collective: tuple(Row(*row) for row in lists) for collective, lists in results.items()}
    collectives = {collective: dict(sizes) for collective, sizes in kernel_table.table().items()}
    for collective, measured in rows.items():
        collectives[collective][nproc] = measured
    kernel_table.write(path, collectives)
    return rows


def measure(rounds: int) -> dict[str, list[Row]]:
    """Return the rows of each collective for the ring of all ranks."""
    with flags.override(flags.CUSTOM_ALLREDUCE, True):
        ring = commlib.init("nccl")
    channel = getattr(ring._engine, "_push", None)
    if not isinstance(channel, PushChannel):
        raise RuntimeError(f"no push kernels here: {channel}")
    dist.init_process_group("nccl")
    try:
        bench = _Bench(ring, channel, rounds)
        return {
            **{
                collective: bench.rows(collective, kernels, SIZES)
                for collective, kernels in _whole()
            },
            **{
                collective: bench.rows(collective, kernels, PARTS)
                for collective, kernels in _by_part()
            },
            fused_norm.COLLECTIVE: bench.norm_rows(),
        }
    finally:
        dist.destroy_process_group()
        commlib.shutdown()


def _whole() -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "all_reduce", REDUCTIONS["all_reduce"]


def _by_part() -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "reduce_scatter", REDUCTIONS["reduce_scatter"]
    yield from MOVEMENTS.items()


def _extend(found: list[Row], times: Mapping[Row, float], nbytes: int) -> None:
    """Let the last row go on to ``nbytes``, or add the fastest one where that is worth a row."""
    extended = found and times.get(found[-1]._replace(most=nbytes))
    ours = min(times, key=times.__getitem__)
    if extended and extended * WORTH <= times[ours]:
        found[-1] = found[-1]._replace(most=nbytes)
    else:
        found.append(ours)


class _Bench:
    """The ring, its channel, and tensors as large as any call needs."""

    def __init__(self, ring: CommContext, channel: PushChannel, rounds: int) -> None:
        self.ring, self.channel, self.rounds = ring, channel, rounds
        most = max(SIZES[-1], PARTS[-1] * ring.size) // DTYPE.itemsize
        self.x = torch.randn(most, device=ring.device).to(DTYPE)
        self.out = torch.empty_like(self.x)
        self.norm = fused_norm.PushNorm(channel, ring._hosts)

    def rows(self, collective: str, kernels: Sequence[str], sizes: Iterable[int]) -> list[Row]:
        """Return the fastest row up to each size, and NCCL from where that is faster."""
        fastest: list[Row] = []
        for nbytes in sizes:
            times = {
                row: self._time(self._pushed(collective, row))
                for row in self._able(collective, kernels, nbytes)
            }
            best = min(times.values(), default=None)
            if best is None or self._time(self._by_nccl(collective, nbytes)) < best:
                break
            _extend(fastest, times, nbytes)
        if fastest and collective == "all_reduce" and fastest[-1].most == SIZES[-1]:
            fastest[-1] = fastest[-1]._replace(most=MOST)
        return fastest

    def norm_rows(self) -> list[Row]:
        """Return the fastest rows of the fused norm; what is fastest for most is so for more."""
        fastest: list[Row] = []
        for count in NORM_ROWS:
            x = self.x[: count * NORM_ITEMS].view(count, NORM_ITEMS)
            candidates = product(NORM_KERNELS, NORM_THREADS, NORM_BLOCKS)
            rows = [Row(x.nbytes, *candidate) for candidate in candidates]
            _extend(fastest, {row: self._time(self._normed(x, row)) for row in rows}, x.nbytes)
        fastest[-1] = fastest[-1]._replace(most=MOST)
        return fastest

    def _normed(self, x: torch.Tensor, row: Row) -> Callable[[], object]:
        weight = torch.ones(NORM_ITEMS, dtype=DTYPE, device=x.device)
        norm = fused_norm.Norm(torch.zeros_like(x), weight, None, None, None, layer=False, eps=1e-6)
        steps = self.norm.plan(NORM_ITEMS, x.numel(), DTYPE, row)
        return partial(self.norm.launch, *norm.outputs(x)[:1], x, torch.empty_like(x), norm, steps)

    def _able(self, collective: str, kernels: Sequence[str], nbytes: int) -> Iterator[Row]:
        """Yield the candidates; a part, which can't be cut, has to fit into the channel."""
        for kernel in kernels:
            if collective != "all_reduce" and nbytes > self.channel.window(kernel):
                continue
            for threads, most in product(THREADS, BLOCKS):
                row = Row(nbytes, kernel, threads, most)
                blocks, block = kernel_table.shape(row, nbytes // VECTOR, self.ring.size)
                if block <= BLOCK and (most == BLOCKS[0] or blocks > BLOCKS[0]):
                    yield row

    def _pushed(self, collective: str, row: Row) -> Callable[[], object]:
        moved = self._moved(collective)
        steps = moved.steps_of(row, row.most)
        return partial(self.channel.launch, steps, self.out, self.x)

    def _moved(self, collective: str) -> PushCollective:
        if collective in MOVEMENTS:
            return PushCollective.moving(self.channel, collective)
        push = PushCollective.reducing(self.channel, collective, DTYPE, "sum")
        assert push is not None  # bfloat16 sums are what the kernels are for
        return push

    def _by_nccl(self, collective: str, nbytes: int) -> Callable[[], object]:
        items = nbytes // DTYPE.itemsize
        part, full = self.x[:items], self.out[: items * self.ring.size]
        return {
            "all_reduce": lambda: dist.all_reduce(part),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, full),
            "all_gather": lambda: dist.all_gather_into_tensor(full, part),
            "all_to_all": lambda: dist.all_to_all_single(full, self.x[: len(full)]),
        }[collective]

    def _time(self, call: Callable[[], Any]) -> float:
        """Return the seconds of a call in a graph, the median of some turns."""
        call()
        graph = Captured(self.ring, self.x[:1], call)
        taken = spread([graph.turn() for _ in range(self.rounds)]).middle
        graph.close()
        return taken
