"""The kernels of a decode step on GPUs: attention, linear layer and activation, against NumPy."""

import itertools
from typing import Any

import numpy as np
import torch

from commlib import graph
from commlib.ops.inference import ContiguousCache, PagedCache, rotary_tables
from commlib.ops.inference import dense_linear as dense
from commlib.ops.inference.attention import prepare
from commlib.ops.inference.decode_attention import DecodeAttention, decode_attention
from commlib.ops.inference.gated_silu import gated_silu
from tests.support.checks import Array, assert_bits_equal, assert_equal, wide
from tests.support.operator import compile_whole
from tests.support.runs_on import runs_on

NEAR = {torch.float16: 4e-3, torch.bfloat16: 2e-2}
PAGE = 16
# head_dim, query heads, key heads, capacity, sequences: one span and many, one block and several
SHAPES = (
    (64, 8, 2, 48, 3),
    (128, 6, 1, 2048, 2),
    (128, 16, 16, 192, 2),
    (256, 17, 1, 160, 1),
    (64, 4, 2, 1024, 18),
)


class Case:
    """One step: projected tokens, a cache of random numbers and a position per sequence."""

    def __init__(self, device: torch.device, shape: Any, dtype: torch.dtype, paged: bool) -> None:
        width, self.heads, kv_heads, capacity, count = shape
        draw = torch.Generator(device).manual_seed(capacity)
        normal: dict[str, Any] = {"generator": draw, "device": device}
        self.qkv = torch.randn(count, 1, (self.heads + 2 * kv_heads) * width, **normal).to(dtype)
        memory = [torch.randn(count, capacity, kv_heads, width, **normal) for _ in range(2)]
        self.keys, self.values = (each.to(dtype) for each in memory)
        ends = torch.tensor([capacity - 1, 0, 63, 64, capacity // 2], device=device)
        self.positions = ends.clamp(max=capacity - 1).repeat(count)[:count]
        self.rotary = rotary_tables(width, capacity, device=device)
        self.width, self.dtype, self.paged = width, dtype, paged
        self.what = f"{shape}, {dtype}, paged {paged}"

    def cache(self) -> ContiguousCache | PagedCache:
        """Return a fresh cache with these numbers; pages are in a mixed order."""
        if not self.paged:
            return ContiguousCache((self.keys.clone(),), (self.values.clone(),))
        count, capacity = self.keys.shape[:2]
        pages = count * capacity // PAGE
        table = torch.randperm(pages, device=self.keys.device).view(count, -1)
        parts = []
        for memory in (self.keys, self.values):
            part = memory.new_zeros(pages + 1, PAGE, *memory.shape[2:])
            part[table.flatten()] = memory.reshape(pages, PAGE, *memory.shape[2:])
            parts.append(part)
        return PagedCache((parts[0],), (parts[1],), table)

    def attention(self, cache: Any, rotated: bool) -> DecodeAttention:
        """Return the step; it must be one that the kernels serve."""
        rotary = self.rotary if rotated else None
        positions = self.positions[:, None]
        step = decode_attention(cache, self.width, positions, rotary, self.qkv)
        assert isinstance(step, DecodeAttention), self.what
        return step

    def expected(self, rotated: bool) -> Array:
        """Return the formula in float64."""
        rows = []
        tokens = wide(self.qkv).astype("f8").reshape(len(self.qkv), -1, self.width)
        kv_heads = self.keys.shape[2]
        keys, values = (wide(each).astype("f8") for each in (self.keys, self.values))
        for b, position in enumerate(self.positions.tolist()):
            q, k, v = np.split(tokens[b], [self.heads, self.heads + kv_heads])
            if rotated:
                q, k = self._rotated(q, position), self._rotated(k, position)
            seen = np.concatenate([keys[b, :position], k[None]])
            said = np.concatenate([values[b, :position], v[None]])
            group = self.heads // kv_heads
            seen, said = np.repeat(seen, group, 1), np.repeat(said, group, 1)
            score = np.einsum("hd,thd->ht", q, seen) / np.sqrt(self.width)
            part = np.exp(score - score.max(1, keepdims=True))
            part /= part.sum(1, keepdims=True)
            rows.append(np.einsum("ht,thd->hd", part, said).reshape(1, -1))
        return np.stack(rows)

    def _rotated(self, heads: Array, position: int) -> Array:
        cos, sin = (wide(t[position]).astype("f8") for t in (self.rotary.cos, self.rotary.sin))
        a, b = np.split(heads, 2, 1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)


def near(found: torch.Tensor, expected: Array, what: str) -> None:
    assert_equal(tuple(found.shape), expected.shape, f"{what}: shape")
    worst = float(np.abs(wide(found) - expected).max() / np.abs(expected).max())
    assert_equal(worst < NEAR[found.dtype], True, f"{what}: {worst} of the largest")


@runs_on("gpu_ranks", deadline=240)
def test_attention(ring: Any) -> None:
    """Groups and widths that fill no tile; positions at the borders of blocks and spans.

    It differs from NumPy by the rounding of rotated heads and of probabilities to short floats.
    """
    for shape, dtype in itertools.product(SHAPES, NEAR):
        for paged, rotated in ((False, True), (True, True), (True, False)):
            case = Case(ring.device, shape, dtype, paged)
            cache = case.cache()
            actual = case.attention(cache, rotated)(case.qkv, case.heads, 0)
            near(actual, case.expected(rotated), f"{case.what}, rotated {rotated}")


@runs_on("gpu_ranks", deadline=120)
def test_the_cache_afterwards(ring: Any) -> None:
    """It has the new tokens as torch's operators store them, and nothing else has changed."""
    for paged in (False, True):
        case = Case(ring.device, SHAPES[0], torch.bfloat16, paged)
        ours = case.cache()
        theirs = type(ours)(*([each.clone() for each in part] for part in (ours.keys, ours.values)),
                            *((ours.table,) if isinstance(ours, PagedCache) else ()))  # fmt: skip
        case.attention(ours, True)(case.qkv, case.heads, 0)
        args = theirs, case.width, case.positions[:, None], case.rotary, case.qkv
        prepare(*args, begins=False, kernels=False)(case.qkv, case.heads, 0)
        assert_bits_equal(ours.values[0], theirs.values[0], f"values, paged {paged}")
        # One of the two may multiply and add at once: the last bit of a rotated number.
        apart = (ours.keys[0].float() - theirs.keys[0].float()).abs()
        assert_equal(bool((apart <= theirs.keys[0].float().abs() / 128).all()), True, "keys")
        assert_equal(int((apart > 0).sum()) <= case.qkv.numel(), True, "keys of other tokens")


@runs_on("gpu_ranks", deadline=120)
def test_a_sequence_alone(ring: Any) -> None:
    """The other sequences of a batch do not change its bits."""
    case = Case(ring.device, SHAPES[1], torch.bfloat16, False)
    together = case.attention(case.cache(), True)(case.qkv, case.heads, 0)
    case.qkv, case.positions = case.qkv[1:], case.positions[1:]
    case.keys, case.values = case.keys[1:], case.values[1:]
    alone = case.attention(case.cache(), True)(case.qkv, case.heads, 0)
    assert_bits_equal(alone, together[1:], "the second sequence")


def test_what_the_kernels_do_not_serve() -> None:
    """Torch's operators attend on a CPU, so that the tests above must not meet None."""
    x = torch.zeros(2, 1, 64, dtype=torch.bfloat16)
    cache = ContiguousCache((torch.zeros(2, 8, 1, 64),), (torch.zeros(2, 8, 1, 64),))
    assert decode_attention(cache, 64, torch.zeros(2, 1, dtype=torch.long), None, x) is None


# -- linear layer and activation -----------------------------------------------------------------


@runs_on("gpu_ranks", deadline=240)
def test_linear(ring: Any) -> None:
    """Rows, outputs and inputs that fill no tile; every form has the same bits."""
    draw = torch.Generator(ring.device).manual_seed(3)
    for (rows, outputs, inputs), dtype in itertools.product(
        ((1, 2048, 2056), (8, 1000, 4200), (16, 520, 8200), (17, 520, 8200)), NEAR
    ):
        x = torch.randn(rows, inputs, device=ring.device, generator=draw).to(dtype)
        weight = torch.randn(outputs, inputs, device=ring.device, generator=draw).to(dtype)
        bias = torch.randn(outputs, device=ring.device, generator=draw).to(dtype)
        product = wide(x).astype("f8") @ wide(weight).astype("f8").T
        for shift in (None, bias):
            actual = dense.dense_linear(x, weight, shift)
            added = product if shift is None else product + wide(shift).astype("f8")
            near(actual, added, f"{rows}, {outputs}, {inputs}, {dtype}")
        if rows <= dense.MOST_ROWS:
            alone = dense.dense_linear(x[:1], weight, bias)
            assert_bits_equal(alone, actual[:1], f"{rows} rows: the first one alone")


@runs_on("gpu_ranks", deadline=120)
def test_the_forms_of_a_linear_layer(ring: Any) -> None:
    x = torch.randn(2, 3, 4096, device=ring.device, dtype=torch.bfloat16)
    weight = torch.randn(2 * 1024, 4096, device=ring.device, dtype=torch.bfloat16)

    def call(x: torch.Tensor) -> torch.Tensor:
        return gated_silu(dense.dense_linear(x, weight, None))

    captured, compiled = graph.capture(call, outputs="copy"), compile_whole(call)
    for turn in range(3):
        scaled = x * (turn + 1)
        eager = call(scaled)
        assert_bits_equal(captured(scaled), eager, f"captured, turn {turn}")
        assert_bits_equal(compiled(scaled), eager, f"compiled, turn {turn}")
    leaf = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(call(leaf).sum(), leaf)
    assert_equal(bool(grad.abs().sum() > 0), True, "a gradient, by the torch operators")


@runs_on("ranks")
def test_gated_silu(ring: Any) -> None:
    """Columns that fill no tile, on GPUs too; float32 takes torch's operators."""
    for dtype, near_by in ((torch.float32, 1e-6), (torch.float16, 4e-3), (torch.bfloat16, 2e-2)):
        x = torch.randn(3, 2, 2 * 1500, device=ring.device).to(dtype)
        gate, inner = np.split(wide(x).astype("f8"), 2, -1)
        expected = gate / (1 + np.exp(-gate)) * inner
        actual = gated_silu(x)
        worst = float(np.abs(wide(actual) - expected).max() / np.abs(expected).max())
        assert_equal((actual.dtype, worst < near_by), (dtype, True), f"{dtype}: {worst}")
