"""The shape of a decoder and its options, the same on every rank."""

import math
from dataclasses import dataclass

from commlib.errors import ArgumentError

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")


@dataclass(frozen=True)
class DecoderConfig:
    """The shape of a decoder, counted over all ranks, and how its layers compute.

    Args:
        hidden: Elements of an activation.
        heads: Query heads.
        kv_heads: Key and value heads; each serves heads / kv_heads query heads.
        head_dim: Elements of a head.
        inner: Elements between the two linear layers of the feed-forward part.
        norm: "rms" or "layer".
        pre_norm: Normalise before attention and feed-forward. False: after them, with the residual.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        gated: Multiply the activation with a second linear layer, as SwiGLU does.
        eps: Of the norms, a finite number >= 0.

    Raises:
        ArgumentError: A field is invalid, or kv_heads does not divide heads.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    norm: str = "rms"
    pre_norm: bool = True
    activation: str = "silu"
    gated: bool = True
    eps: float = 1e-6

    def __post_init__(self) -> None:
        for name in ("hidden", "heads", "kv_heads", "head_dim", "inner"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ArgumentError(f"DecoderConfig: {name}={value!r}; expected an integer >= 1")
        if self.heads % self.kv_heads:
            raise ArgumentError(
                f"DecoderConfig: heads={self.heads} with kv_heads={self.kv_heads}; expected a "
                f"divisor of heads; pass kv_heads={math.gcd(self.heads, self.kv_heads)}"
            )
        for name, choices in (("norm", ("rms", "layer")), ("activation", ACTIVATIONS)):
            value = getattr(self, name)
            if not isinstance(value, str) or value not in choices:
                raise ArgumentError(
                    f"DecoderConfig: {name}={value!r}; expected one of "
                    f"{', '.join(choices)}; pass {name}={choices[0]!r}"
                )
        is_number = isinstance(self.eps, (int, float)) and not isinstance(self.eps, bool)
        if not is_number or not 0 <= self.eps < math.inf:
            raise ArgumentError(
                f"DecoderConfig: eps={self.eps!r}; expected a number from 0 on; pass eps=1e-6"
            )

    def fault(self, size: int) -> str | None:
        """Return why the layers can't be split over ``size`` ranks; None if they can.

        Ranks that outnumber the key heads share them: each key head is then on several ranks.

        Args:
            size: Number of ranks that share the model.

        Returns:
            The error's text, or None.
        """
        if self.heads % size:
            return (
                f"heads={self.heads} on {size} ranks; expected heads that divide by the ranks; use "
                f"{math.gcd(self.heads, size)} ranks, or another model"
            )
        if self.kv_heads % size and size % self.kv_heads:
            return (
                f"kv_heads={self.kv_heads} on {size} ranks; expected a multiple or a divisor of "
                f"the ranks; use {math.gcd(self.kv_heads, size)} ranks"
            )
        if self.inner % size:
            return (
                f"inner={self.inner} on {size} ranks; expected a multiple of the ranks; pad the "
                f"feed-forward weights with zeros to {-(-self.inner // size) * size}"
            )
        return None

    def local_heads(self, size: int) -> int:
        """Return the query heads of each of ``size`` ranks.

        Args:
            size: Number of ranks that share the model.
        """
        return self.heads // size

    def local_kv_heads(self, size: int) -> int:
        """Return the key heads of each of ``size`` ranks, at least one.

        Args:
            size: Number of ranks that share the model.
        """
        return max(1, self.kv_heads // size)
