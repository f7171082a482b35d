"""A Llama that is split over the ranks: random weights, or those of a Hugging Face folder."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from commlib.core.context import CommContext
from commlib.errors import ArgumentError
from commlib.ops.inference._fused_multi_transformer import fused_multi_transformer
from commlib.ops.inference.config import DecoderConfig
from commlib.ops.inference.kv_cache import KVCache
from commlib.ops.inference.rotary import Rotary, rotary_tables
from commlib.ops.inference.weight_sources import RandomWeights, WeightFiles
from commlib.ops.inference.weights import DecoderLayer
from commlib.ops.tensor_parallel._concat import concat

Tensor = torch.Tensor
Track: TypeAlias = Callable[[Iterable[int]], Iterable[int]]

THETA = 500_000.0  # of Llama 3


@dataclass(frozen=True, eq=False)
class Llama:
    """One rank's part of a Llama.

    Args:
        ring: The ring whose ranks share the model.
        config: The shape of the whole model.
        layers: This rank's weights of each layer.
        embedding: [vocabulary, hidden], whole on every rank.
        final_norm: [hidden].
        head: [vocabulary / ranks, hidden], this rank's rows.
        rope: Arguments of ``rotary_tables``: theta and scaling.
    """

    ring: CommContext
    config: DecoderConfig
    layers: tuple[DecoderLayer, ...]
    embedding: Tensor
    final_norm: Tensor
    head: Tensor
    rope: Mapping[str, Any]

    @classmethod
    def random(
        cls,
        ring: CommContext,
        config: DecoderConfig,
        *,
        layers: int,
        vocabulary: int,
        dtype: torch.dtype,
        seed: int = 0,
        track: Track = iter,
    ) -> "Llama":
        """Return a model of random weights, which depend on the seed and not on the ranks.

        Args:
            ring: The ring whose ranks share the model.
            config: The shape of the whole model.
            layers: The number of layers. One whole layer at a time is drawn on each rank.
            vocabulary: The number of tokens.
            dtype: Of all weights.
            seed: Of torch's generator for the ring's kind of device.
            track: Wraps the numbers of the layers, for example to show progress.

        Raises:
            ArgumentError: The model can't be split over the ranks.
        """
        _check_split(ring, config, vocabulary)
        draw = RandomWeights(ring.device, dtype, seed)
        unsharded = (draw.layer(config, number) for number in track(range(layers)))
        return cls(
            ring,
            config,
            layers=tuple(layer.shard(config, ring.rank, ring.size) for layer in unsharded),
            embedding=draw.matrix(0, vocabulary, config.hidden) * math.sqrt(config.hidden),
            final_norm=torch.ones(config.hidden, dtype=dtype, device=ring.device),
            head=_rows(draw.matrix(1, vocabulary, config.hidden), ring),
            rope={"theta": THETA},
        )

    @classmethod
    def load(
        cls, ring: CommContext, folder: Path, *, dtype: torch.dtype, track: Track = iter
    ) -> "Llama":
        """Read a Llama from a local folder of Hugging Face: config.json and *.safetensors.

        Args:
            ring: The ring whose ranks share the model.
            folder: The folder. Each rank reads the whole weights, one layer at a time.
            dtype: To which all weights are converted.
            track: Wraps the numbers of the layers, for example to show progress.

        Raises:
            ArgumentError: The folder has another kind of model, lacks a weight, or the model can't
                be split over the ranks.
        """
        about = json.loads((folder / "config.json").read_text())
        config = llama_config(about)
        _check_split(ring, config, about["vocab_size"])
        files = WeightFiles(folder, ring.device, dtype)
        embedding = files.whole("model.embed_tokens.weight")
        tied = about.get("tie_word_embeddings")
        rope = about.get("rope_parameters") or about.get("rope_scaling") or {}
        theta = rope.get("rope_theta", about.get("rope_theta", 10_000.0))
        unsharded = (files.layer(number) for number in track(range(about["num_hidden_layers"])))
        return cls(
            ring,
            config,
            layers=tuple(layer.shard(config, ring.rank, ring.size) for layer in unsharded),
            embedding=embedding,
            final_norm=files.whole("model.norm.weight"),
            head=_rows(embedding if tied else files.whole("lm_head.weight"), ring),
            rope={"theta": theta, "scaling": rope},
        )

    def quantize(self, dtype: torch.dtype) -> "Llama":
        """Return the model with the linear layers of its layers in 8 bits.

        Args:
            dtype: torch.int8 or torch.float8_e4m3fn.

        Returns:
            A new model. It shares the weights that are not quantized.

        Raises:
            DtypeError: ``dtype`` is another one, or the model is quantized already.
        """
        return replace(self, layers=tuple(layer.quantize(dtype) for layer in self.layers))

    def rotary(self, positions: int) -> Rotary:
        """Return the model's rotary tables.

        Args:
            positions: Number of positions, the capacity of the cache.

        Returns:
            The tables, on the ring's device.

        Raises:
            ArgumentError: ``positions`` or the model's scaling is invalid.
        """
        device = self.ring.device
        return rotary_tables(self.config.head_dim, positions, device=device, **self.rope)

    def activations(
        self,
        tokens: Tensor,
        cache: KVCache,
        start: int | Tensor,
        rotary: Rotary,
        *,
        check_positions: bool = True,
    ) -> Tensor:
        """Return the last activations of new tokens.

        Args:
            tokens: [B, S], the numbers of the new tokens.
            cache: Keys and values of earlier tokens; those of the new ones are added.
            start: As in ``fused_multi_transformer``.
            rotary: The tables that ``rotary`` returns.
            check_positions: As in ``fused_multi_transformer``.

        Returns:
            [B, S, hidden].

        Raises:
            CommError: As ``fused_multi_transformer``.
        """
        return fused_multi_transformer(
            F.embedding(tokens, self.embedding),
            self.layers,
            cache,
            self.ring,
            config=self.config,
            start=start,
            rotary=rotary,
            final_norm=self.final_norm,
            check_positions=check_positions,
        )

    def logits(self, activations: Tensor) -> Tensor:
        """Return the scores of all tokens of the vocabulary, on every rank.

        Args:
            activations: [..., hidden].

        Returns:
            [..., vocabulary].
        """
        return concat(F.linear(activations, self.head), self.ring)


def llama_config(about: Mapping[str, Any]) -> DecoderConfig:
    """Return the shape of a Llama from its config.json.

    Args:
        about: The contents of config.json.

    Raises:
        ArgumentError: It is another kind of model.
    """
    if about.get("model_type") != "llama":
        raise ArgumentError(
            f"llama_config: model_type={about.get('model_type')!r}; expected 'llama'"
        )
    heads = about["num_attention_heads"]
    return DecoderConfig(
        hidden=about["hidden_size"],
        heads=heads,
        kv_heads=about.get("num_key_value_heads") or heads,
        head_dim=about.get("head_dim") or about["hidden_size"] // heads,
        inner=about["intermediate_size"],
        activation=about["hidden_act"],
        eps=about["rms_norm_eps"],
    )


def _check_split(ring: CommContext, config: DecoderConfig, vocabulary: int) -> None:
    fault = config.fault(ring.size)
    if fault is None and vocabulary % ring.size:
        fault = (
            f"vocabulary={vocabulary} on {ring.size} ranks; expected a multiple of the ranks; use "
            f"{math.gcd(vocabulary, ring.size)} ranks"
        )
    if fault is not None:
        raise ArgumentError(f"{ring._describe('Llama')}: {fault}")


def _rows(whole: Tensor, ring: CommContext) -> Tensor:
    return whole.chunk(ring.size)[ring.rank].clone()
