"""Decoders for tests: random layers, and what the layers compute, in NumPy float64."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from commlib import ops
from commlib.ops.inference import (
    ContiguousCache,
    DecoderConfig,
    DecoderLayer,
    PagedCache,
    PagePool,
    QuantizedWeight,
    rotary_tables,
)
from tests.support.checks import Array, assert_equal, wide

CAPACITY, PAGE, THETA = 12, 4, 10_000.0
Part = dict[str, Any]


def whole_layers(config: DecoderConfig, count: int, *, biases: bool, seed: int = 0) -> list[Any]:
    """Return the layers of one rank, float32, the same on every rank."""
    draw = torch.Generator().manual_seed(seed)
    layers = []
    for _ in range(count):
        weights = {}
        for name, shape in DecoderLayer.shapes(config).items():
            if name.endswith("norm_bias") and config.norm == "rms":
                continue
            if name.endswith("bias") and not biases:
                continue
            spread = 1 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.3
            weights[name] = torch.randn(shape, generator=draw) * spread
            if name.endswith("norm"):
                weights[name] += 1
        layers.append(DecoderLayer(**weights))
    return layers


def cast(layer: DecoderLayer, dtype: torch.dtype, device: Any) -> DecoderLayer:
    """Return the layer in another dtype; quantized weights keep theirs."""
    return DecoderLayer(
        **{
            name: weight.to(device, dtype)
            if isinstance(weight, torch.Tensor)
            else moved(weight, device)
            for name, weight in vars(layer).items()
        }
    )


def moved(weight: QuantizedWeight | None, device: Any) -> QuantizedWeight | None:
    """Return a quantized weight on another device."""
    if weight is None:
        return None
    return QuantizedWeight(weight.values.to(device), weight.scales.to(device))


def paged(config: DecoderConfig, layers: int, sequences: int, **how: Any) -> PagedCache:
    """Return a paged cache whose sequences have all of their pages, in a mixed order."""
    each = CAPACITY // PAGE
    sizes = {"pages": sequences * each + 1, "page_size": PAGE, "pages_per_sequence": each}
    cache = PagedCache.zeros(config, layers=layers, sequences=sequences, **sizes, **how)
    pool = PagePool(cache)
    for length in (1, CAPACITY):
        for sequence in reversed(range(sequences)):
            pool.reserve(sequence, length)
    return cache


def contiguous(config: DecoderConfig, layers: int, sequences: int, **how: Any) -> ContiguousCache:
    """Return a cache of the same capacity."""
    return ContiguousCache.zeros(
        config, layers=layers, sequences=sequences, capacity=CAPACITY, **how
    )


def tables(config: DecoderConfig, **how: Any) -> Any:
    """Return rotary tables for every position of the caches."""
    return rotary_tables(config.head_dim, CAPACITY, theta=THETA, **how)


# -- a decoder on one rank -----------------------------------------------------------------------

CONFIG = DecoderConfig(hidden=40, heads=4, kv_heads=2, head_dim=8, inner=24)
LAYERS, SEQUENCES, TOKENS = 2, 3, 7
NEAR = {torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 1.5e-1}

# Options of the layers, and of a model around them.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"rotary": "halves", "final_norm": True},
    "wide heads": {
        "config": {"hidden": 64, "heads": 8, "kv_heads": 4, "head_dim": 64},
        "rotary": "halves",
        "final_norm": True,
    },
    "one key head": {"config": {"kv_heads": 1}, "rotary": "halves"},
    "many key heads": {"config": {"kv_heads": 4}},
    "gpt": {
        "config": {"norm": "layer", "gated": False, "activation": "gelu", "eps": 1e-5},
        "biases": True,
        "final_norm": True,
    },
    "post norm": {
        "config": {"norm": "layer", "pre_norm": False, "gated": False, "activation": "relu"},
        "biases": True,
    },
    "post norm, rms": {"config": {"pre_norm": False, "activation": "gelu_tanh"}},
    "interleaved, biases": {"rotary": "interleaved", "biases": True},
    "legacy": {
        "config": {
            "kv_heads": 4,
            "norm": "layer",
            "gated": False,
            "activation": "gelu",
            "eps": 1e-5,
        },
        "biases": True,
    },
    "int8": {"quantized": torch.int8, "rotary": "halves"},
    "fp8": {"quantized": torch.float8_e4m3fn, "biases": True},
}


class Case:
    """A decoder on this rank, its inputs, and what the formula gives."""

    def __init__(self, ring: Any, kind: str = "llama", dtype: torch.dtype = torch.float32) -> None:
        options = KINDS[kind]
        self.ring, self.dtype, self.what = ring, dtype, f"{kind}, {dtype}"
        self.config = config = replace(CONFIG, **options.get("config", {}))
        full_layers = whole_layers(config, LAYERS, biases=options.get("biases", False))
        full_layers = [cast(layer, dtype, "cpu") for layer in full_layers]
        self.parts = [self._parts(layer, options.get("quantized")) for layer in full_layers]
        self.layers = [cast(parts[ring.rank], dtype, ring.device) for parts in self.parts]
        draw = torch.Generator().manual_seed(5)
        self.x = torch.randn(SEQUENCES, TOKENS, config.hidden, generator=draw).to(dtype)
        norm = 1 + torch.randn(config.hidden, generator=draw) / 4
        self.final_norm = norm.to(dtype) if options.get("final_norm") else None
        self.rotary = options.get("rotary")
        # Quantized shards have other scales than a whole layer has.
        self.by_parts = "quantized" in options

    def _parts(self, whole: DecoderLayer, quantized: torch.dtype | None) -> list[DecoderLayer]:
        size = self.ring.size
        parts = [whole.shard(self.config, rank, size) for rank in range(size)]
        self.whole = [*getattr(self, "whole", []), whole]
        return parts if quantized is None else [part.quantize(quantized) for part in parts]

    def expected(self) -> Array:
        """Return what the whole decoder gives for ``x``."""
        heads, size = self.config.heads, self.ring.size
        layers = (
            [[part_of(part, heads // size) for part in parts] for parts in self.parts]
            if self.by_parts
            else [[part_of(layer, heads)] for layer in self.whole]
        )
        norm = None if self.final_norm is None else wide(self.final_norm).astype("f8")
        x = wide(self.x).astype("f8")
        return reference(x, layers, self.config, rotary=self.rotary, final_norm=norm)

    def cache(self, make: Any = contiguous, sequences: int = SEQUENCES) -> Any:
        kwargs = {"ranks": self.ring.size, "dtype": self.dtype, "device": self.ring.device}
        return make(self.config, LAYERS, sequences, **kwargs)

    def call(self, cache: Any, first: int, end: int, **more: Any) -> torch.Tensor:
        """Run the tokens from ``first`` to ``end`` of every sequence."""
        device = self.ring.device
        final = self.final_norm
        kwargs: dict[str, Any] = {"start": first, "config": self.config}
        kwargs["final_norm"] = None if final is None else final.to(device)
        if self.rotary is not None:
            interleaved = self.rotary == "interleaved"
            kwargs["rotary"] = tables(self.config, interleaved=interleaved, device=device)
        tokens = self.x[:, first:end].to(device)
        return ops.fused_multi_transformer(tokens, self.layers, cache, **(kwargs | more))

    def near(self, actual: torch.Tensor, expected: Array, what: str) -> None:
        assert_equal(actual.dtype, self.dtype, f"{self.what}, {what}: dtype")
        assert_equal(tuple(actual.shape), expected.shape, f"{self.what}, {what}: shape")
        apart = float(np.abs(wide(actual) - expected).max())
        assert_equal(apart <= NEAR[self.dtype], True, f"{self.what}, {what}: {apart} apart")


# -- the formula ----------------------------------------------------------------------------------


def part_of(layer: DecoderLayer, heads: int) -> Part:
    """Return the float64 weights of a layer, or of one rank's part with ``heads`` query heads."""
    values = {name: _values(weight) for name, weight in vars(layer).items()}
    return {**values, "heads": heads}


def _values(weight: Any) -> Array | None:
    if weight is None:
        return None
    if isinstance(weight, QuantizedWeight):
        values = wide(weight.values.float()).astype("f8")
        return np.asarray(values * wide(weight.scales).astype("f8")[:, None])
    return wide(weight).astype("f8")


def reference(
    x: Array,
    layers: Sequence[Sequence[Part]],
    config: DecoderConfig,
    *,
    rotary: str | None = None,
    final_norm: Array | None = None,
) -> Array:
    """Return the outputs of whole sequences [B, T, hidden] that begin at position 0.

    ``layers`` has the parts of each layer; what they compute is summed.
    """
    for parts in layers:
        first = parts[0]
        y = _norm(x, first, "attention", config) if config.pre_norm else x
        seen = sum(_attention(y, part, config, rotary) @ part["out"].T for part in parts)
        x = x + seen + _bias(first, "out")
        if not config.pre_norm:
            x = _norm(x, first, "attention", config)
        y = _norm(x, first, "ffn", config) if config.pre_norm else x
        x = x + sum(_inner(y, part, config) @ part["down"].T for part in parts)
        x = x + _bias(first, "down")
        if not config.pre_norm:
            x = _norm(x, first, "ffn", config)
    if final_norm is None:
        return x
    return _norm(x, {"final_norm": final_norm}, "final", config)


def _bias(part: Part, name: str) -> Any:
    bias = part.get(f"{name}_bias")
    return 0.0 if bias is None else bias


def _norm(x: Array, part: Part, name: str, config: DecoderConfig) -> Array:
    if config.norm == "layer":
        x = x - x.mean(-1, keepdims=True)
    rows = x / np.sqrt((x**2).mean(-1, keepdims=True) + config.eps)
    return np.asarray(rows * part[f"{name}_norm"] + _bias(part, f"{name}_norm"))


def _attention(x: Array, part: Part, config: DecoderConfig, rotary: str | None) -> Array:
    count, length, _ = x.shape
    heads, width = part["heads"], config.head_dim
    rows = (x @ part["qkv"].T + _bias(part, "qkv")).reshape(count, length, -1, width)
    kv_heads = (rows.shape[2] - heads) // 2
    q, k, v = np.split(rows, [heads, heads + kv_heads], axis=2)
    if rotary is not None:
        q, k = _turned(q, rotary), _turned(k, rotary)
    out = np.empty((count, length, heads, width))
    for head in range(heads):
        shared = head * kv_heads // heads
        scores = q[:, :, head] @ k[:, :, shared].transpose(0, 2, 1) / math.sqrt(width)
        scores[:, np.triu(np.ones((length, length), bool), 1)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out[:, :, head] = weights / weights.sum(-1, keepdims=True) @ v[:, :, shared]
    return out.reshape(count, length, heads * width)


def _turned(heads: Array, kind: str) -> Array:
    """Multiply pairs of elements, as complex numbers, by a rotation per position and pair."""
    length, width = heads.shape[1], heads.shape[-1]
    angles = np.outer(np.arange(length), THETA ** (-np.arange(0, width, 2) / width))
    first, second = (
        (heads[..., 0::2], heads[..., 1::2])
        if kind == "interleaved"
        else np.split(heads, 2, axis=-1)
    )
    turned = (first + 1j * second) * np.exp(1j * angles)[None, :, None]
    pair = (turned.real, turned.imag)
    if kind == "interleaved":
        return np.stack(pair, -1).reshape(heads.shape)
    return np.concatenate(pair, -1)


def _inner(x: Array, part: Part, config: DecoderConfig) -> Array:
    inner: Array = x @ part["up"].T + _bias(part, "up")
    if not config.gated:
        return _activated(inner, config.activation)
    gate, inner = np.split(inner, 2, axis=-1)
    return np.asarray(_activated(gate, config.activation) * inner)


def _activated(x: Array, kind: str) -> Array:
    if kind == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    if kind == "relu":
        return np.maximum(x, 0)
    if kind == "gelu_tanh":
        cubic = math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)
        return np.asarray(x / 2 * (1 + np.tanh(cubic)))
    return np.asarray(x / 2 * (1 + np.vectorize(math.erf)(x / math.sqrt(2))))
