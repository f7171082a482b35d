"""The kernels of class_center_sample in Triton: facts of the labels, marked classes, the sample.

Only imported for tensors on a GPU. Whole numbers alone: the same results as torch operators.
"""

# Triton ships no types, and its kernels are not Python.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False

import torch
import triton
import triton.language as tl

from commlib.ops.classification.permutation_kernels import HALF, STEP, mixed, permuted

Tensor = torch.Tensor

FACTS_BLOCK, MARK_BLOCK, WORDS_BLOCK = 4096, 256, 1024
SAMPLE_BLOCK, LABELS_TILE, TOTALS_BLOCK = 256, 4096, 1024
BITS = tl.constexpr(32)  # of a word: one for each class
LARGEST = tl.constexpr(2**63 - 1)
VARIES = ["count", "classes", "words", "size", "rank", "samples", "length", "steps"]
VARIES += ["sample_programs"]


def _over(count: int, block: int) -> int:
    """Return how many blocks hold ``count``; Triton's own function takes microseconds."""
    return -(-count // block)


def facts(label: Tensor) -> Tensor:
    """Return digest, least and greatest of ``label`` [N], int64 [3], N above 0."""
    result = label.new_empty(3, dtype=torch.int64)
    _facts[(1,)](label, result, label.numel(), BLOCK=FACTS_BLOCK, num_warps=16)
    return result


def marked(label: Tensor, classes: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return one bit per class, the number of set bits before each word, and the set classes.

    int32 [words], int32 [words], and of the dtype of ``label`` [N], ascending; as many of them are
    written as there are bits set.
    """
    words = classes // BITS.value + 1  # a bit after the last class, to count all before it
    blocks = _over(words, WORDS_BLOCK)
    count = label.numel()
    marks = torch.zeros(words + blocks, dtype=torch.int32, device=label.device)
    before, class_ids = torch.empty_like(marks[:words]), torch.empty_like(label)
    _mark[(_over(count, MARK_BLOCK),)](
        label, marks, marks[words:], count, classes, BLOCK=MARK_BLOCK, WORDS=WORDS_BLOCK
    )
    _count[(blocks,)](
        marks, marks[words:], before, class_ids, words, BLOCK=WORDS_BLOCK, TOTALS=TOTALS_BLOCK
    )
    return marks, before, class_ids


def sample(
    label: Tensor,
    marks: Tensor,
    before: Tensor,
    known: Tensor,
    bounds: Tensor,
    seed: Tensor,
    rank: int,
    samples: int,
    length: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the remapped labels, ``length`` sampled classes padded with -1, and their number.

    ``marks``, ``before``, ``known``: of ``marked``; ``bounds`` [size + 1]: first class of each
    rank, and the number of all classes; ``seed`` [1], to which ``rank`` is added.
    """
    remapped, sampled = torch.empty_like(label), label.new_empty(length)
    count, size = bounds.new_empty(1), bounds.numel() - 1
    lanes = 1 << max(size - 1, 1).bit_length()
    labels_block = max(1, min(256, LABELS_TILE // lanes))
    sample_programs = _over(length, SAMPLE_BLOCK)
    _sample[(sample_programs + _over(label.numel(), labels_block),)](
        label,
        marks,
        before,
        known,
        bounds,
        seed,
        remapped,
        sampled,
        count,
        label.numel(),
        size,
        rank,
        samples,
        length,
        label.numel().bit_length(),
        sample_programs,
        LANES=lanes,
        SAMPLE_BLOCK=SAMPLE_BLOCK,
        LABELS_BLOCK=labels_block,
    )
    return remapped, sampled, count


@triton.jit
def _ones(word):
    """Count the set bits in words of 32 bits."""
    x = word.to(tl.uint32)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _below(marks, before, value, mask):
    """Count the marked classes below ``value``."""
    word = tl.load(marks + value // BITS, mask=mask, other=0).to(tl.uint32)
    bit = (value % BITS).to(tl.uint32)
    lower = word & ((bit * 0 + 1 << bit) - 1)
    return tl.load(before + value // BITS, mask=mask, other=0).to(tl.int64) + _ones(lower)


@triton.jit(do_not_specialize=VARIES)
def _facts(label, found, count, BLOCK: tl.constexpr):
    digest = tl.full((BLOCK,), 0, tl.int64)
    least = tl.full((BLOCK,), LARGEST, tl.int64)
    greatest = tl.full((BLOCK,), -LARGEST - 1, tl.int64)
    for begin in range(0, count, BLOCK):
        index = tl.cast(begin, tl.int64) + tl.arange(0, BLOCK)
        inside = index < count
        value = tl.load(label + index, mask=inside, other=0).to(tl.int64)
        mark = mixed(mixed((value + index * STEP) & HALF) ^ ((value >> 32) & HALF))
        digest += tl.where(inside, mark, 0)
        least = tl.minimum(least, tl.where(inside, value, LARGEST))
        greatest = tl.maximum(greatest, tl.where(inside, value, -LARGEST - 1))
    tl.store(found, tl.sum(digest, 0))
    tl.store(found + 1, tl.min(least, 0))
    tl.store(found + 2, tl.max(greatest, 0))


@triton.jit(do_not_specialize=VARIES)
def _mark(label, marks, totals, count, classes, BLOCK: tl.constexpr, WORDS: tl.constexpr):
    index = tl.cast(tl.program_id(0), tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(label + index, mask=index < count, other=-1).to(tl.int64)
    valid = (value >= 0) & (value < classes)
    value = tl.where(valid, value, 0)
    word = value // BITS
    bit = (value * 0 + 1).to(tl.int32) << (value % BITS).to(tl.int32)
    old = tl.atomic_or(marks + word, bit, mask=valid)
    tl.atomic_add(totals + word // WORDS, 1, mask=valid & ((old & bit) == 0))


@triton.jit(do_not_specialize=VARIES)
def _count(marks, totals, before, known, words, BLOCK: tl.constexpr, TOTALS: tl.constexpr):
    program = tl.program_id(0)
    earlier = tl.full((), 0, tl.int32)
    for begin in range(0, program, TOTALS):
        block = begin + tl.arange(0, TOTALS)
        earlier += tl.sum(tl.load(totals + block, mask=block < program, other=0), 0)
    index = program * BLOCK + tl.arange(0, BLOCK)
    word = tl.load(marks + index, mask=index < words, other=0)
    ones = _ones(word)
    at = earlier + tl.cumsum(ones, 0) - ones
    tl.store(before + index, at, mask=index < words)
    first = index.to(tl.int64) * BITS
    for number in range(BITS):
        is_set = ((word >> number) & 1) != 0
        tl.store(known + at, first + number, mask=is_set)
        at += is_set.to(tl.int32)


@triton.jit
def _others_before(known, end, value, low, steps):
    """Return the first index in ``known`` from ``low`` to ``end`` with ``value`` others before."""
    start = low
    high = low * 0 + end
    for _ in range(steps):
        middle = (low + high) // 2
        is_open = low < high
        others = tl.load(known + middle, mask=is_open, other=0).to(tl.int64) - (middle - start)
        less = is_open & (others <= value)
        low = tl.where(less, middle + 1, low)
        high = tl.where(is_open & (less == 0), middle, high)
    return low


@triton.jit(do_not_specialize=VARIES)
def _sample(
    label,
    marks,
    before,
    known,
    bounds,
    seed,
    remapped,
    sampled,
    kept,
    count,
    size,
    rank,
    samples,
    length,
    steps,
    sample_programs,
    LANES: tl.constexpr,
    SAMPLE_BLOCK: tl.constexpr,
    LABELS_BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    lane = tl.arange(0, LANES)
    owner = lane < size
    least = tl.load(bounds + lane, mask=owner, other=LARGEST)
    limit = tl.load(bounds + lane + 1, mask=owner, other=LARGEST)
    begin = _below(marks, before, least, owner)
    end = _below(marks, before, limit, owner)
    if program < sample_programs:
        mine = lane == rank
        base = tl.sum(tl.where(mine, least, 0), 0)
        classes = tl.sum(tl.where(mine, limit - least, 0), 0)
        first = tl.sum(tl.where(mine, begin, 0), 0)
        positives = tl.sum(tl.where(mine, end - begin, 0), 0)
        wanted = tl.maximum(positives, tl.cast(samples, tl.int64))
        index = tl.cast(program, tl.int64) * SAMPLE_BLOCK + tl.arange(0, SAMPLE_BLOCK)
        key = tl.load(seed) + rank
        chosen = _chosen(known, index, base, classes, first, positives, wanted, key, steps)
        tl.store(sampled + index, chosen, mask=index < length)
        if program == 0:
            tl.store(kept, wanted)
    else:
        counts = tl.where(owner, tl.maximum(end - begin, tl.cast(samples, tl.int64)), 0)
        shift = tl.cumsum(counts, 0) - counts - begin
        at = tl.cast(program - sample_programs, tl.int64) * LABELS_BLOCK
        at += tl.arange(0, LABELS_BLOCK)
        one = tl.load(label + at, mask=at < count, other=0).to(tl.int64)
        owned = (one[:, None] >= least[None, :]) & (one[:, None] < limit[None, :])
        owned = owned & owner[None, :]
        is_class = (at < count) & (tl.max(owned.to(tl.int32), 1) > 0)
        below = _below(marks, before, one, is_class)
        new_id = tl.sum(tl.where(owned, below[:, None] + shift[None, :] + 1, 0), 1) - 1
        tl.store(remapped + at, new_id, mask=at < count)


@triton.jit
def _chosen(known, place, base, classes, first, positives, wanted, key, steps):
    """Return classes of the sample by index: those of the batch, then others, then -1."""
    positive = place < positives
    other = (place >= positives) & (place < wanted)
    class_id = tl.load(known + first + place, mask=positive, other=0).to(tl.int64) - base
    drawn = permuted(place - positives, other, key, classes - positives)
    low = place * 0 + first
    passed = _others_before(known, first + positives, drawn + base, low, steps) - first
    return tl.where(positive, class_id, tl.where(other, drawn + passed, -1))
