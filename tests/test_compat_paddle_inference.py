"""The legacy fused_multi_transformer: its layouts of weights and caches, its masks, its errors."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from commlib import compat
from commlib.errors import ArgumentError, RingError
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.decoder import CAPACITY, SEQUENCES, Case, cast
from tests.support.runs_on import runs_on


@pytest.mark.parametrize("ring_id", [0, -1])
@pytest.mark.parametrize("pre_norm", [True, False])
@runs_on("ranks")
def test_legacy(ring: Any, pre_norm: bool, ring_id: int) -> None:
    """The legacy operator with its layouts of weights and caches, with a ring and without."""
    case = Case(ring, "legacy")
    case.config = replace(case.config, pre_norm=pre_norm)
    size = ring.size if ring_id == 0 else 1
    heads, width, hidden = case.config.heads // size, case.config.head_dim, case.config.hidden
    layers: list[Any] = case.layers if ring_id == 0 else case.whole
    layers = [cast(layer, case.dtype, ring.device) for layer in layers]
    weights = {
        "ln_scales": [layer.attention_norm for layer in layers],
        "ln_biases": [layer.attention_norm_bias for layer in layers],
        "qkv_weights": [layer.qkv.view(3, heads, width, hidden) for layer in layers],
        "qkv_biases": [layer.qkv_bias.view(3, heads, width) for layer in layers],
        "linear_weights": [layer.out.t() for layer in layers],
        "linear_biases": [layer.out_bias for layer in layers],
        "ffn_ln_scales": [layer.ffn_norm for layer in layers],
        "ffn_ln_biases": [layer.ffn_norm_bias for layer in layers],
        "ffn1_weights": [layer.up.t() for layer in layers],
        "ffn1_biases": [layer.up_bias for layer in layers],
        "ffn2_weights": [layer.down.t() for layer in layers],
        "ffn2_biases": [layer.down_bias for layer in layers],
    }
    shape = (2, SEQUENCES, heads, CAPACITY, width)
    caches = [torch.zeros(shape, device=ring.device) for _ in layers]
    x, call = case.x.to(ring.device), compat.paddle.fused_multi_transformer
    kwargs: Any = {"pre_layer_norm": pre_norm, "ring_id": ring_id}
    mask = torch.ones(4, 4, device=ring.device).tril().sub(1).mul(1e4)[None, None]
    begun, same_caches = call(x[:, :4], **weights, **kwargs, cache_kvs=caches, attn_mask=mask)
    assert_equal(same_caches is caches, True, "cache_kvs are returned")
    later, _ = call(x[:, 4:], **weights, **kwargs, cache_kvs=caches, time_step=torch.tensor([4]))
    case.near(torch.cat([begun, later], 1), case.expected(), "legacy")
    transposed = [weight.permute(3, 0, 1, 2) for weight in weights["qkv_weights"]]
    others = weights | {"qkv_weights": transposed}
    assert_bits_equal(
        call(x[:, :4], **others, **kwargs, trans_qkvw=False), begun, "without a cache"
    )
    with raises(ArgumentError, "time_step without cache_kvs"):
        call(x[:, :4], **weights, **kwargs, time_step=3)
    with raises(ArgumentError, "'down': 1"):
        call(x[:, :4], **weights | {"ffn2_weights": weights["ffn2_weights"][:1]}, **kwargs)
    with raises(RingError, "ring_id=-2"):
        call(x[:, :4], **weights, **kwargs | {"ring_id": -2})
