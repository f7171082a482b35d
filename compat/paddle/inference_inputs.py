"""The legacy inputs of fused_multi_transformer, in the form of ``commlib.ops.inference``."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from commlib.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from commlib.ops.inference import ContiguousCache, DecoderConfig, DecoderLayer, TokenRotary

Tensor = torch.Tensor

MODES = ("upscale_in_train", "downscale_in_infer")
REQUIRED = {
    "attention_norm": "ln_scales",
    "qkv": "qkv_weights",
    "out": "linear_weights",
    "ffn_norm": "ffn_ln_scales",
    "up": "ffn1_weights",
    "down": "ffn2_weights",
}


class Inputs:
    """The checks and the forms of one call; ``where`` is the start of the error texts."""

    def __init__(self, where: str, x: Any, size: int) -> None:
        self.where, self.size = where, size
        if not isinstance(x, Tensor) or x.dim() != 3:
            actual = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ShapeError(
                f"{where}: x is {actual}; expected a tensor [batch, tokens, width]; pass "
                f"x.view(batch, tokens, width)"
            )
        self.x: Tensor = x

    def dropout(self, rate: Any, training: Any, mode: Any) -> None:
        """Raise for options that would drop or scale values: the operator has no gradient."""
        if mode not in MODES:
            self._fail(f"mode={mode!r}", " or ".join(map(repr, MODES)), "pass 'upscale_in_train'")
        is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
        if not is_number or not 0 <= rate <= 1:
            self._fail(f"dropout_rate={rate!r}", "a number from 0 to 1", "pass dropout_rate=0.0")
        if rate and (training or mode != MODES[0]):
            self._fail(
                f"dropout_rate={rate} with training={training} and mode={mode!r}",
                "inference, which drops and scales nothing",
                "pass training=False and mode='upscale_in_train', or train with fused_attention",
            )

    def columns(self, given: Mapping[str, Any], trans_qkvw: bool) -> list[DecoderLayer]:
        """Return one layer per entry of the lists of weights and biases."""
        lengths = dict[str, int]()
        for name, column in given.items():
            role = REQUIRED.get(name, f"the list of {name}")
            if column is None and name not in REQUIRED:
                continue
            if not isinstance(column, list | tuple):
                self._fail(f"{role} is {type(column).__name__}", "a list", "pass one per layer")
            for number, each in enumerate(column):
                optional = each is None and name not in REQUIRED
                if not optional and not isinstance(each, Tensor):
                    self._fail(
                        f"{role}[{number}] is {type(each).__name__}", "a tensor", "pass a tensor"
                    )
            lengths[name] = len(column)
        if len({*lengths.values()}) != 1 or not lengths["qkv"]:
            self._fail(
                f"weights of {lengths} layers", "the same number each, 1 or more", "pass full lists"
            )
        axis, dims = (0, "[3, heads, head_dim, width]") if trans_qkvw else (1, "[width, 3, ...]")
        for number, weight in enumerate(given["qkv"]):
            if weight.dim() != 4 or weight.shape[axis] != 3:
                raise ShapeError(
                    f"{self.where}: qkv_weights[{number}] has shape {tuple(weight.shape)}; "
                    f"expected {dims}; pass trans_qkvw={not trans_qkvw}, or view the weight so"
                )
        layers = list[DecoderLayer]()
        for number in range(lengths["qkv"]):
            weights: dict[str, Any] = {
                name: self._formed(name, column[number], trans_qkvw)
                for name, column in given.items()
                if column
            }
            layers.append(DecoderLayer(**weights))
        return layers

    def cache(
        self, config: DecoderConfig, count: int, cache_kvs: Any, pre_caches: Any
    ) -> tuple[ContiguousCache, int]:
        """Return a cache, and the length of the prefix that ``pre_caches`` has put into it."""
        prefix = 0 if pre_caches is None else self._caches("pre_caches", pre_caches, count)
        if cache_kvs is not None:
            self._caches("cache_kvs", cache_kvs, count)
            keys, values = (
                tuple(each[kind].transpose(1, 2) for each in cache_kvs) for kind in (0, 1)
            )
            cache = ContiguousCache(keys, values)
        else:
            cache = ContiguousCache.zeros(
                config,
                layers=count,
                sequences=self.x.shape[0],
                capacity=prefix + self.x.shape[1],
                ranks=self.size,
                dtype=self.x.dtype,
                device=self.x.device,
            )
        self._prefixes(cache, pre_caches or (), prefix)
        return cache, prefix

    def _prefixes(self, cache: ContiguousCache, pre_caches: Sequence[Any], prefix: int) -> None:
        """Raise for prefixes that do not fit into the cache."""
        batch = self.x.shape[0]
        for number, each in enumerate(pre_caches):
            memory = cache.keys[number], cache.values[number]
            wanted = (2, batch, memory[0].shape[2], prefix, memory[0].shape[3])
            if tuple(each.shape) != wanted or cache.capacity < prefix or batch > cache.sequences:
                raise ShapeError(
                    f"{self.where}: pre_caches[{number}] has shape {tuple(each.shape)}; expected "
                    f"{wanted}, with at most {cache.capacity} positions of cache_kvs; pass "
                    f"prefixes of these sequences and heads, or a longer cache_kvs"
                )
            if each.dtype is not self.x.dtype:
                raise DtypeError(
                    f"{self.where}: pre_caches[{number}] is {each.dtype}; expected {self.x.dtype}, "
                    f"the dtype of x; pass pre_caches[{number}].to({self.x.dtype})"
                )
            if each.device != self.x.device:
                raise DeviceError(
                    f"{self.where}: pre_caches[{number}] is on {each.device}, and x is on "
                    f"{self.x.device}; call pre_caches[{number}].to('{self.x.device}')"
                )

    def fill(self, cache: ContiguousCache, prefixes: Sequence[Tensor], prefix: int) -> None:
        """Put the prefixes into the first positions of the cache."""
        batch = self.x.shape[0]
        for number, each in enumerate(prefixes):
            for kind, new in zip((cache.keys, cache.values), each, strict=True):
                kind[number][:batch, :prefix].copy_(new.transpose(1, 2))

    def _caches(self, role: str, caches: Any, count: int) -> int:
        """Raise unless ``caches`` has one tensor per layer; return the positions of the first."""
        if not isinstance(caches, list | tuple) or len(caches) != count:
            actual = len(caches) if isinstance(caches, list | tuple) else type(caches).__name__
            self._fail(f"{role} of {actual}", f"a list of {count} tensors", "pass one per layer")
        for number, each in enumerate(caches):
            dims = each.dim() if isinstance(each, Tensor) else 0
            if dims != 5 or each.shape[0] != 2:
                raise ShapeError(
                    f"{self.where}: {role}[{number}] is "
                    f"{tuple(each.shape) if dims else type(each).__name__}; expected a tensor "
                    f"[2, batch, heads, positions, head_dim]; pass keys and values of the layer"
                )
        return int(caches[0].shape[3])

    def rotary(self, embs: Any, dims: Any, head_dim: int) -> TokenRotary | None:
        """Return the angles of the new tokens.

        Args:
            embs: [2, B, 1, S, D], cosines and sines. The first half of each part is read.
            dims: Parts of a head that are rotated each by their own angles: 1 or 2; 0 for none.
            head_dim: D.
        """
        if dims not in (0, 1, 2) or isinstance(dims, bool) or (dims == 0) != (embs is None):
            self._fail(
                f"rotary_emb_dims={dims!r} with rotary_embs {'' if embs is None else 'not '}None",
                "1 or 2 with rotary_embs, or 0 and None",
                "pass both",
            )
        if embs is None:
            return None
        wanted = (2, self.x.shape[0], 1, self.x.shape[1], head_dim)
        shape = tuple(embs.shape) if isinstance(embs, Tensor) else type(embs).__name__
        if shape != wanted or head_dim % (2 * dims):
            raise ShapeError(
                f"{self.where}: rotary_embs is {shape}; expected {wanted}: cosines and sines of "
                f"the new tokens, with a head_dim that 2 * {dims} divides"
            )
        if embs.device != self.x.device:
            raise DeviceError(
                f"{self.where}: rotary_embs is on {embs.device}, and x is on {self.x.device}; call "
                f"rotary_embs.to('{self.x.device}')"
            )
        parts = embs.squeeze(2).float().unflatten(-1, (dims, 2, head_dim // (2 * dims)))
        return TokenRotary(*parts.select(-2, 0).unbind(0))

    def lengths(self, seq_lens: Any) -> Tensor | None:
        """Return ``seq_lens`` [B] if it is one integer per sequence."""
        if seq_lens is None:
            return None
        if not isinstance(seq_lens, Tensor) or seq_lens.is_floating_point():
            actual = getattr(seq_lens, "dtype", type(seq_lens).__name__)
            raise DtypeError(
                f"{self.where}: seq_lens is {actual}; expected an integer tensor [batch]; pass "
                f"torch.tensor(lengths)"
            )
        count = self.x.shape[0]
        if seq_lens.numel() != count:
            raise ShapeError(
                f"{self.where}: seq_lens has shape {tuple(seq_lens.shape)}; expected ({count},)"
            )
        return seq_lens.reshape(count).to(self.x.device, torch.int64)

    def mask(self, mask: Any) -> Tensor | None:
        """Return a mask with four dims: numbers that are added, or True where a token may look."""
        if mask is None:
            return None
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            actual = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ShapeError(
                f"{self.where}: attn_mask is {actual}; expected a tensor [batch, heads or 1, "
                f"tokens, keys]; pass mask[:, None]"
            )
        return mask if mask.is_floating_point() else mask.bool()

    def _formed(self, name: str, tensor: Tensor | None, trans_qkvw: bool) -> Tensor | None:
        if tensor is None:
            return None
        if name == "qkv":
            return tensor.flatten(0, 2) if trans_qkvw else tensor.flatten(1, 3).t()
        if name == "qkv_bias":
            return tensor.flatten()
        if "norm" in name and tensor.dtype is torch.float32:  # as half precision has them there
            return tensor.to(self.x.dtype) if self.x.is_floating_point() else tensor
        return tensor.t() if name in ("out", "up", "down") and tensor.dim() == 2 else tensor

    def _fail(self, given: str, expected: str, remedy: str) -> None:
        raise ArgumentError(f"{self.where}: {given}; expected {expected}; {remedy}")


def hide_from(mask: Tensor, ends: Tensor) -> Tensor:
    """Return ``mask`` that also hides keys from position ``ends`` [B] on."""
    keys = torch.arange(mask.shape[-1], device=ends.device)
    seen = (keys < ends[:, None])[:, None, None]
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -torch.inf)
