"""The weights of one decoder layer: their shapes, their shards and their quantized form."""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch

from commlib.errors import ArgumentError, DtypeError, ShapeError
from commlib.ops.inference.config import DecoderConfig
from commlib.ops.inference.dense_linear import dense_linear
from commlib.ops.inference.quantized_linear import quantized_linear

Tensor = torch.Tensor
Shape: TypeAlias = tuple[int, ...]

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
LINEARS = ("qkv", "out", "up", "down")


@dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A weight of 8 bits per element and one scale per output: weight = values * scales[:, None].

    Args:
        values: [outputs, inputs], int8 or float8_e4m3fn.
        scales: [outputs], float32.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> Shape:
        """[outputs, inputs]."""
        return tuple(self.values.shape)


Weight: TypeAlias = Tensor | QuantizedWeight


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """One rank's weights of a decoder layer.

    A linear layer computes x @ weight.T + bias. n is the number of ranks, h and k are the heads and
    the key heads of a rank, D is head_dim. Norms, ``out_bias`` and ``down_bias`` are whole on every
    rank.

    Args:
        attention_norm: [hidden], before attention; with ``pre_norm=False`` after it.
        qkv: [(h + 2 * k) * D, hidden]: the rank's query heads, key heads, value heads.
        out: [hidden, h * D].
        ffn_norm: [hidden], before the feed-forward part; with ``pre_norm=False`` after it.
        up: [inner / n, hidden]; gated: [2 * inner / n, hidden], the gate's rows first.
        down: [hidden, inner / n].
        attention_norm_bias: [hidden], for norm="layer".
        qkv_bias: As many as ``qkv`` has rows.
        out_bias: [hidden], added once, after the sum over the ranks.
        ffn_norm_bias: [hidden], for norm="layer".
        up_bias: As many as ``up`` has rows.
        down_bias: [hidden], added once, after the sum over the ranks.
    """

    attention_norm: Tensor
    qkv: Weight
    out: Weight
    ffn_norm: Tensor
    up: Weight
    down: Weight
    attention_norm_bias: Tensor | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    ffn_norm_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @staticmethod
    def shapes(config: DecoderConfig, size: int = 1) -> dict[str, Shape]:
        """Return the shape of each weight on one of ``size`` ranks.

        Args:
            config: The shape of the whole model.
            size: Number of ranks that share the model.

        Returns:
            Shapes by the weights' names. Whole weights: ``size=1``.
        """
        heads, kv_heads = config.local_heads(size), config.local_kv_heads(size)
        rows = (heads + 2 * kv_heads) * config.head_dim
        inner, hidden = config.inner // size, config.hidden
        ups = inner * (2 if config.gated else 1)
        weights: dict[str, Shape] = {
            "attention_norm": (hidden,),
            "qkv": (rows, hidden),
            "out": (hidden, heads * config.head_dim),
            "ffn_norm": (hidden,),
            "up": (ups, hidden),
            "down": (hidden, inner),
        }
        return weights | {f"{name}_bias": shape[:1] for name, shape in weights.items()}

    def shard(self, config: DecoderConfig, rank: int, size: int) -> "DecoderLayer":
        """Return one rank's weights from those of a whole layer.

        Args:
            config: The shape of the whole model.
            rank: Position of the rank among them.
            size: Number of ranks that share the model.

        Returns:
            A layer whose split weights are new tensors, so that the whole layer can be freed.

        Raises:
            ArgumentError: The layer can't be split over so many ranks, or is quantized.
            ShapeError: A weight does not have the shape of a whole layer.
        """
        fault = config.fault(size)
        if fault is not None:
            raise ArgumentError(f"DecoderLayer.shard: {fault}")
        for name, shape in self.shapes(config).items():
            weight = getattr(self, name)
            if isinstance(weight, QuantizedWeight):
                raise ArgumentError(
                    f"DecoderLayer.shard: {name} is quantized; shard the layer first, then call "
                    f"quantize on the shard"
                )
            if weight is not None and tuple(weight.shape) != shape:
                raise ShapeError(
                    f"DecoderLayer.shard: {name} has shape {tuple(weight.shape)}; expected "
                    f"{shape}, that of a whole layer"
                )
        part = _Part(config, rank, size)
        parts: dict[str, Any] = {
            **{name: part.qkv(getattr(self, name)) for name in ("qkv", "qkv_bias")},
            **{name: part.up(getattr(self, name)) for name in ("up", "up_bias")},
            **{name: part.columns(getattr(self, name)) for name in ("out", "down")},
        }
        return replace(self, **parts)

    def quantize(self, dtype: torch.dtype) -> "DecoderLayer":
        """Return the layer with its four linear layers in 8 bits.

        Args:
            dtype: torch.int8 or torch.float8_e4m3fn.

        Returns:
            A new layer. It shares the weights that are not quantized.

        Raises:
            DtypeError: ``dtype`` is another one, or the layer is quantized already.
        """
        quantized: dict[str, Any] = {name: quantize(getattr(self, name), dtype) for name in LINEARS}
        return replace(self, **quantized)


@dataclass(frozen=True)
class _Part:
    """The part of one rank."""

    config: DecoderConfig
    rank: int
    size: int

    def qkv(self, whole: Tensor | None) -> Tensor | None:
        """Return the rows of this rank's heads."""
        if whole is None:
            return None
        heads, kv_heads = self.config.heads, self.config.kv_heads
        rows = whole.view(heads + 2 * kv_heads, self.config.head_dim, *whole.shape[1:])
        own_q, own_kv = self.config.local_heads(self.size), self.config.local_kv_heads(self.size)
        first = self.rank * kv_heads // self.size  # several ranks may share a key head
        starts = (self.rank * own_q, heads + first, heads + kv_heads + first)
        counts = (own_q, own_kv, own_kv)
        parts = [rows[at : at + count] for at, count in zip(starts, counts, strict=True)]
        return torch.cat(parts).flatten(0, 1)

    def up(self, whole: Tensor | None) -> Tensor | None:
        """Return this rank's rows of the gate and of the layer that it multiplies."""
        if whole is None:
            return None
        halves = whole.chunk(2) if self.config.gated else (whole,)
        return torch.cat([half.chunk(self.size)[self.rank] for half in halves])

    def columns(self, whole: Tensor) -> Tensor:
        """Return this rank's inputs of a linear layer that is summed over the ranks."""
        return whole.chunk(self.size, dim=1)[self.rank].clone()


def quantize(weight: Weight, dtype: torch.dtype) -> QuantizedWeight:
    """Quantize a weight to 8 bits with one scale per output; the largest value stays exact.

    Args:
        weight: [outputs, inputs], a floating dtype.
        dtype: torch.int8 or torch.float8_e4m3fn.

    Returns:
        The weight in 8 bits.

    Raises:
        DtypeError: ``dtype`` is another one, or the weight is quantized already.
    """
    if dtype not in LARGEST:
        raise DtypeError(f"quantize: dtype={dtype}; expected torch.int8 or torch.float8_e4m3fn")
    if isinstance(weight, QuantizedWeight):
        raise DtypeError("quantize: the weight is quantized already; pass the original weight")
    wide = weight.float()
    scales = (wide.abs().amax(1) / LARGEST[dtype]).clamp_(min=torch.finfo(torch.float32).tiny)
    values = wide / scales[:, None]
    values = values.round_() if dtype is torch.int8 else values
    limit = LARGEST[dtype]
    return QuantizedWeight(values.clamp_(-limit, limit).to(dtype), scales)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Return x @ weight.T + bias."""
    if isinstance(weight, Tensor):
        return dense_linear(x, weight, bias)
    return quantized_linear(x, weight.values, weight.scales, bias)
