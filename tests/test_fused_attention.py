"""ops.fused_attention: a tensor-parallel attention block, against NumPy."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

import commlib
from commlib.errors import ArgumentError, DtypeError, RingError, ShapeError
from tests.support.attention_block import BATCH, DIM, HEADS, NEAR, TOKENS, WIDTH, Case, attention
from tests.support.checks import Array, assert_bits_equal, assert_equal, raises
from tests.support.operator import ABSENT_RING, calls
from tests.support.ranks import Ranks
from tests.support.runs_on import runs_on

CAUSAL = np.where(np.tri(TOKENS, dtype=bool), 0.0, -np.inf)
FEW = ("qkv_weight", "linear_weight")


def values(comm: Any) -> None:
    """Both places of the norm, every dtype; one all_reduce forward and one backward."""
    for dtype in NEAR:
        for before in (False, True):
            case = Case(comm, dtype)
            inputs = case.tensors()
            start = calls(comm)
            y = attention(**inputs, pre_layer_norm=before, num_heads=case.heads)
            assert_equal(calls(comm) - start, 1, "collectives of the forward")
            y.backward(case.on_device(case.grad))
            assert_equal(calls(comm) - start, 2, "collectives with the backward")
            grads = {name: case.gradient(name, t) for name, t in inputs.items()}
            case.check(y.detach(), grads, f"{dtype}, before={before}", before=before)


def test_values(ranks: Ranks) -> None:
    ranks(values)


def test_values_of_more_ranks(many_ranks: Ranks) -> None:
    many_ranks(values)


@runs_on("ranks")
def test_options(comm: Any) -> None:
    """Biases and the norm's parameters are optional, and so is the residual."""
    for before, names in ((True, FEW), (False, (*FEW, "ln_weight")), (True, (*FEW, "qkv_bias"))):
        case = Case(comm, names=names)
        case.check(*case.run(case.tensors(), pre_layer_norm=before), f"{names}", before=before)
        results = case.run(case.tensors(), pre_layer_norm=before, add_residual=False)
        case.check(*results, f"{names}, no residual", before=before, add_residual=False)


@runs_on("ranks")
def test_masks(comm: Any) -> None:
    """Masks of either kind, and causal, alone and together."""
    random = np.random.default_rng(5)
    bools = random.integers(0, 2, (BATCH, 1, TOKENS, TOKENS)).astype(bool) | np.eye(
        TOKENS, dtype=bool
    )
    numbers = random.standard_normal((1, 1, TOKENS, TOKENS))
    case = Case(comm)
    as_bool, as_float = torch.from_numpy(bools).to(comm.device), case.on_device(numbers)
    from_bools = np.where(bools, 0.0, -np.inf)
    cases = {
        "causal": ({"is_causal": True}, CAUSAL),
        "bool": ({"attn_mask": as_bool}, from_bools),
        "float": ({"attn_mask": as_float}, numbers),
        "2-D": ({"attn_mask": as_bool[0, 0]}, from_bools[0, 0]),
        "bool, causal": ({"attn_mask": as_bool, "is_causal": True}, from_bools + CAUSAL),
        "float, causal": ({"attn_mask": as_float, "is_causal": True}, numbers + CAUSAL),
    }
    for label, (kwargs, allowed) in cases.items():
        case.check(*case.run(case.tensors(), **kwargs), label, before=False, allowed=allowed)
        explicit = case.run(case.tensors(), **kwargs, attn_dropout_rate=1e-12)  # no kernel of torch
        case.check(*explicit, f"{label}, explicit", before=False, allowed=allowed)


def sizes_agree(comm: Any) -> None:
    """One rank without a ring, one rank with a ring, and all ranks, with and without dropout."""
    case = Case(comm)
    alone = commlib.new_ring(50 + comm.rank, [comm.ranks[comm.rank]])
    assert alone is not None
    for kwargs in ({}, {"dropout_rate": 0.3, "attn_dropout_rate": 0.4}):
        results = []
        for ring, size in ((-1, 1), (alone, 1), (0, comm.size)):
            torch.manual_seed(7)
            before = calls(comm)
            rank = comm.rank if size > 1 else 0
            y, grads = case.run(case.tensors(rank, size), ring_id=ring, **kwargs)
            assert_equal(calls(comm) - before, 2 if size > 1 else 0, "collectives")
            results.append((y, grads))
        for y, grads in results[1:]:
            assert_bits_equal(y, results[0][0], f"{kwargs}: result", atol=1e-10)
            assert_bits_equal(grads["x"], results[0][1]["x"], f"{kwargs}: gradient", atol=1e-9)
        if not kwargs:
            case.check(*results[0], "one rank", size=1, before=False)
    alone.close()


def test_sizes_agree(ranks: Ranks) -> None:
    ranks(sizes_agree)


def test_more_sizes_agree(many_ranks: Ranks) -> None:
    many_ranks(sizes_agree)


def seen_masks(comm: Any, rate: float, tokens: int, **how: Any) -> tuple[Array, ...]:
    """Return the factors that dropout puts on the output, and on this rank's probabilities.

    The weights make both visible: queries and keys are 0, values are one-hot tokens, and the
    projection puts each head's probabilities side by side.
    """
    heads, size = 2 * comm.size, comm.size
    width = heads * tokens
    x = torch.eye(tokens, width, dtype=torch.float64)[None].to(comm.device)
    qkv_weight = x.new_zeros(3, 2, tokens, width)
    qkv_weight[2] = torch.eye(tokens, width, dtype=x.dtype)
    rows = slice(comm.rank * 2 * tokens, (comm.rank + 1) * 2 * tokens)
    linear_weight = torch.eye(width, dtype=x.dtype).to(comm.device)[rows]
    norm: dict[str, Any] = {"pre_layer_norm": True, "ln_eps": 0.0, "add_residual": False}
    raw = [qkv_weight, linear_weight]
    # The norm of one-hot rows is affine in them: two values, which the weights take back.
    row = torch.nn.functional.layer_norm(x[0, 0], (width,), eps=0.0)
    norm["ln_weight"] = torch.full((width,), float(1 / (row[0] - row[1])), dtype=x.dtype).to(
        x.device
    )
    norm["ln_bias"] = -row[1] * norm["ln_weight"]
    plain = attention(x, *raw, **norm)
    assert_bits_equal(plain, torch.full_like(plain, 1 / tokens), "without dropout", atol=1e-12)
    output = attention(x, *raw, **norm, dropout_rate=rate, **how) * tokens
    probabilities = attention(x, *raw, **norm, attn_dropout_rate=rate, **how) * tokens
    mine = probabilities.view(tokens, size, 2, tokens)[:, comm.rank]
    assert_equal(probabilities.shape, (1, tokens, width), "shape")
    masks = (output, mine.permute(1, 0, 2))
    return tuple(np.round(mask.cpu().numpy(), 9) for mask in masks)


@runs_on("ranks")
def test_dropout_masks(comm: Any) -> None:
    """Equal masks after the reduction, other masks on other ranks inside, the right statistics."""
    tokens, rate = 16, 0.25
    torch.manual_seed(3)
    output, mine = seen_masks(comm, rate, tokens)
    state = torch.random.get_rng_state() if comm.device.type == "cpu" else None
    torch.manual_seed(3)
    again = seen_masks(comm, rate, tokens)
    repeated = [np.array_equal(*pair) for pair in zip((output, mine), again, strict=True)]
    assert_equal(repeated, [True, True], "the same masks with the same seed")
    for label, mask in (("output", output), ("probabilities", mine)):
        values_of = sorted(set(mask.ravel()))
        assert_equal(values_of, [0.0, round(1 / (1 - rate), 9)], f"{label}: factors")
        share, spread = (mask == 0).mean(), np.sqrt(rate * (1 - rate) / mask.size)
        assert_equal(abs(share - rate) < 5 * spread, True, f"{label}: share {share} of {mask.size}")
    packed = [int.from_bytes(np.packbits(m != 0).tobytes()[:7]) for m in (output, mine)]
    rows = comm.exchange(packed)
    assert_equal(len({row[0] for row in rows}), 1, "masks of the output over the ranks")
    assert_equal(
        len({row[1] for row in rows}), comm.size, "masks of the probabilities over the ranks"
    )
    assert_equal(np.array_equal(mine[0], mine[1]), False, "masks of two heads")
    if state is not None:
        digest = comm.exchange([int(state.sum())])
        assert_equal(len({row[0] for row in digest}), 1, "generators afterwards")


@runs_on("ranks")
def test_generators_compared(comm: Any) -> None:
    """FLAGS_comm_check=2 finds generators that differ, on every rank, before any launch."""
    case, kwargs = Case(comm), {"dropout_rate": 0.5}
    with commlib.flags.override("FLAGS_comm_check", 2):
        ring = commlib.new_ring(61, range(comm.size))
    assert ring is not None
    torch.manual_seed(comm.rank)
    before = calls(ring)
    with raises(ArgumentError, "state of the default generator", "ranks [0]", "ranks [1]"):
        case.run(case.tensors(), ring_id=ring, **kwargs)
    assert_equal(calls(ring), before, "collectives")
    case.run(case.tensors(), ring_id=ring, **kwargs, training=False)
    torch.manual_seed(0)
    case.run(case.tensors(), ring_id=ring, **kwargs)
    ring.close()


@runs_on("ranks")
def test_dropout_conventions(comm: Any) -> None:
    """The other convention: unscaled in training, scaled in inference; rates 0 and 1."""
    kwargs = {"upscale_in_train": False}
    torch.manual_seed(3)
    for mask in seen_masks(comm, 0.25, 8, **kwargs):
        assert_equal(sorted(set(mask.ravel())), [0.0, 1.0], "training")
    for mask in seen_masks(comm, 0.25, 8, training=False, **kwargs):
        assert_equal(sorted(set(mask.ravel())), [0.75], "inference")
    for mask in seen_masks(comm, 0.25, 8, training=False):
        assert_equal(sorted(set(mask.ravel())), [1.0], "inference, scaled in training")
    for mask in seen_masks(comm, 1.0, 8):
        assert_equal(sorted(set(mask.ravel())), [0.0], "everything dropped")


@runs_on("ranks")
def test_dropout_gradients(comm: Any) -> None:
    """Gradients see the masks of the forward: those that the same seed gives."""
    case, rate = Case(comm), 0.3
    kwargs = {"dropout_rate": rate, "attn_dropout_rate": rate}
    torch.manual_seed(11)
    mask = torch.empty(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.bool, device=comm.device)
    keep_attn = mask.bernoulli_(1 - rate).cpu().numpy() / (1 - rate)
    ones = torch.ones(BATCH, TOKENS, WIDTH, dtype=torch.float64, device=comm.device)
    keep = torch.nn.functional.dropout(ones, rate).cpu().numpy()
    for before in (False, True):
        torch.manual_seed(11)
        results = case.run(case.tensors(), pre_layer_norm=before, **kwargs)
        case.check(*results, f"before={before}", before=before, keep=keep, keep_attn=keep_attn)


@contextlib.contextmanager
def wrong_calls(comm: Any) -> Iterator[tuple[dict[str, Tensor], Callable[..., None]]]:
    """Give right arguments, and a function that calls with changed ones; nothing is launched."""
    plain = {name: t.detach() for name, t in Case(comm).tensors().items()}
    before = calls(comm)
    yield plain, lambda **changes: attention(**(plain | changes))
    assert_equal(calls(comm), before, "collectives of wrong calls")


@runs_on("ranks")
def test_refused_rings_and_heads(comm: Any) -> None:
    """Wrong arguments are errors before any launch, which say what to pass instead."""
    heads = HEADS // comm.size
    with wrong_calls(comm) as (plain, call):
        with raises(RingError, ABSENT_RING):
            call(ring_id=ABSENT_RING)
        text = f"num_heads={HEADS + 1}"
        with raises(ShapeError, f"rank {comm.rank}", text, f"the ring's size {comm.size}"):
            call(num_heads=HEADS + 1)
        with raises(ShapeError, f"qkv_weight has {heads} heads; expected {2 * heads}", "num_heads"):
            call(num_heads=2 * HEADS)
        with raises(ArgumentError, "inside `with ring.group():`"), comm.group():
            call()
        with raises(ShapeError, "on one rank (ring_id=-1)", "linear_bias"):
            call(ring_id=-1, linear_bias=plain["x"].new_zeros(1))


@runs_on("ranks")
def test_refused_tensors(comm: Any) -> None:
    rank, heads = f"rank {comm.rank}", HEADS // comm.size
    with wrong_calls(comm) as (plain, call):
        x = plain["x"]
        shapes = {
            "qkv_weight": (plain["qkv_weight"][..., :-1], f"(3, {heads}, {DIM}, {WIDTH})"),
            "qkv_bias": (plain["qkv_bias"][:, :-1], f"(3, {heads}, {DIM})"),
            "linear_weight": (x.new_zeros(WIDTH, WIDTH), f"({heads * DIM}, {WIDTH})"),
            "linear_bias": (x.new_zeros(1), f"({WIDTH},)"),
            "ln_weight": (x.new_zeros(WIDTH, 1), f"({WIDTH},)"),
            "ln_bias": (x.new_zeros(0), f"({WIDTH},)"),
        }
        for name, (wrong, expected) in shapes.items():
            text = f"{name} has shape {tuple(wrong.shape)}; expected {expected}"
            with raises(ShapeError, rank, "ring 0", text):
                call(**{name: wrong})
            with raises(DtypeError, rank, f"{name} is torch.float16", f"pass {name}.to("):
                call(**{name: plain[name].half()})
            with raises(ArgumentError, f"{name} is list; expected a torch.Tensor"):
                call(**{name: [1.0]})
        with raises(ShapeError, "x has shape", "[batch, tokens, width]"):
            call(x=x[0])
        with raises(DtypeError, "x is torch.int64", "pass x.float()"):
            call(x=x.long())
        with raises(ShapeError, "qkv_weight has shape", "[3, heads, head_dim, width]"):
            call(qkv_weight=plain["qkv_weight"].flatten(0, 1))


@runs_on("ranks")
def test_refused_caches(comm: Any) -> None:
    heads = HEADS // comm.size
    with wrong_calls(comm) as (plain, call):
        x = plain["x"]
        cache = x.new_zeros(2, BATCH, heads, TOKENS, DIM)
        with raises(ShapeError, f"cache_kv has {TOKENS} positions; expected {TOKENS + 1} or more"):
            call(cache_kv=cache, position=1)
        for position in (-1, 1.5, True):
            with raises(ArgumentError, f"position={position!r}", "pass position=0"):
                call(cache_kv=cache, position=position)
        with raises(ArgumentError, f"position={TOKENS + 1}; expected 0 to {TOKENS}"):
            call(cache_kv=cache, position=TOKENS + 1)
        with raises(ArgumentError, "position=1 without a cache", "pass cache_kv="):
            call(position=1)
        with raises(ShapeError, "cache_kv has shape", f"(2, {BATCH}, {heads}, {TOKENS}, {DIM})"):
            call(cache_kv=cache[:, :1])
        with raises(DtypeError, "cache_kv is torch.float16"):
            call(cache_kv=cache.half())
        with raises(ArgumentError, "cache_kv with tensors that require grad", "torch.no_grad()"):
            call(cache_kv=cache, x=x.clone().requires_grad_())


@runs_on("ranks")
def test_refused_masks_and_rates(comm: Any) -> None:
    with wrong_calls(comm) as (plain, call):
        x = plain["x"]
        with raises(ShapeError, "attn_mask has shape (2, 2)", "heads of this rank"):
            call(attn_mask=x.new_zeros(2, 2))
        with raises(DtypeError, "attn_mask is torch.int64", "pass attn_mask.bool()"):
            call(attn_mask=torch.ones(TOKENS, TOKENS, dtype=torch.int64, device=comm.device))
        with raises(ArgumentError, "attn_mask requires grad", "attn_mask.detach()"):
            call(attn_mask=x.new_zeros(TOKENS, TOKENS).requires_grad_())
        for name in ("dropout_rate", "attn_dropout_rate", "ln_eps"):
            for number in (-0.1, "0.5", True, float("nan"), float("inf")):
                with raises(ArgumentError, f"{name}={number!r}; expected a number from 0"):
                    call(**{name: number})
        with raises(ArgumentError, "dropout_rate=1.5; expected a number from 0 to 1"):
            call(dropout_rate=1.5)


@runs_on("ranks")
def test_error_on_one_rank(comm: Any) -> None:
    """An error on one rank leaves the ring usable: it has launched nothing there."""
    case = Case(comm)
    if comm.rank == 0:
        with raises(ShapeError, "linear_bias", "rank 0"):
            attention(**(case.tensors() | {"linear_bias": case.on_device(np.zeros(1))}))
    case.check(*case.run(case.tensors()), "afterwards", before=False)
