"""Sources of the weights of a Llama: random numbers, or the files of a Hugging Face folder."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from commlib.errors import ArgumentError
from commlib.ops.inference.config import DecoderConfig
from commlib.ops.inference.weights import DecoderLayer

Tensor = torch.Tensor

PARTS = {  # the modules of Hugging Face in each weight
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "ffn_norm": ("post_attention_layernorm",),
    "up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}


@dataclass(frozen=True)
class RandomWeights:
    """Random weights; each matrix has its own seed."""

    device: torch.device
    dtype: torch.dtype
    seed: int

    def matrix(self, number: int, *shape: int) -> Tensor:
        """Return a matrix with the seed ``number``."""
        generator = torch.Generator(self.device).manual_seed(self.seed * 2**32 + number)
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(0, 1 / math.sqrt(shape[-1]), generator=generator)

    def layer(self, config: DecoderConfig, number: int) -> DecoderLayer:
        """Return a whole layer."""
        weights = {}
        for index, (name, shape) in enumerate(DecoderLayer.shapes(config).items()):
            if len(shape) == 2:
                weights[name] = self.matrix(100 * (number + 1) + index, *shape)
            elif not name.endswith("bias"):
                weights[name] = torch.ones(shape, dtype=self.dtype, device=self.device)
        return DecoderLayer(**weights)


class WeightFiles:
    """The weights in a folder."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        from safetensors import safe_open

        self._folder, self._device, self._dtype = folder, device, dtype
        files: list[Any] = [safe_open(p, "pt") for p in sorted(folder.glob("*.safetensors"))]
        self._owners = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def whole(self, *names: str) -> Tensor:
        """Return one weight, or several with their rows after each other."""
        missing = [name for name in names if name not in self._owners]
        if missing:
            raise ArgumentError(
                f"Llama.load: {self._folder} has no {missing[0]}; expected it in a file of "
                f"*.safetensors; save the model with save_pretrained"
            )
        parts = [self._owners[name].get_tensor(name) for name in names]
        return torch.cat(parts).to(self._device, self._dtype)

    def layer(self, number: int) -> DecoderLayer:
        """Return a whole layer."""
        weights = {}
        for name, parts in PARTS.items():
            paths = [f"model.layers.{number}.{part}" for part in parts]
            weights[name] = self.whole(*(f"{path}.weight" for path in paths))
            if f"{paths[0]}.bias" in self._owners:
                weights[f"{name}_bias"] = self.whole(*(f"{path}.bias" for path in paths))
        return DecoderLayer(**weights)
