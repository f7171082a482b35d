"""Argument checks of fused_multi_transformer, made on this rank before anything is launched."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from commlib.core.context import CommContext
from commlib.core.tensors import has_memory
from commlib.core.validation import check_tensor, overlaps_itself
from commlib.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from commlib.ops.inference.config import DecoderConfig
from commlib.ops.inference.kv_cache import KVCache, PagedCache
from commlib.ops.inference.rotary import Rotary, TokenRotary
from commlib.ops.inference.weights import LARGEST, LINEARS, DecoderLayer, QuantizedWeight, Shape

Tensor = torch.Tensor

NAME = "fused_multi_transformer"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NAMES = tuple(field.name for field in fields(DecoderLayer))
REQUIRED = ("attention_norm", "qkv", "out", "ffn_norm", "up", "down")


class Checks:
    """The checks of one call: ``ring`` is None if nothing is reduced."""

    def __init__(self, ring: CommContext | None, config: DecoderConfig, x: Tensor) -> None:
        self.ring, self.config, self.x = ring, config, x
        self.where = NAME if ring is None else ring._describe(NAME)
        self.size = 1 if ring is None else ring.size
        if not isinstance(config, DecoderConfig):
            raise ArgumentError(
                f"{self.where}: config is {type(config).__name__}; expected a DecoderConfig; pass "
                f"config=DecoderConfig(...)"
            )
        self._shard = f", the shard of one of {self.size} ranks; DecoderLayer.shard makes it"

    def split(self) -> None:
        """Raise if the layers can't be split over the ranks."""
        fault = self.config.fault(self.size)
        if fault is not None:
            raise ArgumentError(f"{self.where}: {fault}")

    def activations(self) -> None:
        """Raise for an ``x`` of another dtype or shape, or on another device."""
        x, hidden = self.x, self.config.hidden
        if self.ring is not None:
            check_tensor(self.ring, NAME, "x", x)
        elif not isinstance(x, Tensor):
            raise ArgumentError(f"{self.where}: x is {type(x).__name__}; expected a torch.Tensor")
        if x.dtype not in DTYPES:
            raise DtypeError(
                f"{self.where}: x is {x.dtype}; expected bfloat16, float16 or float32; pass "
                f"x.float()"
            )
        if x.dim() != 3 or x.shape[2] != hidden:
            raise ShapeError(
                f"{self.where}: x has shape {tuple(x.shape)}; expected [sequences, tokens, "
                f"{hidden}]; pass x.view(-1, 1, {hidden}) for one token per sequence"
            )

    def layers(self, layers: Sequence[DecoderLayer]) -> None:
        """Raise for a weight that is missing, or that has another shape, dtype or device."""
        if not isinstance(layers, Sequence):
            raise ArgumentError(
                f"{self.where}: layers is {type(layers).__name__}; expected a list of "
                f"DecoderLayer; pass list(layers)"
            )
        if not layers or not all(isinstance(layer, DecoderLayer) for layer in layers):
            kinds = sorted({type(layer).__name__ for layer in layers}) or "nothing"
            raise ArgumentError(
                f"{self.where}: layers contain {kinds}; expected one DecoderLayer per layer"
            )
        shapes = DecoderLayer.shapes(self.config, self.size)
        for number, layer in enumerate(layers):
            for name in NAMES:
                self._weight(f"layers[{number}].{name}", name, getattr(layer, name), shapes[name])

    def _weight(self, role: str, name: str, weight: Any, shape: Shape) -> None:
        if weight is None and name not in REQUIRED:
            return
        if name.endswith("norm_bias") and self.config.norm == "rms":
            raise ArgumentError(
                f"{self.where}: {role} with norm='rms', which adds none; pass norm='layer', or "
                f"leave it None"
            )
        if isinstance(weight, QuantizedWeight) and name in LINEARS:
            if weight.values.dtype not in LARGEST:
                raise DtypeError(
                    f"{self.where}: {role}.values are {weight.values.dtype}; expected int8 or "
                    f"float8_e4m3fn; call quantize(weight, torch.int8)"
                )
            self.tensor(f"{role}.values", weight.values, shape, weight.values.dtype, self._shard)
            self.tensor(f"{role}.scales", weight.scales, shape[:1], torch.float32, self._shard)
        else:
            self.tensor(role, weight, shape, None, self._shard)

    def norm(self, weight: Tensor | None, bias: Tensor | None) -> None:
        """Raise for a final norm that does not fit."""
        if weight is None and bias is None:
            return
        if not self.config.pre_norm:
            raise ArgumentError(
                f"{self.where}: final_norm with pre_norm=False, whose layers end with a norm; "
                f"leave it out"
            )
        if bias is not None and self.config.norm == "rms":
            raise ArgumentError(
                f"{self.where}: final_norm_bias with norm='rms', which adds none; pass norm='layer'"
            )
        for role, vector in (("final_norm", weight), ("final_norm_bias", bias)):
            if vector is not None or role == "final_norm":
                self.tensor(role, vector, (self.config.hidden,), None)

    def cache(self, cache: KVCache, layers: int) -> None:
        """Raise for a cache of other layers, heads or dtype, or with fewer sequences than ``x``."""
        config, (count, length) = self.config, self.x.shape[:2]
        if not all(isinstance(getattr(cache, role, None), tuple) for role in ("keys", "values")):
            raise ArgumentError(
                f"{self.where}: cache is {type(cache).__name__}; expected a ContiguousCache or a "
                f"PagedCache, with tuples of tensors; pass ContiguousCache.zeros(...)"
            )
        if len(cache.keys) != layers or len(cache.values) != layers:
            raise ShapeError(
                f"{self.where}: the cache has keys of {len(cache.keys)} and values of "
                f"{len(cache.values)} layers; expected {layers}; make it with layers={layers}"
            )
        heads = (config.local_kv_heads(self.size), config.head_dim)
        for role in ("keys", "values"):
            for number, memory in enumerate(getattr(cache, role)):
                why = f", that of one of {self.size} ranks; make the cache with ranks={self.size}"
                shape = (*cache.keys[0].shape[:2], *heads)
                self.tensor(f"cache.{role}[{number}]", memory, shape, None, why)
        self._distinct(cache)
        if isinstance(cache, PagedCache):
            self._table(cache.table)
        if count > cache.sequences:
            raise ShapeError(
                f"{self.where}: the cache is too small: x has {count} sequences; expected at most "
                f"{cache.sequences}; make the cache with sequences={count}"
            )
        if length > cache.capacity:
            raise ShapeError(
                f"{self.where}: the cache is too small: x has {length} tokens per sequence; "
                f"expected at most {cache.capacity}; make the cache with room for {length} tokens"
            )

    def _distinct(self, cache: KVCache) -> None:
        """Raise if two tensors of the cache, or two elements of one, are the same memory."""
        seen = dict[int, str]()
        for role in ("keys", "values"):
            for number, memory in enumerate(getattr(cache, role)):
                if not has_memory(memory) or not memory.numel():
                    continue
                name = f"cache.{role}[{number}]"
                other = seen.setdefault(memory.data_ptr(), name)
                if other != name or overlaps_itself(memory):
                    label = "itself, as an expanded tensor" if other == name else other
                    raise ArgumentError(
                        f"{self.where}: {name} shares memory with {label}; expected separate "
                        f"memory, because the call writes to it; pass ContiguousCache.zeros(...)"
                    )

    def _table(self, table: Any) -> None:
        dtype = getattr(table, "dtype", None)
        shape = tuple(table.shape) if isinstance(table, Tensor) and table.dim() == 2 else (1, 1)
        kind = dtype if dtype in (torch.int32, torch.int64) else torch.int64
        self.tensor("cache.table", table, shape, kind)

    def mask(self, mask: Tensor | None, begins: bool, capacity: int) -> None:
        """Raise for a mask that does not fit to the new tokens and to the keys."""
        if mask is None:
            return
        count, length = self.x.shape[:2]
        most = length if begins else capacity
        shape = tuple(mask.shape) if isinstance(mask, Tensor) else ()
        heads = self.config.local_heads(self.size)
        wanted = (count, heads, length, most)
        fits = len(shape) == 4 and all(
            size in (1, limit) for size, limit in zip(shape[:3], wanted, strict=False)
        )
        keys = fits and (shape[3] == most or (not begins and length <= shape[3] <= most))
        if isinstance(mask, Tensor) and not keys:
            raise ShapeError(
                f"{self.where}: attn_mask has shape {shape}; expected one that broadcasts to "
                f"{wanted}: [sequences, heads of this rank, tokens, keys]; with earlier tokens in "
                f"the cache, {length} to {most} keys"
            )
        is_tensor = isinstance(mask, Tensor)
        valid = is_tensor and (mask.dtype is torch.bool or mask.is_floating_point())
        self.tensor("attn_mask", mask, shape, mask.dtype if valid else torch.bool)

    def rotary(self, rotary: Rotary | TokenRotary | None, capacity: int) -> None:
        """Raise for tables that do not reach every position of the cache."""
        if rotary is None:
            return
        if isinstance(rotary, TokenRotary):
            parts = rotary.cos.shape[2] if rotary.cos.dim() == 4 else 1
            each = self.config.head_dim // max(1, 2 * parts)
            shape = (*self.x.shape[:2], parts, each)
            why = f", for 2 * {parts} * {each} of {self.config.head_dim} elements of a head"
            self.tensor("rotary.cos", rotary.cos, shape, torch.float32, why)
            self.tensor("rotary.sin", rotary.sin, shape, torch.float32, why)
            return
        if not isinstance(rotary, Rotary):
            raise ArgumentError(
                f"{self.where}: rotary is {type(rotary).__name__}; expected a Rotary; pass "
                f"rotary_tables(...)"
            )
        most = self.config.head_dim // 2
        for role in ("cos", "sin"):
            table = getattr(rotary, role)
            if table.dim() != 2 or table.shape[0] < capacity or not 0 < table.shape[1] <= most:
                raise ShapeError(
                    f"{self.where}: rotary.{role} has shape {tuple(table.shape)}; expected at "
                    f"least {capacity} rows, one per position of the cache, and 1 to {most} "
                    f"columns; call rotary_tables({2 * most}, {capacity})"
                )
            self.tensor(f"rotary.{role}", table, tuple(rotary.cos.shape), torch.float32)

    def tensor(
        self, role: str, tensor: Any, shape: Shape, dtype: torch.dtype | None, why: str = ""
    ) -> None:
        """Raise unless ``tensor`` has this shape, dtype (None: that of x) and the device of x.

        ``why`` explains the shape.
        """
        wanted = dtype or self.x.dtype
        if not isinstance(tensor, Tensor):
            raise ArgumentError(
                f"{self.where}: {role} is {type(tensor).__name__}; expected a torch.Tensor of "
                f"shape {shape}"
            )
        if tuple(tensor.shape) != shape:
            raise ShapeError(
                f"{self.where}: {role} has shape {tuple(tensor.shape)}; expected {shape}{why}"
            )
        if tensor.dtype is not wanted:
            raise DtypeError(
                f"{self.where}: {role} is {tensor.dtype}; expected {wanted}"
                f"{', the dtype of x' if dtype is None else ''}; pass "
                f"{role}.to({wanted})"
            )
        if tensor.device != self.x.device:
            raise DeviceError(
                f"{self.where}: {role} is on {tensor.device}, and x is on {self.x.device}; call "
                f"{role}.to('{self.x.device}')"
            )
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"{self.where} has no gradient, but {role} requires grad; use "
                f"`with torch.no_grad():`, or pass tensor.detach()"
            )

    def start(self, start: Any) -> None:
        """Raise unless ``start`` is an integer or one per sequence."""
        if isinstance(start, Tensor):
            if start.dtype not in (torch.int32, torch.int64):
                raise DtypeError(
                    f"{self.where}: start is {start.dtype}; expected int32 or int64; pass "
                    f"start.long()"
                )
            self.tensor("start", start, (self.x.shape[0],), start.dtype)
        elif isinstance(start, bool) or not isinstance(start, int):
            raise ArgumentError(
                f"{self.where}: start={start!r}; expected an integer, or a tensor with one per "
                f"sequence"
            )
