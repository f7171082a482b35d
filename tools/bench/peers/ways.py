"""The ways of a GPU rank to add bfloat16 tensors up: ours, and those of every peer."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from commlib import CommContext
from commlib.tools.bench.peers.folder import load
from commlib.tools.bench.peers.memory import GpuMemory
from commlib.tools.bench.peers.nccl_windows import NCCL_WINDOWS, NcclWindows
from commlib.tools.bench.peers.watch import Watch
from commlib.tools.bench.peers.way import DTYPE, Near, Way

OURS, NCCL = "ring.all_reduce(out, x)", "NCCL"
ONE_SHOT, TWO_SHOT = "symm_mem one-shot", "symm_mem two-shot"
TORCH_PEERS = (NCCL, NCCL_WINDOWS, ONE_SHOT, TWO_SHOT)  # in every run; all others by --peers
ONE_SHOT_MOST = 2**24  # bytes; hopeless above
TWO_SHOT_RANKS = (2, 4, 8)  # torch has kernels for no other number
TRIALS = 4  # of a way: more than the buffers that any of them rotates through

Tensor = torch.Tensor


class Ways:
    """The ways of one rank, over symmetric memory that serves every size up to ``most`` bytes."""

    def __init__(
        self, ring: CommContext, most: int, watch: Watch, libraries: Mapping[str, str]
    ) -> None:
        """Set up together with the other ranks of ``ring``, which are those of ``dist``."""
        assert dist.group.WORLD is not None
        self.ring, self.watch, self.group = ring, watch, dist.group.WORLD.group_name
        self.shared = {name: self._symmetric(most) for name in (ONE_SHOT, TWO_SHOT)}
        set_ups: dict[str, Callable[[], Any]] = {
            NCCL_WINDOWS: lambda: NcclWindows(ring.device, most),
            **{name: partial(self._load, path, most) for name, path in libraries.items()},
        }
        families = {
            name: watch.attempt(name, "set-up", set_up)
            for name, set_up in set_ups.items()
            if name not in watch.lost
        }
        self.families = {name: family for name, family in families.items() if family is not None}
        torch.manual_seed(1 + ring.rank)  # other values on every rank

    def _symmetric(self, nbytes: int) -> Tensor:
        shared = symm_mem.empty(nbytes // DTYPE.itemsize, dtype=DTYPE, device=self.ring.device)
        symm_mem.rendezvous(shared, self.group)
        return shared

    def _load(self, path: str, most: int) -> Any:
        return load(path, GpuMemory(self.ring), most)

    def of(self, *shape: int) -> dict[str, Way]:
        """Return every way that can add up tensors of ``shape`` here, our own first."""
        x, mine = self._empty(shape), self._empty(shape)
        ways = {OURS: self._ours(x), NCCL: Way(mine, lambda: _in_place(mine))}
        if x.nbytes <= ONE_SHOT_MOST:
            ways[ONE_SHOT] = self._one_shot(self.shared[ONE_SHOT][: x.numel()].view(shape))
        if self.ring.size in TWO_SHOT_RANKS:
            ways[TWO_SHOT] = self._two_shot(self.shared[TWO_SHOT][: x.numel()].view(shape))
        for family in self.families.values():
            ways |= family.sums(shape)
        return {name: way for name, way in ways.items() if name not in self.watch.lost}

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, dtype=DTYPE, device=self.ring.device)

    def _ours(self, x: Tensor) -> Way:
        out = torch.empty_like(x)
        return Way(x, lambda: self.ring.all_reduce(out, x))

    def _one_shot(self, x: Tensor) -> Way:
        out, add = self._empty(x.shape), torch.ops.symm_mem.one_shot_all_reduce_out
        return Way(x, lambda: add(x, "sum", self.group, out))

    def _two_shot(self, x: Tensor) -> Way:
        add = torch.ops.symm_mem.two_shot_all_reduce_
        return Way(x, lambda: add(x, "sum", self.group))

    def close(self) -> None:
        """Release what NCCL has registered, while its communicator is still there."""
        windows = self.families.pop(NCCL_WINDOWS, None)
        if windows is not None:
            self.watch.attempt(NCCL_WINDOWS, "release", windows.close)


def _in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def checked(
    ways: Mapping[str, Way],
    own: tuple[str, ...],
    expect: Callable[[Tensor], tuple[Near, ...]],
    watch: Watch,
    where: str,
) -> dict[str, Way]:
    """Return the ways that give right results for random values; every rank calls it.

    Raises:
        AssertionError: One of ``own`` is wrong. A peer is left out instead.
    """
    right = {}
    for name, way in ways.items():
        if name in watch.lost:
            continue
        for _ in range(TRIALS):
            way.x.normal_()
            expected = expect(way.x)  # before the call, which may write into x
            trial = partial(check, name, way, expected)
            if name in own:
                trial()
            elif not watch.attempt(name, where, trial):
                break
        else:
            right[name] = way
    return right


def check(name: str, way: Way, expected: tuple[Near, ...]) -> bool:
    """Call ``way`` once; return True, or raise ``AssertionError`` at a wrong result."""
    output = way.call()
    results = (output,) if isinstance(output, Tensor) else output
    if not all(near.holds(one) for near, one in zip(expected, results, strict=True)):
        raise AssertionError(f"{name}: wrong result for {tuple(way.x.shape)}")
    return True
