"""Triton kernels of one decode step's attention: rotary embedding, cache, scores and sums.

Only imported for tensors on a GPU. A program attends to a span of positions for the query heads of
one key head; a second kernel adds up the spans in order. Spans depend on the capacity of the cache
and on whether there are more than 16 sequences: the others do not change the bits of a sequence.
"""

# Triton ships no types, and its kernels are not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor

LEAST_ROWS = 16  # of a product on tensor cores
BLOCK = 64  # positions that a program looks at together
MOST_SPANS = 16  # of a sequence
FEW_SEQUENCES = 16  # of more, programs take fewer and longer spans
FEW_SPANS = 4
STAGES = 1  # of a block: reading ahead takes longer on an H100
WARPS = 4
LOG2_E = 1.4426950408889634


def attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    table: Tensor | None,
    rotary: tuple[Tensor, Tensor] | None,
    out: Tensor,
    capacity: int,
) -> None:
    """Put the new keys and values into the cache, and fill ``out`` with the attention.

    Args:
        qkv: [B, heads + 2 * key heads, D], dense.
        keys: [rows, tokens, key heads, D], dense: a row per sequence or page.
        values: The same.
        positions: [B], int64.
        table: [sequences, most pages], the rows of each sequence; None: row b is sequence b.
        rotary: Cosines and sines, [B, D / 2], float32.
        out: [B, heads, D].
        capacity: Most positions of a sequence.
    """
    (count, heads, width), kv_heads = out.shape, keys.shape[2]
    most = MOST_SPANS if count <= FEW_SEQUENCES else FEW_SPANS
    span = max(BLOCK, triton.next_power_of_2(triton.cdiv(capacity, most)))
    spans = triton.cdiv(capacity, span)
    partial = torch.empty((count, heads, spans, width), dtype=torch.float32, device=qkv.device)
    tops = torch.empty((count, heads, spans), dtype=torch.float32, device=qkv.device)
    sums, group = torch.empty_like(tops), heads // kv_heads
    tokens = keys, values, positions, table, 0 if table is None else table.stride(0), keys.shape[1]
    sizes = width**-0.5 * LOG2_E, heads, kv_heads, spans
    rows = max(LEAST_ROWS, triton.next_power_of_2(group))
    shape: dict[str, int] = {"GROUP": group, "ROWS": rows, "WIDTH": width, "SPAN": span}
    with torch.cuda.device_of(qkv):
        _attend[(count, kv_heads, spans)](
            qkv, *tokens, *(rotary or (None, None)), partial, tops, sums, *sizes, **shape,
            STEP=BLOCK, num_warps=WARPS, num_stages=STAGES,
        )  # fmt: skip
        _add_up[(count * heads,)](
            partial, tops, sums, positions, out, heads, spans,
            WIDTH=width, SPAN=span, SPANS=triton.next_power_of_2(spans), num_warps=1,
        )  # fmt: skip


@triton.jit
def _token(table, sequence, stride, length, position, given):
    """Return the number of the token in the cache that is at a position of a sequence."""
    if table is None:
        return sequence.to(tl.int64) * length + position
    else:  # noqa: RET505  # Triton compiles what follows a return, too
        row = tl.load(table + sequence * stride + position // length, mask=given, other=0)
        return row.to(tl.int64) * length + position % length


@triton.jit
def _turned(first, second, cos, sin):
    """Return the two halves of rotated heads, rounded once."""
    a, b = first.to(tl.float32), second.to(tl.float32)
    return (a * cos - b * sin).to(first.dtype), (b * cos + a * sin).to(first.dtype)


@triton.jit
def _new_token(
    qkv,
    cos,
    sin,
    sequence,
    head,
    heads,
    kv_heads,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Return a group of query heads and its new key, as two halves each, and its new value."""
    HALF: tl.constexpr = WIDTH // 2
    half, member = tl.arange(0, HALF), tl.arange(0, ROWS)
    base = qkv + sequence.to(tl.int64) * (heads + 2 * kv_heads) * WIDTH
    query = base + (head * GROUP + member)[:, None] * WIDTH + half[None, :]
    q1 = tl.load(query, mask=(member < GROUP)[:, None], other=0.0)
    q2 = tl.load(query + HALF, mask=(member < GROUP)[:, None], other=0.0)
    key = base + (heads + head) * WIDTH + half
    k1, k2 = tl.load(key), tl.load(key + HALF)
    value = tl.load(base + (heads + kv_heads + head) * WIDTH + tl.arange(0, WIDTH))
    if cos is not None:
        c, s = tl.load(cos + sequence * HALF + half), tl.load(sin + sequence * HALF + half)
        q1, q2 = _turned(q1, q2, c[None, :], s[None, :])
        k1, k2 = _turned(k1, k2, c, s)
    return q1, q2, k1, k2, value


@triton.jit
def _block(keys, values, place, earlier, is_new, k1, k2, value, WIDTH: tl.constexpr):
    """Return a block of keys, as two halves, and of values; the new token is not in the cache."""
    HALF: tl.constexpr = WIDTH // 2
    half, column = place[:, None] + tl.arange(0, HALF)[None, :], tl.arange(0, WIDTH)
    a = tl.load(keys + half, mask=earlier[:, None], other=0.0)
    b = tl.load(keys + HALF + half, mask=earlier[:, None], other=0.0)
    x = tl.load(values + place[:, None] + column[None, :], mask=earlier[:, None], other=0.0)
    a = tl.where(is_new[:, None], k1[None, :], a)
    b = tl.where(is_new[:, None], k2[None, :], b)
    return a, b, tl.where(is_new[:, None], value[None, :], x)


@triton.jit
def _attend(
    qkv,
    keys,
    values,
    positions,
    table,
    stride,
    length,
    cos,
    sin,
    found,
    tops,
    sums,
    scale,
    heads,
    kv_heads,
    spans,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    STEP: tl.constexpr,
):
    sequence, head, span = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position, begin = tl.load(positions + sequence), span * SPAN
    if begin <= position:
        column, member = tl.arange(0, WIDTH), tl.arange(0, ROWS)
        q1, q2, k1, k2, v = _new_token(
            qkv, cos, sin, sequence, head, heads, kv_heads, GROUP, ROWS, WIDTH
        )
        if position < begin + SPAN:
            token = _token(table, sequence, stride, length, position, begin <= position)
            half = (token * kv_heads + head) * WIDTH + tl.arange(0, WIDTH // 2)
            tl.store(keys + half, k1)
            tl.store(keys + half + WIDTH // 2, k2)
            tl.store(values + (token * kv_heads + head) * WIDTH + column, v)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total, y = tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)
        for start in range(begin, tl.minimum(begin + SPAN, position + 1), STEP):
            at = start + tl.arange(0, STEP)
            token = _token(table, sequence, stride, length, at, at <= position)
            offset = (token * kv_heads + head) * WIDTH
            a, b, x = _block(keys, values, offset, at < position, at == position, k1, k2, v, WIDTH)
            score = tl.dot(q2, b.T, tl.dot(q1, a.T)) * scale
            score = tl.where((at <= position)[None, :], score, float("-inf"))
            higher = tl.maximum(top, tl.max(score, 1))
            less, part = tl.exp2(top - higher), tl.exp2(score - higher[:, None])
            total, top = total * less + tl.sum(part, 1), higher
            y = tl.dot(part.to(x.dtype), x, y * less[:, None])
        row = (sequence.to(tl.int64) * heads + head * GROUP + member) * spans + span
        tl.store(tops + row, top, mask=member < GROUP)
        tl.store(sums + row, total, mask=member < GROUP)
        in_group = (member < GROUP)[:, None]
        tl.store(found + row[:, None] * WIDTH + column[None, :], y, mask=in_group)


@triton.jit
def _add_up(
    found,
    tops,
    sums,
    positions,
    out,
    heads,
    spans,
    WIDTH: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row // heads)
    span, column = tl.arange(0, SPANS), tl.arange(0, WIDTH)
    is_used = span <= position // SPAN
    top = tl.load(tops + row * spans + span, mask=is_used, other=float("-inf"))
    factor = tl.exp2(top - tl.max(top, 0))
    total = tl.sum(tl.load(sums + row * spans + span, mask=is_used, other=0.0) * factor, 0)
    at = (row * spans + span)[:, None] * WIDTH + column[None, :]
    y = tl.sum(tl.load(found + at, mask=is_used[:, None], other=0.0) * factor[:, None], 0)
    tl.store(out + row * WIDTH + column, (y / total).to(out.dtype.element_ty))
