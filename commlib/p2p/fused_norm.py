"""all_reduce, a residual and a norm in one kernel: which rows it takes, and its launches."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from commlib.p2p import kernel_table, nvrtc
from commlib.p2p.kernel_table import FLOATS, VECTOR, Row
from commlib.p2p.push_channel import WARP, Call, PushChannel
from commlib.rendezvous.hosts import HostExchange

Tensor = torch.Tensor

COLLECTIVE = "all_reduce_residual_norm"
FLOAT8 = torch.float8_e4m3fn
THREADS, HELD = 512, 4  # the most in a block, and the most vectors a thread; as in channel.cuh
TEAM, SHARE = 8, 128  # the most blocks that share a row, as in team.cuh; threads of each
WIDEST = THREADS * HELD  # vectors of a row
_PLANS = 4096  # shapes that are remembered


class Norm(NamedTuple):
    """The residual, weights and settings of a norm, without its rows.

    ``residual`` has their shape, ``weight`` and both biases have one row's, ``scale`` one float32:
    dense tensors on the ring's device. With a ``scale`` the result has 8 bits.
    """

    residual: Tensor
    weight: Tensor
    bias: Tensor | None
    linear_bias: Tensor | None
    scale: Tensor | None
    layer: bool
    eps: float

    def outputs(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return new tensors for the rows that are normalised, and for those before."""
        total = torch.empty_like(x)
        return torch.empty_like(x, dtype=x.dtype if self.scale is None else FLOAT8), total


class NormCall(ctypes.Structure):
    """The arguments of a kernel; as in row.cuh."""

    _fields_ = [
        ("call", Call),
        ("residual", ctypes.c_void_p),
        ("linear_bias", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("total", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("rows", ctypes.c_int),
        ("width", ctypes.c_int),
        ("layer", ctypes.c_int),
    ]


class Step(NamedTuple):
    """One launch of a call, from its row ``first`` on."""

    norm: NormCall
    call: Call  # that of ``norm``
    launch: nvrtc.Launch
    first: int


class PushNorm:
    """The fused kernels of one channel: launches for each kind of rows that they take."""

    def __init__(self, channel: PushChannel, hosts: HostExchange) -> None:
        """Every member calls it: they decide alike, also where their devices differ."""
        self._channel, self._size = channel, hosts.identity.size
        capability = torch.cuda.get_device_capability(hosts.identity.device)
        able = [int(capability >= (8, 9)), int(capability >= (9, 0))]
        common = [min(column) for column in zip(*hosts.exchange(able), strict=True)]
        self._float8, self._team = bool(common[0]), TEAM if common[1] else 1
        self._steps: dict[tuple[int, int, torch.dtype, int], tuple[Step, ...]] = {}

    def steps(self, x: Tensor, norm: Norm) -> tuple[Step, ...]:
        """Return the launches for ``x``, which is not empty; none without a kernel."""
        if norm.scale is not None and not self._float8:
            return ()
        items, numel, share = x.shape[-1], x.numel(), self._channel.share
        key = items, numel, x.dtype, share
        steps = self._steps.get(key)
        if steps is None:
            if len(self._steps) >= _PLANS:
                self._steps.clear()
            row = kernel_table.select_kernel(COLLECTIVE, numel * x.itemsize, self._size)
            planned = () if row is None else self.plan(items, numel, x.dtype, row)
            steps = self._steps[key] = planned
        return steps

    def plan(self, items: int, numel: int, dtype: torch.dtype, row: Row) -> tuple[Step, ...]:
        """Return the launches for ``numel`` in rows of ``items`` as ``row`` describes them."""
        width, rest = divmod(items * dtype.itemsize, VECTOR)
        if rest or width > WIDEST:
            return ()
        kernel = kernel_of(row, width, self._size)
        held, threads, team = block(width, row.threads, self._team)
        name, rows = f"{kernel}_{FLOATS[dtype]}_{held}", numel // items
        call = self._channel.call(COLLECTIVE, items, 0)
        most = call.half // (slots(kernel, width, self._size) * VECTOR)
        steps = []
        for first in range(0, rows, most):
            norm = NormCall(call=call, rows=min(most, rows - first), width=width)
            grid = nvrtc.Grid(min(norm.rows, max(1, row.blocks // team)) * team, threads, team)
            launch = self._channel.prepare(name, grid, norm, norm.call)
            steps.append(Step(norm, norm.call, launch, first))
        return tuple(steps)

    def launch(
        self, y: Tensor, x: Tensor, total: Tensor, norm: Norm, steps: Sequence[Step]
    ) -> None:
        """Launch ``steps`` on the current stream, after the last call; never blocks."""
        stream, tag = self._channel.turn()
        x, residual, weight = aligned(x), aligned(norm.residual), aligned(norm.weight)
        bias = None if norm.bias is None else aligned(norm.bias)
        linear_bias = None if norm.linear_bias is None else aligned(norm.linear_bias)
        row, out_row = (x.shape[-1] * each.itemsize for each in (x, y))
        for argument, call, launch, first in steps:
            offset = first * row
            call.x, call.out = x.data_ptr() + offset, y.data_ptr() + first * out_row
            call.tag = tag
            argument.residual = residual.data_ptr() + offset
            argument.total = total.data_ptr() + offset
            argument.weight = weight.data_ptr()
            argument.bias = None if bias is None else bias.data_ptr()
            argument.linear_bias = None if linear_bias is None else linear_bias.data_ptr()
            argument.scale = None if norm.scale is None else norm.scale.data_ptr()
            argument.layer, argument.eps = norm.layer, norm.eps
            launch(stream)
        self._channel.launched(stream)


def block(width: int, wanted: int, most: int) -> tuple[int, int, int]:
    """Return how ``width`` vectors of a row are shared: vectors a thread, threads, blocks.

    About ``wanted`` threads in all, more where one would have too many vectors: one block, or where
    they don't fit into it, up to ``most`` small ones.
    """
    wanted = min(wanted, most * THREADS)
    held = next((n for n in (1, 2) if n * wanted >= width), HELD)
    team = 1
    while wanted > THREADS and team < most and held * SHARE * team < width:
        team *= 2
    return held, -(-width // (held * team * WARP)) * WARP, team


def kernel_of(row: Row, width: int, size: int) -> str:
    """Return the kernel that does rows of ``width`` vectors where the table has ``row``.

    The two-shot kernel needs at least one vector per rank. A rank without a slice would notice a
    lost peer only in the second hop, by that hop's own deadline.
    """
    return row.kernel if width >= size else "norm_one_shot"


def slots(kernel: str, width: int, size: int) -> int:
    """Return the vectors of the channel that one row takes: one from each rank, or two a slice."""
    if kernel == "norm_one_shot":
        return size * width
    return 2 * size * -(-width // size)


def aligned(x: Tensor) -> Tensor:
    """Return dense ``x`` where a whole vector can be read at its begin."""
    return x if x.data_ptr() % VECTOR == 0 else x.clone()
