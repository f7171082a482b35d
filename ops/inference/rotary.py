"""Rotary position embedding: tables of angles, and the rotation of heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from commlib.errors import ArgumentError

Tensor = torch.Tensor


@dataclass(frozen=True, eq=False)
class Rotary:
    """Cosines and sines of rotary position embedding, by position.

    The first 2 * r elements of a head are rotated in pairs; the others stay as they are.

    Args:
        cos: [positions, r], float32.
        sin: [positions, r], float32.
        interleaved: A pair is elements (2 * i, 2 * i + 1), as in GPT-J. False: (i, r + i), as in
            Llama and GPT-NeoX.
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    def at(self, positions: Tensor) -> "Rotary":
        """Return the rows of ``positions`` [B, S], for heads [B, S, heads, D]."""
        return Rotary(
            self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2), self.interleaved
        )

    def rotate(self, heads: Tensor) -> Tensor:
        """Return ``heads``, rotated in float32 and rounded once; ``self`` comes from ``at``."""
        width = 2 * self.cos.shape[-1]
        turned, rest = heads[..., :width].float(), heads[..., width:]
        if self.interleaved:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = turned.chunk(2, dim=-1)
        pair = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        joined = torch.stack(pair, -1).flatten(-2) if self.interleaved else torch.cat(pair, -1)
        joined = joined.to(heads.dtype)
        return torch.cat([joined, rest], -1) if rest.shape[-1] else joined


def rotary_tables(
    head_dim: int,
    positions: int,
    *,
    theta: float = 10_000.0,
    scaling: Mapping[str, Any] | None = None,
    interleaved: bool = False,
    device: torch.device | str = "cpu",
) -> Rotary:
    """Return the tables of a model.

    Args:
        head_dim: Elements that are rotated, an even number.
        positions: Number of rows.
        theta: The base of the frequencies.
        scaling: The frequencies of longer contexts, in the form of a Hugging Face config: None,
            or ``rope_type`` "default", "linear" or "llama3".
        interleaved: As in ``Rotary``.
        device: The tables' device.

    Raises:
        ArgumentError: ``head_dim`` is odd, or the type of the scaling is unknown.
    """
    if head_dim % 2:
        raise ArgumentError(f"rotary_tables: head_dim={head_dim}; expected an even number")
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64)
    frequencies = _scaled(torch.pow(theta, -steps / head_dim), scaling or {})
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (table.float().to(device) for table in (angles.cos(), angles.sin()))
    return Rotary(cos, sin, interleaved)


def _scaled(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(scaling["factor"])
    if kind != "llama3":
        raise ArgumentError(
            f"rotary_tables: scaling of type {kind!r}; expected default, linear or llama3; compute "
            f"the tables yourself and pass Rotary(cos, sin)"
        )
    # Long waves are stretched, short ones are kept, and the ones between are interpolated.
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = frequencies * (int(scaling["original_max_position_embeddings"]) / (2 * torch.pi))
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / float(scaling["factor"]))
