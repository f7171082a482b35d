"""ops.fused_multi_transformer: the layers of a decoder against NumPy, caches, capture, errors."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import commlib
from commlib import graph, ops
from commlib.errors import ArgumentError, DtypeError, RingError, ShapeError
from commlib.ops.inference import (
    ContiguousCache,
    PagedCache,
    PagePool,
    QuantizedWeight,
    quantize,
    rotary_tables,
)
from commlib.ops.inference.weights import LINEARS
from tests.support.checks import assert_bits_equal, assert_equal, raises, wide
from tests.support.decoder import (
    CAPACITY,
    CONFIG,
    KINDS,
    LAYERS,
    PAGE,
    SEQUENCES,
    TOKENS,
    Case,
    contiguous,
    paged,
    tables,
    whole_layers,
)
from tests.support.operator import calls
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on


def values(ring: Any, kind: str, dtype: torch.dtype) -> None:
    """A prefill, a step of several tokens and steps of one, contiguous and paged."""
    case = Case(ring, kind, dtype)
    expected = case.expected()
    outputs: dict[Any, list[torch.Tensor]] = {}
    for make in (contiguous, paged):
        cache, original = case.cache(make), case.x.clone()
        before = calls(ring)
        spans = [(0, 3), (3, 5), (5, 6), (6, 7)]
        outputs[make] = [case.call(cache, *span) for span in spans]
        assert_equal(calls(ring) - before, 2 * LAYERS * len(spans), f"{case.what}: collectives")
        case.near(torch.cat(outputs[make], 1), expected, make.__name__)
        assert_bits_equal(case.x, original, f"{case.what}: x afterwards")
    for one, other in zip(outputs[contiguous], outputs[paged], strict=True):
        assert_bits_equal(other, one, f"{case.what}: paged")
    steps = case.cache()
    stepped = [case.call(steps, at, at + 1) for at in range(TOKENS)]
    case.near(torch.cat(stepped, 1), expected, "step by step")
    at_once = case.call(case.cache(), 0, TOKENS)
    case.near(at_once, wide(torch.cat(stepped, 1)).astype("f8"), "prefill of all tokens")


@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, ranks: Ranks) -> None:
    ranks(values, kind, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["llama", "gpt", "int8", "fp8", "wide heads"])
def test_values_of_short_floats(kind: str, dtype: torch.dtype, unified_ranks: Ranks) -> None:
    unified_ranks(values, kind, dtype)


@pytest.mark.parametrize("kind", ["llama", "gpt", "post norm"])
@runs_on("ranks")
def test_one_rank(ring: Any, kind: str) -> None:
    """On a ring of one rank, and without a ring."""
    one = commlib.new_ring(40 + ring.rank, [ring.rank])
    assert one is not None
    case = Case(one, kind)
    results = [case.call(case.cache(), 0, TOKENS, ring_id=chosen) for chosen in (one, None)]
    for result in results:
        case.near(result, case.expected(), "alone")


@runs_on("ranks")
def test_each_sequence_has_its_position(ring: Any) -> None:
    """Sequences at several positions in one call; a smaller batch than the cache has."""
    case = Case(ring)
    cache, full = case.cache(paged), wide(case.call(case.cache(), 0, TOKENS)).astype("f8")
    for first, end in ((0, 2), (2, 4)):
        case.call(cache, first, end)
    starts = torch.tensor([2, 4, 3], device=ring.device)
    inputs = torch.stack([case.x[row, at : at + 2] for row, at in enumerate(starts.tolist())])
    for start in (starts, starts.int()):
        y = case.call(cache, 0, 2, start=start)
        assert_equal(y.shape, inputs.shape, "shape")
    case.x[:, :2] = inputs
    y = case.call(cache, 0, 2, start=starts)
    expected = np.stack([full[row, at : at + 2] for row, at in enumerate(starts.tolist())])
    case.near(y, expected, "starts")
    case.x = case.x[:2]
    case.near(case.call(cache, 0, 2, start=starts[:2]), expected[:2], "two sequences")


# Heads of 64 short floats take the kernels of a decode step on GPUs.
FORMS = (("llama", torch.float32), ("wide heads", torch.bfloat16))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
@pytest.mark.parametrize("make", [contiguous, paged], ids=lambda make: make.__name__)
@runs_on("ranks", deadline=120)
def test_captured(ring: Any, make: Any, form: tuple[str, torch.dtype]) -> None:
    """Captured decode gives the bits of eager calls, per batch size, and leaves the same cache."""
    case = Case(ring, *form)
    device = ring.device
    eager, fast = case.cache(make), case.cache(make)
    kwargs: dict[str, Any] = {
        "config": case.config,
        "rotary": tables(case.config, device=device),
        "final_norm": case.final_norm.to(device),  # type: ignore[union-attr]
    }

    def step(x: torch.Tensor, start: torch.Tensor) -> torch.Tensor:
        return ops.fused_multi_transformer(x, case.layers, fast, start=start, **kwargs)

    decode = graph.capture(step)
    for batch in (1, 2, 3):
        for at in range(TOKENS):
            x = case.x[:batch, at : at + 1].to(device)
            start = torch.full((batch,), at, device=device)
            expected = ops.fused_multi_transformer(x, case.layers, eager, start=start, **kwargs)
            assert_bits_equal(decode(x, start).clone(), expected, f"batch {batch}, token {at}")
    for one, other in zip((*fast.keys, *fast.values), (*eager.keys, *eager.values), strict=True):
        used = slice(0, -1) if make is paged else slice(None)
        assert_bits_equal(one[used], other[used], "the cache")
    # A replay can't raise: the row is NaN, the other rows are right.
    x = case.x[:3, :1].to(device)
    starts = torch.tensor([3, CAPACITY, 3], device=device)
    y = decode(x, starts).clone()
    assert_equal(y.isnan().all(-1).view(-1).tolist(), [False, True, False], "rows that are NaN")
    unchecked = ops.fused_multi_transformer(
        x, case.layers, eager, start=starts, check_positions=False, **kwargs
    )
    assert_bits_equal(unchecked, y, "eager without checks")
    decode.reset()


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form[0])
@runs_on("unified_ranks", deadline=120)
def test_compiled(ring: Any, form: tuple[str, torch.dtype]) -> None:
    torch._dynamo.reset()  # the fused norm of torch 2.11 takes no symbol, which a second width is
    case = Case(ring, *form)
    cache, other = case.cache(), case.cache()
    fast = torch.compile(case.call, backend="aot_eager", fullgraph=True)
    for span in ((0, 3), (3, 4)):
        assert_bits_equal(fast(cache, *span), case.call(other, *span), f"compiled {span}")


# -- caches and weights ---------------------------------------------------------------------------


def test_pages() -> None:
    cache = PagedCache.zeros(
        CONFIG,
        layers=1,
        sequences=2,
        pages=4,
        page_size=PAGE,
        pages_per_sequence=3,
        ranks=1,
        dtype=torch.float32,
        device="cpu",
    )
    pool = PagePool(cache)
    pool.reserve(0, PAGE + 1)
    pool.reserve(0, 2)  # it has them
    assert pool.free == 2
    assert cache.table.tolist() == [[0, 1, 4], [4, 4, 4]]
    with pytest.raises(ArgumentError, match="sequence 1 needs 3 more pages and 2 of 4 are free"):
        pool.reserve(1, 3 * PAGE)
    with pytest.raises(ArgumentError, match="tokens=13 for sequence 1; expected at most 12"):
        pool.reserve(1, 13)
    with pytest.raises(ArgumentError, match="sequence=2; expected 0 to 1"):
        pool.release(2)
    pool.release(0)
    assert pool.free == 4
    assert cache.table.tolist() == [[4, 4, 4], [4, 4, 4]]
    pool.reserve(1, 1)
    assert cache.table[1].tolist() == [0, 4, 4]


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_quantize(dtype: torch.dtype) -> None:
    weight = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    weight[3] = 0
    quant = quantize(weight, dtype)
    assert (quant.values.dtype, quant.scales.dtype, quant.shape) == (dtype, torch.float32, (5, 64))
    again = quant.values.double() * quant.scales.double()[:, None]
    largest = weight.abs().amax(1)
    step = largest / 127 / 2 if dtype is torch.int8 else largest / 16  # half a step of each
    assert ((again - weight).abs() <= step[:, None] * 1.001).all()
    assert torch.allclose(again.abs().amax(1).float(), largest)


def test_quantize_refuses() -> None:
    weight = torch.ones(2, 2)
    with pytest.raises(DtypeError, match=r"float8_e5m2; expected torch.int8 or torch.float8_e4m3"):
        quantize(weight, torch.float8_e5m2)
    with pytest.raises(DtypeError, match="quantized already"):
        quantize(quantize(weight, torch.int8), torch.int8)


def test_llama3_frequencies() -> None:
    """Long waves are stretched by the factor, short ones are kept."""
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    plain, scaled = (rotary_tables(32, 2, scaling=each) for each in (None, scaling))
    angles, stretched = (torch.atan2(each.sin[1], each.cos[1]) for each in (plain, scaled))
    waves = 2 * torch.pi / angles
    assert torch.allclose(stretched[waves < 16], angles[waves < 16])
    assert torch.allclose(stretched[waves > 64] * 8, angles[waves > 64])
    assert ((stretched < angles) & (stretched > angles / 8))[(waves > 16) & (waves < 64)].all()
    with pytest.raises(ArgumentError, match="type 'yarn'; expected default, linear or llama3"):
        rotary_tables(8, 2, scaling={"rope_type": "yarn"})
    with pytest.raises(ArgumentError, match="head_dim=7; expected an even number"):
        rotary_tables(7, 2)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"heads": 6, "kv_heads": 4}, "heads=6 with kv_heads=4; .*; pass kv_heads=2"),
        ({"heads": 0}, "heads=0; expected an integer >= 1"),
        ({"norm": "group"}, "norm='group'; expected one of rms, layer"),
        ({"activation": "tanh"}, "activation='tanh'; expected one of silu, gelu"),
        ({"eps": -1.0}, "eps=-1.0; expected a number from 0 on"),
    ],
)
def test_config_refuses(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        replace(CONFIG, **fields)


@contextlib.contextmanager
def wrong_calls(ring: Any) -> Iterator[tuple[Case, Callable[..., None]]]:
    """Give a case, and a function that changes arguments of its call and expects an error.

    Each rank makes the wrong call by itself: nothing is launched, so nobody waits.
    """
    case, before = Case(ring), calls(ring)
    cache = case.cache()

    def call(error: Any, *words: Any, config: Any = case.config, **more: Any) -> None:
        start = more.pop("start", 0)
        layers, memory = more.pop("layers", case.layers), more.pop("cache", cache)
        x = more.pop("x", case.x.to(ring.device))
        with raises(error, *words):
            ops.fused_multi_transformer(x, layers, memory, config=config, start=start, **more)

    yield case, call
    assert_equal(calls(ring), before, "collectives of refused calls")


@runs_on("ranks")
def test_refused_configs_and_inputs(ring: Any) -> None:
    rank = f"rank {ring.rank}"
    with wrong_calls(ring) as (case, call):
        call(ArgumentError, rank, "heads=5 on 2 ranks", config=replace(CONFIG, heads=5, kv_heads=5))
        call(ArgumentError, "kv_heads=3 on 2 ranks", config=replace(CONFIG, heads=6, kv_heads=3))
        call(ArgumentError, "inner=25 on 2 ranks", "zeros to 26", config=replace(CONFIG, inner=25))
        call(DtypeError, "x is torch.float64", x=case.x.double().to(ring.device))
        text = "layers[0].attention_norm is torch.float32; expected torch.bfloat16"
        call(DtypeError, text, x=case.x.bfloat16().to(ring.device))
        call(ShapeError, "x has shape (3, 7, 16)", x=case.x[..., :16].to(ring.device))
        call(ArgumentError, "x is list; expected a torch.Tensor", x=[1.0])
        call(ArgumentError, "x is list; expected a torch.Tensor", x=[1.0], ring_id=None)
        call(RingError, "77", ring_id=77)


@runs_on("ranks")
def test_refused_layers(ring: Any) -> None:
    with wrong_calls(ring) as (case, call):
        weights: Any = case.layers[1]
        qkv, out, down = weights.qkv, weights.out, weights.down

        def second(**changed: Any) -> list[Any]:
            return [case.layers[0], replace(weights, **changed)]

        text = f"layers[1].qkv has shape {tuple(qkv.shape[::-1])}; expected {tuple(qkv.shape)}"
        rank = f"rank {ring.rank}"
        call(ShapeError, rank, text, "DecoderLayer.shard", layers=second(qkv=qkv.T))
        text = "layers[1].out is torch.float64; expected torch.float32"
        call(DtypeError, text, layers=second(out=out.double()))
        call(ArgumentError, "layers[1].up is NoneType", layers=second(up=None))
        bias = second(ffn_norm_bias=out[:, 0].clone())
        call(ArgumentError, "ffn_norm_bias with norm='rms'", layers=bias)
        call(ArgumentError, "layers contain nothing", layers=[])
        call(ArgumentError, "layers contain ['int']", layers=[3])
        e5m2 = QuantizedWeight(out.to(torch.float8_e5m2), out[:, 0].clone())
        call(DtypeError, "layers[1].out.values are torch.float8_e5m2", layers=second(out=e5m2))
        doubled = QuantizedWeight(out.to(torch.int8), out[:, 0].double())
        text = "layers[1].out.scales is torch.float64; expected torch.float32"
        call(DtypeError, text, layers=second(out=doubled))
        wanting = second(down=down.clone().requires_grad_())
        call(ArgumentError, "layers[1].down requires grad", layers=wanting)
        text = "the cache has keys of 2 and values of 2 layers; expected 1"
        call(ShapeError, text, layers=case.layers[:1])


@runs_on("ranks")
def test_refused_caches(ring: Any) -> None:
    with wrong_calls(ring) as (case, call):
        cache = case.cache()
        small = case.cache(sequences=2)
        call(ShapeError, "cache is too small: x has 3 sequences; expected at most 2", cache=small)
        long = case.x.repeat(1, 2, 1).to(ring.device)
        text = "cache is too small: x has 14 tokens per sequence; expected at most 12"
        call(ShapeError, text, x=long)
        mixed = ContiguousCache(cache.keys, tuple(v.double() for v in cache.values))
        call(DtypeError, "cache.values[0] is torch.float64; expected torch.float32", cache=mixed)
        kwargs: dict[str, Any] = {"layers": 2, "sequences": 3, "capacity": 12, "ranks": 2}
        other = ContiguousCache.zeros(
            replace(CONFIG, kv_heads=4), **kwargs, dtype=torch.float32, device=ring.device
        )
        text = "cache.keys[0] has shape (3, 12, 2, 8); expected (3, 12, 1, 8)"
        call(ShapeError, text, cache=other)
        pages = case.cache(paged)
        halves = replace(pages, table=pages.table.float())
        call(DtypeError, "cache.table is torch.float32; expected torch.int64", cache=halves)
        pages.table[1, 1] = pages.pages
        text = "1 of the 2 pages that sequence 1 needs for 7 tokens are not assigned"
        call(ArgumentError, text, "PagePool.reserve(1, 7)", cache=pages)


@runs_on("ranks")
def test_refused_positions(ring: Any) -> None:
    with wrong_calls(ring) as (_, call):
        text = "position out of range: sequence 0 has 7 tokens from position 6 on"
        call(ArgumentError, f"rank {ring.rank}", text, "pass start from 0 to 5", start=6)
        call(ArgumentError, "from position -1 on", start=-1)
        starts = torch.tensor([0, 5, 6], device=ring.device)
        call(ArgumentError, "position out of range: sequence 2 has 7 tokens", start=starts)
        call(ShapeError, "start has shape (2,); expected (3,)", start=starts[:2])
        call(DtypeError, "start is torch.float32", start=starts.float())
        call(ArgumentError, "start='0'", start="0")


@runs_on("ranks")
def test_refused_rotations_and_norms(ring: Any) -> None:
    with wrong_calls(ring) as (case, call):
        out: Any = case.layers[1].out
        row = out[:, 0].clone()
        short = rotary_tables(CONFIG.head_dim, 5, device=ring.device)
        call(ShapeError, "rotary.cos has shape (5, 4); expected at least 12 rows", rotary=short)
        call(ShapeError, "final_norm has shape (3,); expected (40,)", final_norm=row[:3].clone())
        text = "final_norm_bias with norm='rms'"
        call(ArgumentError, text, final_norm=row, final_norm_bias=row.clone())
        post = replace(CONFIG, pre_norm=False)
        call(ArgumentError, "final_norm with pre_norm=False", config=post, final_norm=row)


def test_shards_refuse() -> None:
    (layer,) = whole_layers(CONFIG, 1, biases=False)
    with pytest.raises(ArgumentError, match="heads=4 on 3 ranks"):
        layer.shard(CONFIG, 0, 3)
    with pytest.raises(ArgumentError, match="qkv is quantized; shard the layer first"):
        layer.quantize(torch.int8).shard(CONFIG, 0, 2)
    with pytest.raises(ShapeError, match=r"qkv has shape \(32, 40\); expected \(64, 40\)"):
        layer.shard(CONFIG, 0, 2).shard(CONFIG, 0, 2)
    quantized = layer.quantize(torch.int8)
    assert all(isinstance(getattr(quantized, name), QuantizedWeight) for name in LINEARS)


@runs_on("ranks")
def test_no_tokens(ring: Any) -> None:
    case, before = Case(ring), calls(ring)
    assert_equal(case.call(case.cache(), 3, 3).shape, (SEQUENCES, 0, 40), "no tokens")
    assert_equal(calls(ring), before, "collectives without tokens")
