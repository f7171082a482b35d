"""The ways of a GPU rank to add bfloat16 tensors up, and whether each gives the right sum."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from commlib import CommContext

DTYPE = torch.bfloat16
OURS, NCCL = "ring.all_reduce(out, x)", "NCCL"
ONE_SHOT, TWO_SHOT = "symm_mem one-shot", "symm_mem two-shot"
ONE_SHOT_MOST = 2**24  # bytes; hopeless above
TWO_SHOT_RANKS = (2, 4, 8)  # torch has kernels for no other number
ROUNDING = 2.0**-8  # of a bfloat16 sum, in relation to the magnitudes that are added

Tensor = torch.Tensor


class Way(NamedTuple):
    """One way to add up: the tensor it reads, and the call that returns what comes out."""

    x: Tensor
    call: Callable[[], Any]


class Near(NamedTuple):
    """An exact result in float64, and how far a right one may be away from it."""

    exact: Tensor
    slack: Tensor

    def holds(self, found: Tensor) -> bool:
        """Whether ``found`` is right everywhere; NaN is not."""
        return bool(((found.double() - self.exact).abs() <= self.slack).all())


class Ways:
    """The ways of one rank, over symmetric memory that serves every size up to ``most`` bytes."""

    def __init__(self, ring: CommContext, most: int) -> None:
        """Set up together with the other ranks of ``ring``, which are those of ``dist``."""
        assert dist.group.WORLD is not None
        self.ring, self.group = ring, dist.group.WORLD.group_name
        self.shared = {name: self._symmetric(most) for name in (ONE_SHOT, TWO_SHOT)}
        torch.manual_seed(1 + ring.rank)  # other values on every rank

    def _symmetric(self, nbytes: int) -> Tensor:
        shared = symm_mem.empty(nbytes // DTYPE.itemsize, dtype=DTYPE, device=self.ring.device)
        symm_mem.rendezvous(shared, self.group)
        return shared

    def of(self, *shape: int) -> dict[str, Way]:
        """Return every way that can add up tensors of ``shape`` here, our own first."""
        x, mine = self._empty(shape), self._empty(shape)
        ways = {OURS: self._ours(x), NCCL: Way(mine, lambda: _in_place(mine))}
        if x.nbytes <= ONE_SHOT_MOST:
            ways[ONE_SHOT] = self._one_shot(self.shared[ONE_SHOT][: x.numel()].view(shape))
        if self.ring.size in TWO_SHOT_RANKS:
            ways[TWO_SHOT] = self._two_shot(self.shared[TWO_SHOT][: x.numel()].view(shape))
        return ways

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


def _in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


def check(ways: Mapping[str, Way], expect: Callable[[Tensor], tuple[Near, ...]]) -> None:
    """Call each way once, on random values; raise ``AssertionError`` at a wrong result."""
    for name, way in ways.items():
        way.x.normal_()
        expected = expect(way.x)  # before the call, which may write into x
        found = way.call()
        results = (found,) if isinstance(found, Tensor) else found
        if not all(near.holds(one) for near, one in zip(expected, results, strict=True)):
            raise AssertionError(f"{name}: wrong result for {tuple(way.x.shape)}")


def expect_sum(x: Tensor) -> tuple[Near]:
    """Return the sum of every rank's ``x``."""
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x)
    return (exact_sum(parts),)


def exact_sum(parts: Sequence[Tensor]) -> Near:
    """Return the sum of ``parts``; a right one may have been rounded at each addition."""
    exact = torch.zeros_like(parts[0], dtype=torch.float64)
    magnitudes = torch.zeros_like(exact)
    for part in parts:
        exact += part
        magnitudes += part.abs()
    return Near(exact, magnitudes * ROUNDING * len(parts))
