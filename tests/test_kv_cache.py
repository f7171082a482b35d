"""Caches of keys and values that hold NaN, or too few pages: each sequence sees its own tokens."""

from typing import Any

import pytest
import torch

from commlib import graph, ops
from commlib.ops.inference import ContiguousCache, DecoderConfig, DecoderLayer, PagedCache, PagePool
from tests.support.checks import assert_bits_equal, assert_equal
from tests.support.runs_on import runs_on

CONFIG = DecoderConfig(hidden=128, heads=2, kv_heads=2, head_dim=64, inner=128)
SEQUENCES, PAGE, PAGES = 2, 2, 4  # pages of a sequence
DTYPES = (torch.float32, torch.bfloat16)
Tensor = torch.Tensor


class Decoder:
    """One layer with drawn weights, all of it on each rank."""

    def __init__(self, ring: Any, dtype: torch.dtype) -> None:
        self.how: dict[str, Any] = {"dtype": dtype, "device": ring.device}
        self._draw = torch.Generator().manual_seed(5)
        shapes = DecoderLayer.shapes(CONFIG)
        weights = {
            name: torch.ones(shape, **self.how) if len(shape) == 1 else self.drawn(*shape) / 11
            for name, shape in shapes.items()
            if not name.endswith("bias")
        }
        self._layers = [DecoderLayer(**weights)]

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._draw).to(**self.how)

    def paged(self) -> PagedCache:
        return PagedCache.zeros(
            CONFIG,
            layers=1,
            sequences=SEQUENCES,
            pages=SEQUENCES * PAGES,
            page_size=PAGE,
            pages_per_sequence=PAGES,
            ranks=1,
            **self.how,
        )

    def contiguous(self) -> ContiguousCache:
        sizes = {"sequences": SEQUENCES, "capacity": PAGE * PAGES}
        return ContiguousCache.zeros(CONFIG, layers=1, ranks=1, **sizes, **self.how)

    @torch.no_grad()
    def __call__(self, x: Tensor, cache: Any, start: Any, **options: Any) -> Tensor:
        return ops.fused_multi_transformer(
            x, self._layers, cache, None, config=CONFIG, start=start, **options
        )


def positions(ring: Any, *values: int) -> Tensor:
    return torch.tensor(values, device=ring.device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@runs_on("unified_ranks")
def test_captured_steps_beyond_the_pages(ring: Any, dtype: torch.dtype) -> None:
    """They are NaN for the sequence without a page alone."""
    decoder = Decoder(ring, dtype)
    tokens = decoder.drawn(PAGE * PAGES, SEQUENCES, 1, CONFIG.hidden)

    def steps(first_has: int) -> Tensor:
        cache = decoder.paged()
        pool = PagePool(cache)
        pool.reserve(0, first_has)
        pool.reserve(1, PAGE * PAGES)
        x, at = tokens[0].clone(), positions(ring, 0, 0)
        captured = graph.capture(lambda: decoder(x, cache, at), outputs="copy", verify=False)
        outputs = []
        for step, token in enumerate(tokens):
            x.copy_(token)
            at.fill_(step)
            outputs.append(captured())
        return torch.stack(outputs)

    full, short = steps(PAGE * PAGES), steps(PAGE)
    assert_bits_equal(short[:, 1], full[:, 1], "the sequence with pages")
    assert_bits_equal(short[:PAGE, 0], full[:PAGE, 0], "the other one while it has pages")
    assert_equal(bool(short[PAGE:, 0].isnan().all()), True, "NaN after that")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2])
@runs_on("unified_ranks")
def test_a_padded_row_of_nan(ring: Any, length: int, dtype: torch.dtype) -> None:
    """It has no pages and may hold anything: other rows do not change, now or later."""
    decoder = Decoder(ring, dtype)
    x = decoder.drawn(SEQUENCES, length, CONFIG.hidden)
    later = decoder.drawn(1, length, CONFIG.hidden)
    results = []
    for filling in (0.0, torch.nan):
        cache = decoder.paged()
        PagePool(cache).reserve(0, 2 * length)
        x[1] = filling
        start = positions(ring, 0, 0)
        first = decoder(x, cache, start, check_positions=False)
        results.append((first, decoder(later, cache, start[:1] + length)))
    (clean, after_clean), (padded, after_padded) = results
    assert_equal(bool(clean.isfinite().all()), True, "a row without pages is a row of padding")
    assert_bits_equal(padded[0], clean[0], "the row with pages")
    assert_bits_equal(after_padded, after_clean, "the next call")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [1, 2])
@runs_on("unified_ranks")
def test_what_an_earlier_sequence_left(ring: Any, length: int, dtype: torch.dtype) -> None:
    """Memory after the new tokens is not part of a sequence, whatever it holds."""
    decoder = Decoder(ring, dtype)
    prompt = decoder.drawn(SEQUENCES, 3, CONFIG.hidden)
    x = decoder.drawn(SEQUENCES, length, CONFIG.hidden)
    outputs = []
    for filling in (0.0, torch.nan):
        cache = decoder.contiguous()
        for memory in (*cache.keys, *cache.values):
            memory.fill_(filling)
        decoder(prompt, cache, 0)
        outputs.append(decoder(x, cache, 3))
    assert_bits_equal(outputs[1], outputs[0], "after NaN")


@pytest.mark.parametrize("kind", ["bool", "float"])
@runs_on("unified_ranks")
def test_a_mask_over_later_positions(ring: Any, kind: str) -> None:
    """A cache that is used as a ring buffer: the mask says what a new token sees."""
    decoder = Decoder(ring, torch.float32)
    tokens = decoder.drawn(PAGE * PAGES + 1, SEQUENCES, 1, CONFIG.hidden)
    mask = torch.ones(1, 1, 1, PAGE * PAGES, dtype=torch.bool, device=ring.device)
    mask[..., 3] = False

    def step(turn: int, at: int, hidden: Tensor, cache: ContiguousCache) -> Tensor:
        seen = hidden if kind == "bool" else torch.zeros_like(hidden, dtype=torch.float32)
        seen = seen if kind == "bool" else seen.masked_fill(~hidden, -torch.inf)
        return decoder(tokens[turn], cache, positions(ring, at, at), attn_mask=seen)

    ring_buffer, other = decoder.contiguous(), decoder.contiguous()
    for turn in range(PAGE * PAGES):
        for cache in (ring_buffer, other):
            decoder(tokens[turn], cache, positions(ring, turn, turn))
    actual = step(PAGE * PAGES, 0, mask, ring_buffer)
    # The same keys at the same places, with the newest token written last.
    for memory, filled in zip(
        (*ring_buffer.keys, *ring_buffer.values), (*other.keys, *other.values), strict=True
    ):
        filled.copy_(memory)
        filled[:, -1], filled[:, 0] = memory[:, 0], memory[:, -1]
    want = step(PAGE * PAGES, PAGE * PAGES - 1, mask, other)
    torch.testing.assert_close(actual, want, rtol=1e-5, atol=1e-5)
