"""Inference of decoders: their shape, weights, caches and rotary tables, and one operator."""

from commlib.ops.inference.config import DecoderConfig
from commlib.ops.inference.kv_cache import ContiguousCache, KVCache, PagedCache
from commlib.ops.inference.llama import Llama, llama_config
from commlib.ops.inference.page_pool import PagePool
from commlib.ops.inference.rotary import Rotary, TokenRotary, rotary_tables
from commlib.ops.inference.weights import DecoderLayer, QuantizedWeight, quantize

__all__ = [
    "ContiguousCache",
    "DecoderConfig",
    "DecoderLayer",
    "KVCache",
    "Llama",
    "PagePool",
    "PagedCache",
    "QuantizedWeight",
    "Rotary",
    "TokenRotary",
    "llama_config",
    "quantize",
    "rotary_tables",
]


def __dir__() -> list[str]:
    """List the public names, without the modules that they are in."""
    return [*__all__]
