"""Rotary position embedding: tables of angles, and the rotation of heads."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
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
        """Return the rows of some positions.

        Args:
            positions: [B, S].

        Returns:
            Tables for heads [B, S, heads, D].
        """
        return Rotary(
            self.cos[positions].unsqueeze(2), self.sin[positions].unsqueeze(2), self.interleaved
        )

    def rotate(self, heads: Tensor) -> Tensor:
        """Return rotated heads; ``at`` has returned this object.

        Args:
            heads: [B, S, heads, D].

        Returns:
            A tensor of the shape and dtype of ``heads``, computed in float32 and rounded once.
        """
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


@dataclass(frozen=True, eq=False)
class TokenRotary:
    """Cosines and sines of the new tokens of one call, in place of tables by position.

    A head is cut into parts of one size. In each, element i is rotated with element r + i.

    Args:
        cos: [B, S, parts, r], float32, with 2 * r * parts elements per head.
        sin: [B, S, parts, r], float32.
    """

    cos: Tensor
    sin: Tensor

    def at(self, positions: Tensor) -> "TokenRotary":
        """Return this object: the angles are those of the tokens.

        Args:
            positions: Ignored.
        """
        return self

    def rotate(self, heads: Tensor) -> Tensor:
        """Return rotated heads.

        Args:
            heads: [B, S, heads, D].

        Returns:
            A tensor of the shape and dtype of ``heads``, computed in float32 and rounded once.
        """
        parts = heads.unflatten(-1, (self.cos.shape[2], -1)).float()
        first, second = parts.chunk(2, dim=-1)
        cos, sin = self.cos.unsqueeze(2), self.sin.unsqueeze(2)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return turned.flatten(-2).to(heads.dtype)


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
        ArgumentError: ``head_dim`` is odd, a number is out of range, or the scaling is unknown or
            lacks a number.
    """
    _check(head_dim, positions, theta)
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ArgumentError(
            f"rotary_tables: scaling is {type(scaling).__name__}; expected None or a dictionary; "
            f"pass config.rope_scaling"
        )
    steps = torch.arange(0, head_dim, 2, dtype=torch.float64)
    frequencies = _scaled(torch.pow(theta, -steps / head_dim), scaling or {})
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    cos, sin = (table.float().to(device) for table in (angles.cos(), angles.sin()))
    return Rotary(cos, sin, interleaved)


def _check(head_dim: int, positions: int, theta: float) -> None:
    integers = {"head_dim": head_dim, "positions": positions}
    for name, value in integers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ArgumentError(
                f"rotary_tables: {name}={value!r}; expected an integer from 0 on; pass "
                f"{name}={128 if name == 'head_dim' else 4096}"
            )
    if head_dim < 2 or head_dim % 2:
        raise ArgumentError(
            f"rotary_tables: head_dim={head_dim}; expected an even number from 2 on; pass the "
            f"elements of a head that are rotated"
        )
    if not _is_positive(theta):
        raise ArgumentError(
            f"rotary_tables: theta={theta!r}; expected a finite number above 0; pass theta=10000.0"
        )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and isfinite(value) and value > 0


def _number(scaling: Mapping[str, Any], name: str) -> float:
    """Return a number of the scaling."""
    value: Any = scaling.get(name)
    if not _is_positive(value):
        raise ArgumentError(
            f"rotary_tables: {name} of scaling {dict(scaling)} is {value!r}; expected a number "
            f"above 0; pass scaling={{..., {name!r}: 8.0}}"
        )
    return float(value)


def _scaled(frequencies: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / _number(scaling, "factor")
    if kind != "llama3":
        raise ArgumentError(
            f"rotary_tables: scaling of type {kind!r}; expected default, linear or llama3; compute "
            f"the tables yourself and pass Rotary(cos, sin)"
        )
    # Long waves are stretched, short ones are kept, and the ones between are interpolated.
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    if low == high:
        raise ArgumentError(
            f"rotary_tables: low_freq_factor and high_freq_factor are {low}; expected two "
            f"numbers; pass the scaling of the model's config"
        )
    old_len = _number(scaling, "original_max_position_embeddings")
    turns = frequencies * (old_len / (2 * torch.pi))
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / _number(scaling, "factor"))
