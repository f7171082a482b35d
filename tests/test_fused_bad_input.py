"""The fused blocks and layers: empty batches, and arguments of the wrong kind."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from commlib import ops
from commlib.errors import ArgumentError, RingError
from commlib.ops.inference import DecoderConfig, PagedCache, PagePool, rotary_tables
from tests.support.checks import assert_equal, raises
from tests.support.decoder import Case, paged
from tests.support.runs_on import runs_on

DIM, WIDTH = 4, 8
Attention: Any = ops.fused_attention
FeedForward: Any = ops.fused_feedforward
Layers: Any = ops.fused_multi_transformer


def ones(ring: Any, *shape: int, grad: bool = True) -> torch.Tensor:
    return torch.ones(shape, device=ring.device, requires_grad=grad)


@runs_on("ranks")
def test_empty_batches(ring: Any) -> None:
    """No sequences, no tokens, no heads and no units give the result of an empty product."""
    for before in (False, True):
        for drops in (0.0, 0.5):
            for batch, tokens, parts in ((0, 3, 2), (2, 0, 2), (2, 3, 0)):
                x = ones(ring, batch, tokens, WIDTH)
                weights = ones(ring, 3, parts, DIM, WIDTH), ones(ring, parts * DIM, WIDTH)
                kwargs: Any = {"pre_layer_norm": before, "training": True}
                y = Attention(x, *weights, ring, attn_dropout_rate=drops, is_causal=True, **kwargs)
                units = ones(ring, WIDTH, parts), ones(ring, parts, WIDTH)
                z = FeedForward(x, *units, ring, dropout1_rate=drops, dropout2_rate=drops, **kwargs)
                for result in (y, z):
                    assert_equal(tuple(result.shape), (batch, tokens, WIDTH), "shape")
                    assert_equal(bool(result.isfinite().all()), True, "finite")
                    result.sum().backward()
                for tensor in (x, *weights, *units):
                    assert tensor.grad is not None
                    assert_equal(bool(tensor.grad.isfinite().all()), True, "gradients")
    with torch.no_grad():
        cache = ones(ring, 2, 0, 2, 5, DIM, grad=False)
        x = ones(ring, 0, 1, WIDTH)
        weights = ones(ring, 3, 2, DIM, WIDTH), ones(ring, 2 * DIM, WIDTH)
        y = Attention(x, *weights, ring, cache_kv=cache, position=3)
        assert_equal(tuple(y.shape), (0, 1, WIDTH), "shape with a cache")


@runs_on("cpu_ranks")
def test_kinds_of_arguments(ring: Any) -> None:
    x = ones(ring, 2, 3, WIDTH)
    weights = ones(ring, 3, 2, DIM, WIDTH), ones(ring, 2 * DIM, WIDTH)
    for heads in ("4", 4.0, True):
        with raises(ArgumentError, f"num_heads={heads!r}; expected an integer; pass the heads"):
            Attention(x, *weights, ring, num_heads=heads)
    cache = ones(ring, 2, 1, 2, 5, DIM, grad=False).expand(2, 2, 2, 5, DIM)
    with torch.no_grad(), raises(ArgumentError, "cache_kv of shape", "overlaps itself"):
        Attention(x, *weights, ring, cache_kv=cache)
    with raises(RingError, "ring_id=True; expected a ring, its id or its name; a bool is none"):
        Attention(x, *weights, True)
    units = ones(ring, WIDTH, 4), ones(ring, 4, WIDTH)
    for activation in (["relu"], None, "swish"):
        with raises(ArgumentError, f"activation={activation!r}; expected 'relu' or 'gelu'; pass"):
            FeedForward(x, *units, ring, activation=activation)


@runs_on("cpu_ranks")
def test_layers_and_caches(ring: Any) -> None:
    case = Case(ring)
    cache = case.cache()
    x = case.x[:, :2].to(ring.device)
    made = [*case.layers]

    def wrong(text: str, given: Any = made, memory: Any = cache, **kwargs: Any) -> None:
        kwargs = {"config": case.config, **kwargs}
        with raises(ArgumentError, "fused_multi_transformer", text):
            Layers(x, given, memory, ring, **kwargs)

    wrong("config is NoneType; expected a DecoderConfig; pass config=", config=None)
    wrong("layers is NoneType; expected a list of DecoderLayer; pass list(layers)", None)
    wrong("layers is list_iterator; expected a list", iter(made))
    wrong("cache is NoneType; expected a ContiguousCache or a PagedCache", memory=None)
    wrong("rotary is tuple; expected a Rotary; pass rotary_tables", rotary=(1, 2))
    same = type(cache)(cache.keys, cache.keys)
    wrong("cache.values[0] shares memory with cache.keys[0]", memory=same)
    keys = tuple(memory[:1].expand(memory.shape) for memory in cache.keys)
    wrong("shares memory with itself, as an exp", memory=type(cache)(keys, cache.values))
    empty = Layers(x[:0], made, cache, ring, config=case.config)
    assert_equal(tuple(empty.shape), (0, *x.shape[1:]), "no sequences")
    shared = case.cache(paged)
    shared.table[1, 0] = shared.table[0, 0]
    wrong("sequences [0, 1] write new tokens to page", memory=shared)
    case.call(shared, 4, 6)  # a page that both only read


CONFIG = DecoderConfig(8, heads=2, kv_heads=2, head_dim=4, inner=8)


def pages() -> PagedCache:
    return PagedCache.zeros(
        CONFIG,
        layers=1,
        sequences=2,
        pages=4,
        page_size=2,
        pages_per_sequence=2,
        ranks=1,
        dtype=torch.float32,
        device="cpu",
    )


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: PagePool(pages()).reserve(0, -3), "tokens=-3 for sequence 0; expected an integer"),
        (lambda: PagePool(pages()).reserve(0, 1.0), "tokens=1.0 for sequence 0"),
        (lambda: PagePool(pages()).reserve(True, 1), "sequence=True; expected 0 to 1; pass"),
        (lambda: PagePool(pages()).release("0"), "sequence='0'; expected 0 to 1"),
        (lambda: PagePool(None), "cache is NoneType; expected a PagedCache"),
        (lambda: rotary_tables(8, 2, theta=0), "theta=0; expected a finite number above 0; pass"),
        (lambda: rotary_tables(8, 2, theta=float("nan")), "theta=nan"),
        (lambda: rotary_tables(0, 2), "head_dim=0; expected an even number from 2 on"),
        (lambda: rotary_tables(8.0, 2), "head_dim=8.0; expected an integer from 0 on"),
        (lambda: rotary_tables(8, -1), "positions=-1; expected an integer from 0 on"),
        (lambda: rotary_tables(8, 2, scaling={"type": "linear"}), "factor of scaling"),
        (
            lambda: rotary_tables(8, 2, scaling={"type": "linear", "factor": 0}),
            "is 0; expected a number above 0",
        ),
        (
            lambda: rotary_tables(8, 2, scaling={"type": "llama3", "low_freq_factor": 1}),
            "high_freq_factor of scaling",
        ),
        (lambda: rotary_tables(8, 2, scaling="linear"), "scaling is str; expected None or a dict"),
        (lambda: DecoderConfig(8, 2, 2, 4, 8, norm=["rms"]), "norm=['rms']; expected one of rms"),
    ],
)
def test_pages_and_tables(call: Callable[[], Any], text: str) -> None:
    with raises(ArgumentError, text):
        call()
