"""The legacy fused_multi_transformer: Paddle's signature, masks, lengths, prefixes, rotation."""

import inspect
from typing import Any

import pytest
import torch

from commlib.compat import paddle
from commlib.errors import ArgumentError, CommError, DtypeError, RingError, ShapeError
from commlib.ops.inference import TokenRotary
from tests.support.checks import assert_bits_equal, assert_equal, raises
from tests.support.decoder import SEQUENCES
from tests.support.legacy_decoder import WIDTH, Layers, Legacy
from tests.support.runs_on import runs_on

# Of Paddle 2.6.2, in order.
ARGUMENTS = """
x ln_scales ln_biases qkv_weights qkv_biases linear_weights linear_biases ffn_ln_scales
ffn_ln_biases ffn1_weights ffn1_biases ffn2_weights ffn2_biases pre_layer_norm epsilon cache_kvs
pre_caches seq_lens rotary_embs time_step attn_mask dropout_rate rotary_emb_dims activation
training mode trans_qkvw ring_id name
"""


def test_signature() -> None:
    assert [*inspect.signature(Legacy).parameters] == ARGUMENTS.split()
    same = inspect.signature(paddle.fused_multi_head_attention)
    assert same == inspect.signature(paddle.fused_attention)


def near(y: torch.Tensor, other: torch.Tensor, what: str) -> None:
    assert_equal(bool(torch.allclose(y, other, atol=2e-5)), True, what)


def additive(seen: torch.Tensor) -> torch.Tensor:
    return (seen.float() - 1) * 1e4


@runs_on("ranks")
def test_padding(ring: Any) -> None:
    """Padding on either side changes nothing of the other tokens."""
    layers = Layers(ring)
    x, length = layers.x, layers.x.shape[1]
    device = ring.device
    lengths = torch.tensor([3, length, 1], device=device)
    alone = [layers(x[n : n + 1, :count]) for n, count in enumerate(lengths.tolist())]
    causal = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    keys = torch.arange(length, device=device) < lengths[:, None]
    for kind in (None, "bool", "int", "float"):
        mask = (causal & keys[:, None])[:, None]
        attn_mask = {
            None: None,
            "bool": mask,
            "int": mask.long(),
            "float": additive(mask),
        }[kind]
        y = layers(x, seq_lens=lengths, attn_mask=attn_mask)
        for n, count in enumerate(lengths.tolist()):
            near(y[n : n + 1, :count], alone[n], f"sequence {n}, mask {kind}")
            assert_equal(bool(y[n, count:].any()), False, "rows of padding")
    # On the left, known by the mask alone.
    moved = torch.zeros_like(x)
    seen = torch.zeros(SEQUENCES, 1, length, length, dtype=torch.bool, device=device)
    for n, count in enumerate(lengths.tolist()):
        moved[n, length - count :] = x[n, :count]
        seen[n, 0] = causal & (torch.arange(length, device=device) >= length - count)
    for mask in (seen, additive(seen), additive(seen).expand(-1, layers.heads, -1, -1)):
        y = layers(moved, attn_mask=mask)
        assert_equal(bool(y.isfinite().all()), True, "rows that see nothing")
        for n, count in enumerate(lengths.tolist()):
            near(y[n : n + 1, length - count :], alone[n], f"sequence {n}, on the left")


@runs_on("ranks")
def test_decoding(ring: Any) -> None:
    """Sequences of several lengths go on, each at its own position; masks hide tokens for good."""
    layers = Layers(ring)
    x, device = layers.x, ring.device
    lengths = torch.tensor([3, 5, 1], device=device)
    caches = layers.caches()
    layers(x[:, :5], seq_lens=lengths, cache_kvs=caches)
    new = torch.stack([x[n, count] for n, count in enumerate(lengths.tolist())])[:, None]
    later = [copy.clone() for copy in caches]
    y = layers(new, seq_lens=lengths, time_step=torch.tensor([5]), cache_kvs=caches)
    full = layers(x)
    for n, count in enumerate(lengths.tolist()):
        near(y[n, 0], full[n, count], f"sequence {n}")
    mask = torch.zeros(SEQUENCES, 1, 1, 6, device=device)
    masked = layers(
        new, seq_lens=lengths, time_step=torch.tensor([5]), cache_kvs=later, attn_mask=mask
    )
    near(masked, y, "a mask that hides nothing")
    # Left padding: the first token stays hidden in each step.
    caches = layers.caches()
    seen = torch.ones(7, 7, dtype=torch.bool, device=device).tril()
    seen[:, 0] = False
    mask = additive(seen)[None, None].expand(SEQUENCES, 1, 7, 7)
    y = layers(x, attn_mask=mask)
    layers(x[:, :6], attn_mask=mask[..., :6, :6], cache_kvs=caches)
    last = layers(x[:, 6:], attn_mask=mask[..., 6:, :], cache_kvs=caches, time_step=6)
    near(last, y[:, 6:], "a step after left padding")
    near(layers(x[:, 1:])[:, -1], y[:, -1], "the hidden token does not matter")


@runs_on("ranks")
def test_masks_of_zeros(ring: Any) -> None:
    """A mask of zeros hides nothing: a permutation of the tokens permutes the rows."""
    layers = Layers(ring)
    x, length = layers.x, layers.x.shape[1]
    mask = torch.zeros(1, 1, length, length, device=ring.device)
    y = layers(x, attn_mask=mask)
    near(layers(x.flip(1), attn_mask=mask), y.flip(1), "reversed tokens")
    assert_equal(bool(torch.allclose(y, layers(x), atol=1e-3)), False, "not causal")


@runs_on("ranks")
def test_prefixes(ring: Any) -> None:
    """A prefix from another call gives the rows of the whole sequence, and is in the cache."""
    layers = Layers(ring)
    x = layers.x
    full, first = layers.caches(), layers.caches()
    y = layers(x, cache_kvs=full)
    layers(x[:, :3], cache_kvs=first)
    prefixes = [cache[:, :, :, :3].clone() for cache in first]
    near(layers(x[:, 3:], pre_caches=prefixes), y[:, 3:], "without a cache")
    caches = layers.caches()
    near(layers(x[:, 3:], pre_caches=prefixes, cache_kvs=caches), y[:, 3:], "with a cache")
    for cache, wanted in zip(caches, full, strict=True):
        near(cache, wanted, "the cache")
    seen = torch.ones(4, 7, dtype=torch.bool, device=ring.device).tril(3)[None, None]
    lengths = torch.tensor([2, 4, 3], device=ring.device)
    masked = layers(x[:, 3:], pre_caches=prefixes, attn_mask=additive(seen), seq_lens=lengths)
    for n, count in enumerate(lengths.tolist()):
        near(masked[n, :count], y[n, 3 : 3 + count], f"with a mask and lengths, {n}")
    with raises(ShapeError, "pre_caches[0] has shape", "expected (2, 3, "):
        layers(x[:, 3:], pre_caches=[cache[:, :1] for cache in prefixes])
    with raises(ArgumentError, "pre_caches with time_step", "pass pre_caches=None"):
        layers(x[:, 6:], pre_caches=prefixes, cache_kvs=caches, time_step=6)


def angles(length: int, dims: int, device: Any) -> torch.Tensor:
    """Return [2, 1, 1, length, WIDTH] as Paddle's programs build it, other angles in each part."""
    each = WIDTH // (2 * dims)
    steps = torch.arange(1, length + 1, device=device)[:, None]
    parts = [
        steps / (10.0 ** torch.arange(each, device=device)) * (part + 1) for part in range(dims)
    ]
    theta = torch.cat([half for part in parts for half in (part, part)], -1)
    return torch.stack([theta.cos(), theta.sin()])[:, None, None]


@pytest.mark.parametrize("dims", [1, 2])
def test_formula(dims: int) -> None:
    """TokenRotary is x * cos + rotate_half(x) * sin in each part of a head."""
    x = torch.randn(2, 5, 3, WIDTH, generator=torch.Generator().manual_seed(1))
    embs = angles(5, dims, "cpu").expand(-1, 2, -1, -1, -1)
    cos, sin = (part.squeeze(1)[:, :, None] for part in embs)
    wanted = []
    for part in range(dims):
        span = slice(part * WIDTH // dims, (part + 1) * WIDTH // dims)
        first, second = x[..., span].chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        wanted.append(x[..., span] * cos[..., span] + turned * sin[..., span])
    halves = embs.squeeze(2).unflatten(-1, (dims, 2, -1)).select(-2, 0)
    assert_equal(
        bool(torch.allclose(TokenRotary(*halves).rotate(x), torch.cat(wanted, -1), atol=1e-6)),
        True,
        "rotated",
    )


@runs_on("ranks")
def test_rotation(ring: Any) -> None:
    """Tokens are rotated by their own angles, in a prefill and in later steps."""
    layers = Layers(ring)
    x, length = layers.x, layers.x.shape[1]
    plain = layers(x)
    for dims in (1, 2):
        embs = angles(length, dims, ring.device).expand(-1, SEQUENCES, -1, -1, -1)
        y = layers(x, rotary_embs=embs, rotary_emb_dims=dims)
        assert_equal(bool(torch.allclose(y, plain, atol=1e-3)), False, "the angles matter")
        none = torch.stack([torch.ones_like(embs[0]), torch.zeros_like(embs[0])])
        near(layers(x, rotary_embs=none, rotary_emb_dims=dims), plain, "no angles")
        caches = layers.caches()
        kwargs: Any = {"rotary_emb_dims": dims, "cache_kvs": caches}
        near(layers(x[:, :4], rotary_embs=embs[..., :4, :], **kwargs), y[:, :4], "prefill")
        for step in range(4, length):
            output = layers(
                x[:, step : step + 1],
                rotary_embs=embs[..., step : step + 1, :],
                time_step=torch.tensor([step]),
                **kwargs,
            )
            near(output, y[:, step : step + 1], f"step {step}")


def wrong_options(layers: Layers) -> list[tuple[type[CommError], dict[str, Any], str]]:
    """Return options that are refused, with the error and what its text must say."""
    embs = angles(layers.x.shape[1], 1, layers.x.device).expand(-1, SEQUENCES, -1, -1, -1)
    return [
        (ArgumentError, {"dropout_rate": 0.5, "training": True}, "dropout_rate=0.5 with training"),
        (ArgumentError, {"dropout_rate": 0.5, "mode": "downscale_in_infer"}, "mode='downscale_in"),
        (ArgumentError, {"dropout_rate": 2}, "dropout_rate=2; expected a number from 0 to 1"),
        (ArgumentError, {"mode": "x"}, "mode='x'; expected 'upscale_in_train' or"),
        (ArgumentError, {"rotary_embs": embs}, "rotary_emb_dims=0 with rotary_embs not None"),
        (ArgumentError, {"rotary_emb_dims": 1}, "rotary_emb_dims=1 with rotary_embs None"),
        (ArgumentError, {"rotary_embs": embs, "rotary_emb_dims": 3}, "rotary_emb_dims=3"),
        (
            ShapeError,
            {"rotary_embs": embs[..., :4], "rotary_emb_dims": 1},
            "rotary_embs is (2, 3, 1, 7, 4); expected (2, 3, 1, 7, 8)",
        ),
        (DtypeError, {"seq_lens": [1, 2, 3]}, "seq_lens is list; expected an integer tensor"),
        (ShapeError, {"seq_lens": torch.ones(2).long()}, "seq_lens has shape (2,); expected (3,)"),
        (ShapeError, {"attn_mask": [1]}, "attn_mask is list; expected a tensor [batch, heads or"),
        (ShapeError, {"attn_mask": torch.ones(1, 1, 7, 9)}, "attn_mask has shape (1, 1, 7, 9)"),
        (ShapeError, {"cache_kvs": [1, 2]}, "cache_kvs[0] is int; expected a tensor [2, batch"),
        (ArgumentError, {"cache_kvs": layers.caches()[:1]}, "cache_kvs of 1; expected a list of 2"),
        (
            ArgumentError,
            {"cache_kvs": layers.caches(), "time_step": "4"},
            "time_step='4'; expected an integer or a tensor of one",
        ),
    ]


@runs_on("ranks")
def test_bad_input(ring: Any) -> None:
    layers = Layers(ring)
    for error, kwargs, text in wrong_options(layers):
        with raises(error, "fused_multi_transformer on ring 0", text):
            layers(layers.x, **kwargs)
    assert_equal(tuple(layers(layers.x[:0]).shape), (0, *layers.x.shape[1:]), "an empty batch")
    assert_bits_equal(layers(layers.x, dropout_rate=0.5), layers(layers.x), "a rate in inference")


@runs_on("ranks")
def test_bad_weights(ring: Any) -> None:
    layers = Layers(ring)
    x, weights = layers.x, layers.weights
    with raises(ArgumentError, "weights of {", "expected the same number each, 1 or more"):
        Legacy(x, *[[] for _ in weights], ring_id=0)
    with raises(ArgumentError, "qkv_weights is NoneType; expected a list"):
        Legacy(x, *weights[:2], None, *weights[3:], ring_id=0)
    with raises(ArgumentError, "ffn1_weights[0] is int; expected a tensor"):
        Legacy(x, *weights[:8], [3, 4], *weights[9:], ring_id=0)
    with raises(ShapeError, "qkv_weights[0] has shape", "pass trans_qkvw=True"):
        layers(x, trans_qkvw=False)
    with raises(ShapeError, "x is list; expected a tensor [batch, tokens, width]"):
        layers([1.0])
    with raises(RingError, "ring_id=True"):
        Legacy(x, *weights, ring_id=True)
    assert_equal(tuple(layers(x).shape), tuple(x.shape), "afterwards")


@runs_on("ranks")
def test_bad_attention(ring: Any) -> None:
    attention: Any = paddle.fused_multi_head_attention
    block = torch.ones(3, 2, 4, 8, device=ring.device), torch.ones(8, 8, device=ring.device)
    row = torch.ones(1, 2, 8, device=ring.device)
    for kwargs, text in (
        ({"attn_mask": [1]}, "attn_mask is list; expected a torch.Tensor"),
        ({"cache_kv": [1]}, "cache_kv is list; expected a torch.Tensor"),
        ({"ln_epsilon": "x"}, "epsilon='x'; expected 0 to 0.001; pass 1e-5"),
        ({"transpose_qkv_wb": True, "num_heads": "4"}, "num_heads='4'"),
    ):
        with raises(ArgumentError, text):
            attention(row, *block, **kwargs)


@runs_on("ranks")
def test_norms_in_float32(ring: Any) -> None:
    """With 16-bit activations they may have the dtype that the legacy operator expects."""
    layers = Layers(ring)
    for dtype in (torch.float16, torch.bfloat16):
        layers.weights = [[each.to(dtype) for each in column] for column in layers.weights]
        y = layers(layers.x.to(dtype))
        for column in (0, 1, 6, 7):
            layers.weights[column] = [each.float() for each in layers.weights[column]]
        assert_bits_equal(layers(layers.x.to(dtype)), y, f"{dtype}")


@runs_on("ranks")
def test_memory_that_was_never_written(ring: Any) -> None:
    """It may be NaN: the call attends to the tokens so far."""
    layers = Layers(ring)
    x, results = layers.x, []
    for filling in (0.0, torch.nan):
        caches = [cache.fill_(filling) for cache in layers.caches()]
        prefixes = [cache[:, :, :, :2].fill_(0.5) for cache in layers.caches()]
        y = layers(x[:, :3], cache_kvs=caches, pre_caches=prefixes)
        mask = torch.zeros(SEQUENCES, 1, 1, 6, device=ring.device)
        step = layers(x[:, 3:4], cache_kvs=caches, time_step=5, attn_mask=mask)
        results.append((y, step))
    for one, other, phase in zip(*results, ("prefill", "decode"), strict=True):
        assert_bits_equal(other, one, phase)


@runs_on("ranks")
def test_a_prefix_of_a_refused_call(ring: Any) -> None:
    layers = Layers(ring)
    caches, prefixes = layers.caches(), [cache[:, :, :, :2] + 1 for cache in layers.caches()]
    with raises(DtypeError, "pre_caches[0] is torch.float64", "expected torch.float32"):
        layers(layers.x, cache_kvs=caches, pre_caches=[each.double() for each in prefixes])
    layers.weights[-1] = [each[:1] for each in layers.weights[-1]]
    with raises(ShapeError, "down_bias"):
        layers(layers.x[:, :3], cache_kvs=caches, pre_caches=prefixes)
    for cache in caches:
        assert_bits_equal(cache, torch.zeros_like(cache), "the cache afterwards")
