"""compat.paddle.fused_attention and fused_feedforward: legacy arguments over the operators."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from commlib.compat import paddle
from commlib.errors import ArgumentError, RingError, ShapeError
from tests.support.attention_block import DIM, HEADS, TOKENS, WIDTH, Case, attention
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.operator import ABSENT_RING, calls
from tests.support.runs_on import runs_on
from tests.test_fused_feedforward import Case as Units
from tests.test_fused_feedforward import feedforward

ATTENTION = {
    "pre_layer_norm": False,
    "pre_ln_scale": None,
    "pre_ln_bias": None,
    "ln_scale": None,
    "ln_bias": None,
    "pre_ln_epsilon": 1e-5,
    "qkv_bias": None,
    "linear_bias": None,
    "cache_kv": None,
    "attn_mask": None,
    "dropout_rate": 0.5,
    "attn_dropout_rate": 0.5,
    "ln_epsilon": 1e-5,
    "training": True,
    "mode": "upscale_in_train",
    "ring_id": -1,
    "add_residual": True,
    "num_heads": -1,
    "transpose_qkv_wb": False,
    "name": None,
}
FEED_FORWARD = {
    "linear1_bias": None,
    "linear2_bias": None,
    "ln1_scale": None,
    "ln1_bias": None,
    "ln2_scale": None,
    "ln2_bias": None,
    "dropout1_rate": 0.5,
    "dropout2_rate": 0.5,
    "activation": "relu",
    "ln1_epsilon": 1e-5,
    "ln2_epsilon": 1e-5,
    "pre_layer_norm": False,
    "training": True,
    "mode": "upscale_in_train",
    "ring_id": -1,
    "add_residual": True,
    "name": None,
}


@pytest.mark.parametrize(
    ("legacy", "tensors", "defaults"),
    [
        (paddle.fused_attention, ["x", "qkv_weight", "linear_weight"], ATTENTION),
        (paddle.fused_feedforward, ["x", "linear1_weight", "linear2_weight"], FEED_FORWARD),
    ],
)
def test_signatures(legacy: Any, tensors: list[str], defaults: dict[str, Any]) -> None:
    parameters = inspect.signature(legacy).parameters
    assert [*parameters] == [*tensors, *defaults]
    assert {name: parameters[name].default for name in defaults} == defaults


def alike(legacy: Any, operator: Any, what: str, *, atol: float = 0) -> None:
    """Both draw the same numbers and give the same bits, or values within ``atol``."""
    results = []
    for call in (legacy, operator):
        torch.manual_seed(6)
        results.append(call())
    assert_bits_equal(results[0].detach(), results[1].detach(), what, atol=atol)


HALF = {"dropout_rate": 0.5, "attn_dropout_rate": 0.5}


@runs_on("ranks")
def test_attention(comm: Any) -> None:
    """Each argument reaches the operator: both norms, modes, biases, the ring."""
    w = Case(comm).tensors()
    x, raw = w["x"], (w["qkv_weight"], w["linear_weight"])
    scale, shift = w["ln_weight"], w["ln_bias"]
    biases = {name: w[name] for name in ("qkv_bias", "linear_bias")}
    norm = {"ln_weight": scale, "ln_bias": shift, "ln_eps": 1e-4}
    name = paddle.fused_attention
    alike(lambda: name(x, *raw, ring_id=0), lambda: attention(x, *raw, **HALF), "defaults")
    pre = (True, scale, shift, None, None, 1e-4, *biases.values(), None, None, 0.1, 0.2)
    for infers, mode in ((False, "upscale_in_train"), (True, "downscale_in_infer")):
        opts = {"training": not infers, "upscale_in_train": mode.startswith("up")} | biases
        rates = {"dropout_rate": 0.1, "attn_dropout_rate": 0.2}
        alike(
            lambda mode=mode, t=not infers: name(x, *raw, *pre, 1e-5, t, mode, 0, False),
            lambda opts=opts, r=rates: attention(
                x, *raw, pre_layer_norm=True, add_residual=False, **norm, **opts, **r
            ),
            f"before, {mode}",
        )


@runs_on("ranks")
def test_attention_with_masks(comm: Any) -> None:
    w = Case(comm).tensors()
    x, raw = w["x"], (w["qkv_weight"], w["linear_weight"])
    scale, shift = w["ln_weight"], w["ln_bias"]
    norm = {"ln_weight": scale, "ln_bias": shift, "ln_eps": 1e-4}
    legacy = {"ln_scale": scale, "ln_bias": shift, "ln_epsilon": 1e-4, "ring_id": 0}
    allowed = torch.ones(TOKENS, TOKENS, dtype=torch.int64, device=x.device).tril()
    for mask in (allowed, allowed.bool(), (1.0 - allowed.double()) * -1e30):
        alike(
            lambda mask=mask: paddle.fused_attention(x, *raw, attn_mask=mask, **legacy),
            lambda: attention(x, *raw, is_causal=True, **norm, **HALF),
            f"after, {mask.dtype}",
        )


@runs_on("ranks")
def test_attention_with_a_transposed_weight(comm: Any) -> None:
    w = Case(comm).tensors()
    x, weight, linear, bias = w["x"], w["qkv_weight"], w["linear_weight"], w["qkv_bias"]
    turned = {"qkv_bias": bias.flatten(), "num_heads": HEADS // comm.size, "ring_id": 0}
    turned["transpose_qkv_wb"] = True
    flat = weight.flatten(0, 2).t().contiguous()
    alike(
        lambda: paddle.fused_attention(x, flat, linear, **turned),
        lambda: attention(x, weight, linear, qkv_bias=bias, **HALF),
        "transposed",
        atol=1e-12,  # a product with the transposed weight adds in another order on GPUs
    )


@runs_on("ranks")
def test_one_rank(comm: Any) -> None:
    """Without a ring nothing is reduced; a cache comes back longer."""
    w = {name: t.detach() for name, t in Case(comm).tensors(0, 1).items()}
    x, raw = w["x"], (w["qkv_weight"], w["linear_weight"])
    before = calls(comm)
    alike(
        lambda: paddle.fused_attention(x, *raw),
        lambda: attention(x, *raw, -1, dropout_rate=0.5, attn_dropout_rate=0.5),
        "one rank",
    )
    opts: dict[str, Any] = {"dropout_rate": 0.0, "attn_dropout_rate": 0.0}
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril()
    cached: Any = paddle.fused_attention
    full = cached(x, *raw, attn_mask=mask, **opts)
    cache = x.new_zeros(2, len(x), HEADS, 0, DIM)
    for token in range(TOKENS):
        part, cache = cached(x[:, token : token + 1], *raw, cache_kv=cache, training=False, **opts)
        assert_equal(cache.shape, (2, len(x), HEADS, token + 1, DIM), "cache")
        assert_bits_equal(part, full[:, token : token + 1], f"token {token}", atol=1e-12)
    assert_equal(calls(comm), before, "collectives")


@runs_on("ranks")
def test_feed_forward(comm: Any) -> None:
    """Each argument reaches the operator."""
    w = Units(comm).tensors()
    x, raw = w["x"], (w["linear1_weight"], w["linear2_weight"])
    scale, shift, *biases = (w[n] for n in ("ln_weight", "ln_bias", "linear1_bias", "linear2_bias"))
    norm = {"ln_weight": scale, "ln_bias": shift, "ln_eps": 1e-4}
    named = dict(zip(("linear1_bias", "linear2_bias"), biases, strict=True))
    half = {"dropout1_rate": 0.5, "dropout2_rate": 0.5}
    name = paddle.fused_feedforward
    alike(lambda: name(x, *raw, ring_id=0), lambda: feedforward(x, *raw, **half), "defaults")
    pre = (*biases, scale, shift, None, None, 0.1, 0.2, "gelu", 1e-4, 1e-5, True)
    rates = {"dropout1_rate": 0.1, "dropout2_rate": 0.2, "activation": "gelu"}
    alike(
        lambda: name(x, *raw, *pre, False, "downscale_in_infer", 0, False),
        lambda: feedforward(
            x, *raw, pre_layer_norm=True, training=False, upscale_in_train=False,
            add_residual=False, **norm, **named, **rates,
        ),
        "before",
    )  # fmt: skip
    alike(
        lambda: name(x, *raw, ln2_scale=scale, ln2_bias=shift, ln2_epsilon=1e-4, ring_id=0),
        lambda: feedforward(x, *raw, **norm, **half),
        "after",
    )


@contextlib.contextmanager
def wrong_calls(comm: Any) -> Iterator[tuple[Callable[..., None], Callable[..., None]]]:
    """Give both blocks as functions of changed arguments; the calls are refused before a launch."""
    w = {name: t.detach() for name, t in Case(comm).tensors().items()}
    units = {name: t.detach() for name, t in Units(comm).tensors().items()}
    first = {"x": w["x"], "qkv_weight": w["qkv_weight"], "linear_weight": w["linear_weight"]}
    second = {name: units[name] for name in ("x", "linear1_weight", "linear2_weight")}

    def attend(**how: Any) -> None:
        paddle.fused_attention(**(first | {"ring_id": 0} | how))

    def feed(**how: Any) -> None:
        paddle.fused_feedforward(**(second | {"ring_id": 0} | how))

    before = calls(comm)
    yield attend, feed
    assert_equal(calls(comm), before, "collectives of wrong calls")


@runs_on("ranks")
def test_refusals(comm: Any) -> None:
    """The legacy errors of both, before any launch."""
    x = Case(comm).tensors()["x"].detach()
    with wrong_calls(comm) as (attend, feed):
        for call, epsilons in (
            (attend, ("pre_ln_epsilon", "ln_epsilon")),
            (feed, ("ln1_epsilon", "ln2_epsilon")),
        ):
            with raises(ArgumentError, "mode='none'", "'upscale_in_train' or 'downscale_in_infer'"):
                call(mode="none")
            with raises(RingError, ABSENT_RING):
                call(ring_id=ABSENT_RING)
            with raises(RingError, "ring_id=-2"):
                call(ring_id=-2)
            with raises(ArgumentError, "add_residual=False", "pre_layer_norm=True"):
                call(add_residual=False)
            words = "epsilon=0.01; expected 0 to 0.001", f"rank {comm.rank}"
            for name in epsilons:
                with raises(ArgumentError, *words):
                    call(**{name: 0.01})
            with raises(ShapeError, "x has shape"):
                call(x=x[0])


@runs_on("ranks")
def test_refused_attention(comm: Any) -> None:
    w = {name: t.detach() for name, t in Case(comm).tensors().items()}
    with wrong_calls(comm) as (attend, _):
        with raises(ShapeError, f"heads * head_dim to be the width {WIDTH}", "ring_id=-1"):
            attend(ring_id=-1)
        with raises(ArgumentError, "num_heads=-1", "transpose_qkv_wb=True"):
            attend(transpose_qkv_wb=True)
        with raises(ShapeError, "expected [width, 3 * heads * head_dim]"):
            attend(transpose_qkv_wb=True, num_heads=2)
        flat = w["qkv_weight"].flatten(0, 2).t()
        with raises(ShapeError, "qkv_bias is (1,)", f"({flat.shape[1]},)"):
            heads = HEADS // comm.size
            bias = flat.new_zeros(1)
            attend(qkv_weight=flat, qkv_bias=bias, num_heads=heads, transpose_qkv_wb=True)
        with raises(ShapeError, "cache_kv has shape"):
            attend(cache_kv=w["x"])
